{% set first, id = '"$first"', '"$SLURM_JOB_ID"' %}
#!/bin/bash
# {{ summary }}
#
# Submit it with sbatch in a folder that all nodes see; submitted again, it resumes the run.
# Options of sbatch before its name replace those below; settings of the run may follow it.
#
#SBATCH --job-name={{ name }}
#SBATCH --nodes={{ nodes }}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={% if gpu %}{{ gpu }}:{% endif %}{{ gpus_per_node }}
#SBATCH --cpus-per-task={{ 4 * gpus_per_node }}
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@{{ end_seconds }}
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -euo pipefail

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=$(head -n 1 <<< "$nodes")

export {{ variables }}
# On clusters with several networks, name the interface that the nodes share:
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

# SLURM sends USR1 to this script before the time limit. TERM reaches every rank: they finish their
# inner step, save together and end. The job is then queued again, and resumes the run.
limit=
trap 'limit=reached; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

srun --kill-on-bad-exit=1 {% include "torchrun.sh" %} "$@" &
code=0
wait $! || code=$?
if [[ $limit ]]; then
    wait $! || true  # The signal ended the first wait.
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
