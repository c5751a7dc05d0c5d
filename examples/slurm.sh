#!/bin/bash
# Two islands of eight GPUs, one per node: each node shards its worker over its GPUs (FSDP2), the nodes meet every H inner steps.
#
#   sbatch examples/slurm.sh                                                 # diloco, its two workers on as many shards as there are for each
#   sbatch examples/slurm.sh adloco --placement.shard_size 8                 # any recipe and settings
#   sbatch examples/slurm.sh --resume runs/slurm-1234                        # go on with a run, on as many nodes as this time
#
#SBATCH --job-name=adloco
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%j.log

set -euo pipefail

gpus=${SLURM_GPUS_ON_NODE:-8}
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${nodes%%$'\n'*}
words=("$@")
if [[ $# -eq 0 ]]; then
    words=(diloco --placement.shard_size 0)
fi
if [[ ${words[0]} != --resume ]]; then
    # The run folder must be on a disk that all nodes see.
    words+=(--run.folder "runs/slurm-$SLURM_JOB_ID")
fi

export OMP_NUM_THREADS=1
# On clusters with several networks, name the interface that the nodes share:
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

# The TERM that SLURM sends two minutes before the end reaches every rank: they finish their inner step, save together and stop.
# By itself torchrun kills them after 30 seconds.
grace=110
exec srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "$gpus" \
    --rdzv-backend c10d --rdzv-endpoint "$first:29400" --rdzv-id "$SLURM_JOB_ID" \
    --shutdown-timeout "$grace" \
    -m adloco train --run.grace_seconds "$grace" "${words[@]}"
