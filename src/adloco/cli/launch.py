"""`adloco launch`: writes a recipe's job for a cluster's scheduler, and submits it."""

import shlex
import shutil
import subprocess
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from adloco.cli.arguments import RecipeCommand, argument
from adloco.cli.terminal import open_console
from adloco.errors import require
from adloco.whole_file import write_text


@dataclass(kw_only=True)
class Launch(RecipeCommand):
    r"""Write the file in which a scheduler takes a recipe: an sbatch script, a JobSet or a SkyPilot
    task. It begins a run, resumes it after a failure or the end of its time, and saves before
    it ends. Submit it if the client is here.

      adloco launch diloco --on slurm --islands 2 --gpus-per-island 8
      adloco launch diloco --on kubernetes --islands 2 --gpus-per-island 8 \
          --image registry/adloco --storage runs --dry-run
    """

    key = "launch"
    summary = "write and submit a job for SLURM, Kubernetes or SkyPilot"
    on: Literal["slurm", "kubernetes", "skypilot"] = argument(metavar="NAME")
    """One of slurm, kubernetes, skypilot."""
    islands: int = argument(metavar="N")
    """Groups of GPUs that share a worker."""
    gpus_per_island: int = argument(metavar="M")
    """GPUs of each of them."""
    gpus_per_node: int | None = argument(None, "G")
    """Default: M, so that an island is a node."""
    image: str = argument("")
    """Container in which adloco is installed (not on SLURM)."""
    storage: str = argument("", "NAME")
    """Storage of runs: a volume claim of Kubernetes, a bucket's URL for SkyPilot."""
    gpu: str = argument("", "KIND")
    """Kind of GPU, for instance H100 (SkyPilot; SLURM takes it too)."""
    to: Path | None = argument(None, "FILE")
    """File to write; it must not exist yet (default: RECIPE-NAME.sh or .yaml)."""
    dry_run: bool = argument(False)
    """Print the file; write and submit nothing."""

    def run(self) -> int:
        from adloco.cli import elastic_room
        from adloco.cluster.job import plan_job
        from adloco.cluster.schedulers import SCHEDULERS

        scheduler = SCHEDULERS[self.on]
        job = plan_job(
            self.recipe or "adloco",
            self.settings,
            islands=self.islands,
            gpus_per_island=self.gpus_per_island,
            gpus_per_node=self.gpus_per_node,
            started=f"{datetime.now():%Y%m%d-%H%M%S}",
        )
        surroundings = {"image": self.image, "storage": self.storage, "gpu": self.gpu}
        scheduler.check(self.on, job, surroundings)
        elastic_room.check_job(self.read_recipe().run)
        text = scheduler.text(job, surroundings)
        if self.dry_run:
            print(text, end="")
            return 0
        file = self.to or Path(f"{job.name}-{self.on}{Path(scheduler.template).suffix}")
        submit = [*scheduler.submit, str(file)]
        require(
            not file.exists(),
            f"{str(file)!r} exists already; resume its run by {shlex.join(submit)}, or name "
            "another file with --to",
        )
        require(file.parent.is_dir(), f"there is no folder {str(file.parent)!r}; make it first")
        write_text(file, text)
        console = open_console()
        if shutil.which(submit[0]) is None:
            why = f"{submit[0]} is not installed here: submit it with {shlex.join(submit)}"
            console.print(f"wrote {file}; {why}", soft_wrap=True)
            return 0
        console.print(f"wrote {file}; {shlex.join(submit)}", soft_wrap=True)
        code = subprocess.run(submit).returncode
        require(
            code == 0, f"{submit[0]} ended with code {code}; correct {file}, and submit it again"
        )
        return 0
