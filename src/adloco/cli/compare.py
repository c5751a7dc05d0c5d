"""`adloco compare`: several recipes or runs, on every axis, over several seeds."""

from argparse import Namespace

from rich.console import Console

from adloco.cli.arguments import Commands, add_command
from adloco.cli.study_arguments import add_study_arguments, parse_targets
from adloco.errors import require

UNTIL = ("tokens", "rounds", "inner_steps", "syncs")
EXAMPLES = """\
WHAT is a recipe, a recipe with settings of its own, or the folder of a run:

  adloco compare adloco diloco local-sgd --seeds 3 --run.tokens 300000
  adloco compare diloco 'H50=diloco@--method.sync_every 50' --link 100mbit,20ms
  adloco compare runs/mine runs/yours --targets 1.6,1.5

Runs that are missing are trained in the study's folder (--run.folder). The same
command again goes on where it was stopped, and repeats no finished run.
"""


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "compare",
        run,
        summary="compare recipes or runs on every axis",
        description="Train what is missing, and compare recipes or runs over tokens, steps, syncs, "
        "bytes and time.",
        takes_settings=True,
        takes_recipe=False,
        epilog=EXAMPLES,
    )
    parser.add_argument("whats", nargs="+", metavar="WHAT", help="recipes or run folders")
    parser.add_argument(
        "--until",
        nargs=2,
        metavar=("UNIT", "N"),
        help=f"budget of each run, in {', '.join(UNTIL)}",
    )
    add_study_arguments(parser)


def until_settings(until: list[str] | None) -> list[tuple[str, str]]:
    """The settings that give every run this budget and no other."""
    if not until:
        return []
    unit, number = until
    require(
        unit in UNTIL and number.replace("_", "").isdecimal() and int(number) > 0,
        f"--until must be one of {', '.join(UNTIL)} and a number > 0, got {unit!r} {number!r}",
    )
    return [(f"run.{name}", number if name == unit else "0") for name in UNTIL]


def run(arguments: Namespace) -> int:
    from adloco.cli.studies import (
        print_table,
        require_equal,
        study_settings,
        train_all,
    )
    from adloco.distributed.launch.local_ranks import INTERRUPTED
    from adloco.report.compare_page import tables, write_comparison
    from adloco.study.arms import plan_runs
    from adloco.study.comparison import compare
    from adloco.study.links import Link
    from adloco.study.training import StudyInterruptedError

    console = Console(highlight=False)
    targets = parse_targets(arguments.targets)
    links = [Link.parse(text) for text in arguments.link]
    folder, common = study_settings(arguments, "compare-" + "-".join(arguments.whats))
    runs = plan_runs(
        arguments.whats, [*common, *until_settings(arguments.until)], arguments.seeds, folder
    )
    require(len(runs) > 1, "there is one run, and nothing to compare it with; name another WHAT")
    require_equal(runs, force=arguments.force)
    try:
        problems = train_all(runs, folder, arguments.parallel, console)
    except StudyInterruptedError:
        console.print("stopped and saved; the same command goes on", soft_wrap=True)
        return INTERRUPTED
    with console.status("drawing the comparison ..."):
        comparison = compare(runs, targets=targets, links=links, problems=problems)
        require(
            arguments.force or not comparison.unequal,
            f"the arms differ in {'; '.join(comparison.unequal)}; give --force to compare them all "
            "the same",
        )
        page = write_comparison(comparison, folder, " / ".join(comparison.arms))
    for table in tables(comparison):
        print_table(table, console)
    console.print(f"{comparison.statement}\n{page}", soft_wrap=True)
    return 0
