"""The files in which schedulers take a job: a script for SLURM, a JobSet for Kubernetes, a task for
SkyPilot. Each starts the job's command on every node, gives the ranks time to save when they are
told to end, and starts them again after a node was lost.
"""

import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from adloco.cluster.job import MARGIN_SECONDS, Job
from adloco.errors import require

FOLDER = "/adloco"
"""Where nodes that share no disk mount the storage."""
CORES_PER_GPU = 4
VARIABLES = "OMP_NUM_THREADS=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
"""With the second one, ranks that torchrun starts again do not meet at the store of the old ones.
"""
NODE_RESTARTS = 10
"""How often Kubernetes or SkyPilot starts a job again after a node was lost."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a scheduler must be told besides the job."""

    image: str = ""
    """A container's image in which adloco is installed."""
    storage: str = ""
    """Where the run's folder is kept: a claim of a volume (Kubernetes) or a bucket (SkyPilot)."""
    gpu: str = ""
    """The kind of GPU, as the scheduler names it."""


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """How jobs are written and submitted."""

    text: Callable[[Job, Surroundings], str]
    """Writes the file."""
    suffix: str
    submit: tuple[str, ...]
    """The client's command that takes the file's name."""
    takes: Mapping[str, bool]
    """Names of the surroundings that it takes; True if it cannot do without."""

    def check(self, name: str, job: Job, surroundings: Surroundings) -> None:
        """Raise ValueError if something is missing, or given and not used.

        name: Of this scheduler, for the message.
        """
        for option, value in vars(surroundings).items():
            require(
                bool(value) or not self.takes.get(option, False),
                f"--on {name} needs --{option}; adloco launch --help says what it is",
            )
            require(
                not value or option in self.takes,
                f"--{option} {value!r} is not for --on {name}; leave it out",
            )
            require(
                re.fullmatch(r"[\w.:/@%+-]*", value) is not None,
                f"--{option} must have only letters, digits and . : / @ % + - _, got {value!r}",
            )
        require(
            "storage" not in self.takes or Path(FOLDER) in Path(FOLDER, job.folder).parents,
            f"run.folder must be in {FOLDER}, where the storage is mounted, got {job.folder!r}; "
            "name a relative one",
        )


def slurm_text(job: Job, around: Surroundings) -> str:
    """A script for sbatch."""
    kind = f"{around.gpu}:" if around.gpu else ""
    command = job.torchrun('"$first"', ['--rdzv-id "$SLURM_JOB_ID"'], job.recipe)
    return f"""\
#!/bin/bash
# {_summary(job)}
#
# Submit it with sbatch in a folder that all nodes see; submitted again, it goes on with the run.
# Options of sbatch before its name replace those below; settings of the run may follow it.
#
#SBATCH --job-name={job.name}
#SBATCH --nodes={job.nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={kind}{job.gpus_per_node}
#SBATCH --cpus-per-task={CORES_PER_GPU * job.gpus_per_node}
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@{job.grace_seconds + MARGIN_SECONDS}
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -euo pipefail

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=$(head -n 1 <<< "$nodes")

export {VARIABLES}
# On clusters with several networks, name the interface that the nodes share:
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0

# SLURM sends USR1 to this script before the time limit. TERM reaches every rank: they finish their
# inner step, save together and end. The job is then queued again, and goes on with the run.
limit=
trap 'limit=reached; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

srun --kill-on-bad-exit=1 {command} "$@" &
code=0
wait $! || code=$?
if [[ $limit ]]; then
    wait $! || true  # The signal ended the first wait.
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


def kubernetes_text(job: Job, around: Surroundings) -> str:
    """A JobSet (jobset.x-k8s.io), which Kubeflow Trainer has too."""
    return f"""\
