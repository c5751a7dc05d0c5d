"""`adloco evaluate`: prints the loss of a run's model on its validation text or on another text."""

from argparse import Namespace

from adloco.cli.arguments import Commands, add_best, add_command, add_trained_run
from adloco.cli.terminal import open_console
from adloco.errors import require


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "evaluate",
        run,
        summary="print the loss of a run's model",
        description="Print the loss of a run's model on its validation text, or on all text of\n"
        "another path.",
    )
    add_trained_run(parser, purpose="evaluate")
    add_best(parser)
    parser.add_argument(
        "--data.path",
        dest="path",
        metavar="PATH",
        help="text file, folder, jsonl or parquet to evaluate on instead",
    )
    parser.add_argument(
        "--windows",
        type=int,
        metavar="N",
        help="windows to evaluate on, evenly spaced; 0: all (default: the run's "
        "evaluation.windows)",
    )


def run(arguments: Namespace) -> int:
    from adloco.run.trained import evaluate, load_trained

    windows: int | None = arguments.windows
    require((windows or 0) >= 0, f"--windows must be >= 0, got {windows}")
    console = open_console()
    with console.status("evaluating ..."):
        trained = load_trained(arguments.run_folder, arguments.trainer, arguments.best)
        recipe = trained.stored.recipe
        require(
            not windows or recipe.task.packed,
            f"--windows counts windows of packed text, but the run in {arguments.run_folder} is "
            f"evaluated on {recipe.task.counted}; leave it out",
        )
        chosen = recipe.evaluation.windows if windows is None else windows
        measured, count = evaluate(trained, arguments.path, chosen)
    console.print(f"trainer {trained.trainer} of {trained.stored.checkpoint}", soft_wrap=True)
    numbers = [
        f"{measure.label} {measure.text(measured[measure.name])} {measure.unit.name}".rstrip()
        for measure in recipe.task.measures
        if measure.name in measured
    ]
    console.print(f"{', '.join(numbers)}, over {count:,} {recipe.task.counted}", soft_wrap=True)
    return 0
