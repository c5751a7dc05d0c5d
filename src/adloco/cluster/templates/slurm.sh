{% set first, first_port, port, id = '"$first"', port, '$port', '"$SLURM_JOB_ID"' %}
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
# Jobs that share a node need a port each, or they would share the store that ends with the first.
port=$(({{ first_port }} + SLURM_JOB_ID % 3000))
# In a job array, SLURM_JOB_ID of one of the tasks is the number of them all.
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}

export {{ variables }}
# On clusters with several networks, name the interface that the nodes share:
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

# SLURM sends USR1 to this script before the time limit. TERM reaches every rank: they finish their
# inner step, save together and end. The job is then queued again, and resumes the run.
limit=
trap 'limit=reached; scancel --signal=TERM "$job"' USR1

srun --kill-on-bad-exit=1 --export=ALL \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} \
    {% include "torchrun.sh" %} "$@" &
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
