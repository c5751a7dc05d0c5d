"""The files in which schedulers take a job: a script for SLURM, a JobSet for Kubernetes, a task for
SkyPilot (`templates/`). Each starts the job's command on every node, gives the ranks time to save
before they end, and starts them again after a node has failed.
"""

import re
import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jinja2

from adloco.cluster.job import MARGIN_SECONDS, PORT, Job
from adloco.errors import require

FOLDER = "/adloco"
"""Mount point of the storage on nodes that share no disk."""
VARIABLES = "OMP_NUM_THREADS=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
"""The second one keeps ranks that torchrun restarts away from the store of the old ones."""
NODE_RESTARTS = 10
"""Number of times that Kubernetes or SkyPilot restarts a job after a node has failed."""


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """Writes jobs and names the command that submits them."""

    template: str
    submit: tuple[str, ...]
    """The client's command that takes the file's name."""
    takes: Mapping[str, bool]
    """Surroundings that it takes, by their option of `adloco launch`; True if they are needed."""

    def check(self, name: str, job: Job, surroundings: Mapping[str, str]) -> None:
        """Raise ValueError if something is missing, or given and not used.

        name: Of this scheduler, for the message.
        """
        for option, value in surroundings.items():
            require(
                bool(value) or not self.takes.get(option, False),
                f"--on {name} needs --{option}; adloco launch --help says what it is",
            )
            require(
                not value or option in self.takes,
                f"--{option} {value!r} is not for --on {name}; leave it out",
            )
            require(  # So that templates need not quote it.
                re.fullmatch(r"[\w.:/@%+-]*", value) is not None,
                f"--{option} must have only letters, digits and . : / @ % + - _, got {value!r}",
            )
        require(
            "storage" not in self.takes or Path(FOLDER) in Path(FOLDER, job.folder).parents,
            f"run.folder must be in {FOLDER}, where the storage is mounted, got {job.folder!r}; "
            "name a relative one",
        )

    def text(self, job: Job, surroundings: Mapping[str, str]) -> str:
        """The file for the scheduler's client."""
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("adloco.cluster"),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            keep_trailing_newline=True,
        )
        environment.filters["quote"] = shlex.quote
        environment.filters["indented"] = _indented
        fields = {**vars(job), **surroundings}
        if "storage" in self.takes:  # The nodes do not see the files here.
            fields["carried"], fields["recipe"] = job.carried_recipe()
        return environment.get_template(self.template).render(
            fields,
            summary=job.summary,
            folder=FOLDER,
            port=PORT,
            variables=VARIABLES,
            node_restarts=NODE_RESTARTS,
            end_seconds=job.grace_seconds + MARGIN_SECONDS,
        )


SCHEDULERS = {
    "slurm": Scheduler(template="slurm.sh", submit=("sbatch",), takes={"gpu": False}),
    "kubernetes": Scheduler(
        template="kubernetes.yaml",
        submit=("kubectl", "apply", "-f"),
        takes={"image": True, "storage": True},
    ),
    "skypilot": Scheduler(
        template="skypilot.yaml",
        submit=("sky", "jobs", "launch"),
        takes={"image": True, "storage": True, "gpu": True},
    ),
}
"""By the name that `adloco launch --on` takes."""


def _indented(text: str, width: int) -> str:
    """The text as a block of YAML, whose lines of spaces and U+2028 stay what they are."""
    return textwrap.indent(text, " " * width, lambda line: line != "\n")
