"""`adloco launch`: writes a recipe's job for a cluster's scheduler, and submits it."""

import shlex
import shutil
import subprocess
from argparse import Namespace
from datetime import datetime
from pathlib import Path

from adloco.cli.arguments import Commands, add_command
from adloco.cli.terminal import open_console
from adloco.errors import require
from adloco.whole_file import write_text

NAMES = ("slurm", "kubernetes", "skypilot")
EXAMPLES = """\
  adloco launch diloco --on slurm --islands 2 --gpus-per-island 8
  adloco launch diloco --on kubernetes --islands 2 --gpus-per-island 8 \\
      --image registry/adloco --storage runs --dry-run
"""


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "launch",
        run,
        summary="write and submit a job for SLURM, Kubernetes or SkyPilot",
        description="Write the file in which a scheduler takes a recipe: an sbatch script, a\n"
        "JobSet or a SkyPilot task. It begins a run, goes on with it after a failure or\n"
        "the end of its time, and saves before it ends. Submit it if the client is here.",
        takes_settings=True,
        epilog=EXAMPLES,
    )
    parser.add_argument("--on", required=True, choices=NAMES, metavar="NAME", help="|".join(NAMES))
    parser.add_argument(
        "--islands", type=int, required=True, metavar="N", help="groups of GPUs that share a worker"
    )
    parser.add_argument(
        "--gpus-per-island", type=int, required=True, metavar="M", help="GPUs of each of them"
    )
    parser.add_argument(
        "--gpus-per-node", type=int, metavar="G", help="default: M, so that an island is a node"
    )
    parser.add_argument(
        "--image", default="", help="container in which adloco is installed (not on SLURM)"
    )
    parser.add_argument(
        "--storage",
        default="",
        metavar="NAME",
        help="where runs are kept: a volume claim of Kubernetes, a bucket's URL for SkyPilot",
    )
    parser.add_argument(
        "--gpu", default="", metavar="KIND", help="as in H100 (SkyPilot; SLURM takes it too)"
    )
    parser.add_argument(
        "--to",
        type=Path,
        metavar="FILE",
        help="file to write; it must not exist yet (default: RECIPE-NAME.sh or .yaml)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the file; write and submit nothing"
    )


def run(arguments: Namespace) -> int:
    from adloco.cluster.job import plan_job
    from adloco.cluster.schedulers import SCHEDULERS, Surroundings

    scheduler = SCHEDULERS[arguments.on]
    job = plan_job(
        arguments.recipe or "adloco",
        arguments.settings,
        islands=arguments.islands,
        gpus_per_island=arguments.gpus_per_island,
        gpus_per_node=arguments.gpus_per_node,
        started=f"{datetime.now():%Y%m%d-%H%M%S}",
    )
    surroundings = Surroundings(image=arguments.image, storage=arguments.storage, gpu=arguments.gpu)
    scheduler.check(arguments.on, job, surroundings)
    text = scheduler.text(job, surroundings)
    if arguments.dry_run:
        print(text, end="")
        return 0
    file = arguments.to or Path(f"{job.name}-{arguments.on}{Path(scheduler.template).suffix}")
    submit = [*scheduler.submit, str(file)]
    require(
        not file.exists(),
        f"{str(file)!r} exists already; go on with its run by {shlex.join(submit)}, or name "
        "another file with --to",
    )
    require(file.parent.is_dir(), f"there is no folder {str(file.parent)!r}; make it first")
    write_text(file, text)
    console = open_console()
    if shutil.which(submit[0]) is None:
        console.print(
            f"wrote {file}; {submit[0]} is not installed here: submit it with {shlex.join(submit)}",
            soft_wrap=True,
        )
        return 0
    console.print(f"wrote {file}; {shlex.join(submit)}", soft_wrap=True)
    code = subprocess.run(submit).returncode
    require(code == 0, f"{submit[0]} ended with code {code}; correct {file}, and submit it again")
    return 0
