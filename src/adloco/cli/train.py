"""`adloco train`: starts or resumes a run, in this process or on several ranks of this machine."""

from argparse import Namespace
from contextlib import ExitStack, nullcontext
from pathlib import Path

from adloco.cli.arguments import Commands, add_command, add_ranks, read_recipe
from adloco.cli.terminal import open_console, print_error
from adloco.config.settings import RunSettings
from adloco.errors import LostRankError, require


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
    if arguments.ranks != 1 and num_ranks() == 1:
        return _run_on_ranks(arguments)
    console = open_console(quiet=this_rank() != 0)
    ending = RankEnd()
    timeout_seconds = _timeout_seconds(arguments)
    # All is done inside the group, so that bad input on one rank ends all ranks; but the log is
    # closed outside, where the error of another rank has that rank's message.
    try:
        with ExitStack() as opened, process_group(ending.after_failure, timeout_seconds):
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
    checkpoint with smaller micro-batches.
    """
    from adloco.cli.rank_processes import on_ranks
    from adloco.distributed.launch.local_ranks import INTERRUPTED, start_ranks
    from adloco.run.folder import new_folder
    from adloco.run.records import Records
    from adloco.run.stored import resumed_recipe

    count, words, resumed = arguments.ranks, arguments.words, arguments.resume
    recipe = resumed_recipe(resumed, arguments.settings) if resumed else read_recipe(arguments)
    with nullcontext(resumed) if resumed else new_folder(recipe) as folder:
        if resumed:
            # The folder's recipe has the old values of the changed settings, so a restart names
            # them again.
            settings = [f"--{name}={value}" for name, value in arguments.settings]
            begin = again = ["train", "--resume", str(folder), *settings]
        else:
            begin = [*words, "--run.folder", str(folder)]
            again = ["train", "--resume", str(folder)]
        records = Records(folder)
        limit = records.pass_limit()
        code = on_ranks(count, recipe, begin)
        while code not in (0, INTERRUPTED) and records.pass_limit() != limit:
            limit = records.pass_limit()
            print_error(
                "the ranks start again from the newest checkpoint, with micro-batches of at most "
                f"{limit}"
            )
            code = start_ranks(count, again, recipe.run.grace_seconds)
        return code