# {_summary(job)}
#
# The cluster needs the JobSet controller. Paths of data and run are in {FOLDER}, where the claim is
# mounted; several nodes need one with access mode ReadWriteMany.
# After `kubectl delete jobset {job.name}` and another `kubectl apply`, it goes on with the run.
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {job.name}
spec:
  failurePolicy:
    maxRestarts: {NODE_RESTARTS}
  replicatedJobs:
    - name: node
      replicas: 1
      template:
        spec:
          parallelism: {job.nodes}
          completions: {job.nodes}
          completionMode: Indexed
          backoffLimit: 0
          template:
            spec:
              restartPolicy: Never
              # Ranks that are told to end save together before.
              terminationGracePeriodSeconds: {job.grace_seconds + MARGIN_SECONDS}
              containers:
                - name: adloco
                  image: {_quoted(around.image)}
                  workingDir: {FOLDER}
                  resources:
                    limits:
                      nvidia.com/gpu: {job.gpus_per_node}
                  volumeMounts:
                    - name: storage
                      mountPath: {FOLDER}
                    - name: memory
                      mountPath: /dev/shm
                  command: [bash, -c]
                  args:
                    - |
{_indent(_container_script(job, f"{job.name}-node-0-0.{job.name}", '"$JOB_COMPLETION_INDEX"'), 22)}
              volumes:
                - name: storage
                  persistentVolumeClaim:
                    claimName: {_quoted(around.storage)}
                - name: memory
                  emptyDir:
                    medium: Memory
"""


def skypilot_text(job: Job, around: Surroundings) -> str:
    """A task of SkyPilot."""
    first = '"$(head -n 1 <<< "$SKYPILOT_NODE_IPS")"'
    script = f"cd {FOLDER}\n" + _container_script(job, first, '"$SKYPILOT_NODE_RANK"')
    return f"""\
# {_summary(job)}
#
# Paths of data and run are in {FOLDER}, where the bucket is mounted. Launched again, it goes on
# with the run.
name: {job.name}
num_nodes: {job.nodes}
resources:
  accelerators: {_quoted(f"{around.gpu}:{job.gpus_per_node}")}
  image_id: {_quoted(f"docker:{around.image}")}
  job_recovery:
    max_restarts_on_errors: {NODE_RESTARTS}
file_mounts:
  {FOLDER}:
    source: {_quoted(around.storage)}
    mode: MOUNT_CACHED  # A run appends to files, which MOUNT cannot.
run: |
{_indent(script, 2)}
"""


SCHEDULERS = {
    "slurm": Scheduler(text=slurm_text, suffix=".sh", submit=("sbatch",), takes={"gpu": False}),
    "kubernetes": Scheduler(
        text=kubernetes_text,
        suffix=".yaml",
        submit=("kubectl", "apply", "-f"),
        takes={"image": True, "storage": True},
    ),
    "skypilot": Scheduler(
        text=skypilot_text,
        suffix=".yaml",
        submit=("sky", "jobs", "launch"),
        takes={"image": True, "storage": True, "gpu": True},
    ),
}
"""By the name that `adloco launch --on` takes."""


def _summary(job: Job) -> str:
    def count(number: int, what: str) -> str:
        return f"{number} {what}{'s' if number > 1 else ''}"

    gpus = job.nodes * job.gpus_per_node // job.islands
    return (
        f"{job.name}: {count(job.islands, 'island')} of {count(gpus, 'GPU')} on "
        f"{count(job.nodes, 'node')}, written by `adloco launch`."
    )


def _container_script(job: Job, first: str, number: str) -> str:
    """What a container runs.

    Args:
        job: The job.
        first: The first node's address, as a word of a shell.
        number: This node's number, likewise.
    """
    carried, recipe = job.carried_recipe()
    # The first node's name may not be known yet when its agent asks whether it is the first.
    more = [
        f"--rdzv-id {job.name}",
        f"--rdzv-conf is_host=$([[ {number} == 0 ]] && echo true || echo false)",
    ]
    return f"{carried}export {VARIABLES}\nexec {job.torchrun(first, more, recipe)}"


def _indent(text: str, spaces: int) -> str:
    return textwrap.indent(text, " " * spaces)


def _quoted(text: str) -> str:
    """A text as a value of YAML."""
    return "'" + text.replace("'", "''") + "'"
