#!/bin/bash
# diloco: 2 islands of 8 GPUs on 2 nodes, written by `adloco launch`.
#
# Submit it with sbatch in a folder that all nodes see; submitted again, it resumes the run.
# Options of sbatch before its name replace those below; settings of the run may follow it.
#
#SBATCH --job-name=diloco
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@130
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -euo pipefail

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=$(head -n 1 <<< "$nodes")
# Jobs that share a node need a port each, or they would share the store that ends with the first.
port=$((29400 + SLURM_JOB_ID % 3000))
# In a job array, SLURM_JOB_ID of one of the tasks is the number of them all.
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}

export OMP_NUM_THREADS=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# On clusters with several networks, name the interface that the nodes share:
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

# SLURM sends USR1 to this script before the time limit. TERM reaches every rank: they finish their
# inner step, save together and end. The job is then queued again, and resumes the run.
limit=
trap 'limit=reached; scancel --signal=TERM "$job"' USR1

srun --kill-on-bad-exit=1 --export=ALL \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} \
    torchrun --nnodes 2 --nproc-per-node 8 \
    --rdzv-backend c10d --rdzv-endpoint "$first":$port \
    --rdzv-id "$SLURM_JOB_ID" \
    --max-restarts 3 --shutdown-timeout 110 \
    -m adloco train diloco --restart \
    --run.folder runs/first \
    --run.grace_seconds 110 \
    --placement.shard_size 8 "$@" &
code=0
wait $! || code=$?
if [[ $limit ]]; then
    wait $! || true  # The signal ended the first wait.
elif [[ $code != 0 ]]; then
    # SLURM sends TERM itself to preempt a job, and does not queue one that ends in its grace time.
    limit=$(scontrol show job "$job" | grep "PreemptTime=[^N]") || true
fi
if [[ $limit ]]; then
    scontrol requeue "$job"
fi
exit $code
