"""`adloco train`: starts or resumes a run, in this process or on several ranks of this machine."""

from argparse import Namespace
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from adloco.cli.arguments import Commands, add_command, add_ranks, read_recipe
from adloco.cli.terminal import open_console, print_error
from adloco.config.settings import RunSettings
from adloco.errors import LOST, LostRankError, require

if TYPE_CHECKING:
    from adloco.run.records import Records

RESTARTS = 3
"""How often lost ranks are started again before a round has been trained in between."""


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "train",
        run,
        summary="train a recipe, or resume a run",
        description="Train a recipe, or resume a run from its newest checkpoint.",
        takes_settings=True,
    )
    parser.add_argument("--resume", metavar="RUN", type=Path, help="folder of the run to resume")
    parser.add_argument(
        "--restart",
        action="store_true",
        help="go on with the run in --run.folder if it has begun, else begin it; with --ranks, "
        "also each time that a rank is lost",
    )
    add_ranks(parser)


def run(arguments: Namespace) -> int:
    from adloco.cli.rank_processes import RankEnd
    from adloco.cli.train_log import train_log
    from adloco.cli.training_loop import train
    from adloco.distributed.launch.launcher import num_ranks, process_group, this_rank
    from adloco.run.lengthening import absolute_budgets
    from adloco.run.training_run import TrainingRun

    resumed, settings = arguments.resume, arguments.settings
    if resumed:
        settings = arguments.settings = absolute_budgets(resumed, settings)
    require(
        not (resumed and arguments.recipe),
        f"--resume takes the recipe of the run; leave out {arguments.recipe}",
    )
    require(
        not (resumed and arguments.restart),
        "--restart goes on with the run in --run.folder; leave out --resume",
    )
    if arguments.ranks != 1 and num_ranks() == 1:
        return _run_on_ranks(arguments)
    console = open_console(quiet=this_rank() != 0)
    ending = RankEnd()
    timeout_seconds = _timeout_seconds(arguments)
    # All is done inside the group, so that bad input on one rank ends all ranks; but the log is
    # closed outside, where the error of another rank has that rank's message.
    try:
        with ExitStack() as opened, process_group(ending.after_failure, timeout_seconds):
            if arguments.restart:
                resumed, settings = _begun(arguments)
            with console.status("reading and tokenising text, building models ..."):
                training_run = (
                    TrainingRun.resume(resumed, settings)
                    if resumed
                    else TrainingRun.create(read_recipe(arguments))
                )
            ending.folder = training_run.folder
            log = opened.enter_context(train_log(training_run))
            return train(training_run, console, log, settings, ending.after_signal)
    except LostRankError as error:
        raise ending.advised(error) from None


def _begun(arguments: Namespace) -> tuple[Path | None, list[tuple[str, str]]]:
    """The folder of the run that `--restart` goes on with, the same on all ranks, and the settings
    that it is given; (None, all settings) if the run has to begin.
    """
    from adloco.distributed.launch.launcher import num_ranks
    from adloco.distributed.messages import broadcast_state
    from adloco.run.stored import CHANGEABLE, begun_run

    folder = str(begun_run(read_recipe(arguments)) or "")
    if num_ranks() > 1:
        folder = broadcast_state(folder)
    if not folder:
        return None, arguments.settings
    return Path(folder), [(name, value) for name, value in arguments.settings if name in CHANGEABLE]


def _timeout_seconds(arguments: Namespace) -> float:
    """run.timeout_seconds; its default if the recipe is wrong, which all ranks must join to say."""
    from adloco.run.stored import resumed_recipe

    try:
        if arguments.resume:
            return resumed_recipe(arguments.resume, arguments.settings).run.timeout_seconds
        return read_recipe(arguments).run.timeout_seconds
    except (ValueError, OSError):
        return RunSettings.timeout_seconds


def _run_on_ranks(arguments: Namespace) -> int:
    """Train in several processes and return the exit code.

    If memory runs out in a step that cannot be repeated, all ranks start again from the newest
    checkpoint with smaller micro-batches. With `--restart` they also do after a rank was lost,
    until that has happened `RESTARTS` times without a round in between.
    """
    from adloco.cli.rank_processes import on_ranks
    from adloco.distributed.launch.local_ranks import INTERRUPTED, start_ranks
    from adloco.run.folder import new_folder
    from adloco.run.records import Records
    from adloco.run.stored import begun_run, resumed_recipe

    count, words, resumed = arguments.ranks, arguments.words, arguments.resume
    recipe = resumed_recipe(resumed, arguments.settings) if resumed else read_recipe(arguments)
    if arguments.restart:
        begun_run(recipe)  # Refused here, once; whether it has begun, the ranks see by themselves.
        resumed = Path(recipe.run.folder)
    with nullcontext(resumed) if resumed else new_folder(recipe) as folder:
        if arguments.restart:
            begin = again = words
        elif resumed:
            # The folder's recipe has the old values of the changed settings, so a restart names
            # them again.
            settings = [f"--{name}={value}" for name, value in arguments.settings]
            begin = again = ["train", "--resume", str(folder), *settings]
        else:
            begin = [*words, "--run.folder", str(folder)]
            again = ["train", "--resume", str(folder)]
        records = Records(folder)
        limit, trained, lost = records.pass_limit(), _rounds(records), 0
        code = on_ranks(count, recipe, begin)
        while code not in (0, INTERRUPTED):
            if records.pass_limit() != limit:
                limit = records.pass_limit()
                why = f", with micro-batches of at most {limit}"
            elif arguments.restart and code == LOST and lost < RESTARTS:
                lost = 1 if _rounds(records) > trained else lost + 1
                why, trained = " because a rank was lost", _rounds(records)
            else:
                return code
            print_error(f"the ranks start again from the newest checkpoint{why}")
            code = start_ranks(count, again, recipe.run.grace_seconds)
        return code


def _rounds(records: "Records") -> int:
    return int(records.newest().get("round", 0))
