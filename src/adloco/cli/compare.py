"""`adloco compare`: several recipes or runs, on every axis, over several seeds."""

from argparse import Namespace

from adloco.cli.arguments import Commands, add_command
from adloco.cli.study_arguments import add_study_arguments
from adloco.config.sizes import read_number
from adloco.errors import require

UNTIL = ("tokens", "rounds", "inner_steps", "syncs")
EXAMPLES = """\
WHAT is a recipe, a recipe with settings of its own, or the folder of a run:

  adloco compare adloco diloco local-sgd --run.tokens 300000
  adloco compare diloco 'H50=diloco@--method.sync_every 50' --link 100mbit,20ms
  adloco compare runs/mine runs/yours --targets 1.6,1.5

Runs that are missing are trained in the study's folder (--run.folder). The same
command again continues where it was stopped, and repeats no finished run.
"""


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "compare",
        run,
        summary="compare recipes or runs on every axis",
        description="Train what is missing; compare it over tokens, steps, syncs, bytes and time.",
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
    add_study_arguments(parser, seeds=3)


def until_settings(until: list[str] | None) -> list[tuple[str, str]]:
    """The settings that give every run this budget and no other."""
    if not until:
        return []
    unit, text = until
    number = read_number(text)
    require(
        unit in UNTIL and isinstance(number, int) and number > 0,
        f"--until must be one of {', '.join(UNTIL)} and a number > 0, got {unit!r} {text!r}",
    )
    return [(f"run.{name}", str(number) if name == unit else "0") for name in UNTIL]


def run(arguments: Namespace) -> int:
    from adloco.cli.studies import run_study, study_settings
    from adloco.study.arms import plan_runs

    folder, common = study_settings(arguments, "compare-" + "-".join(arguments.whats))
    common += until_settings(arguments.until)
    runs = plan_runs(arguments.whats, common, arguments.seeds, folder)
    require(len(runs) > 1, "there is one run, and nothing to compare it with; name another WHAT")
    return run_study(runs, arguments, folder, " / ".join(dict.fromkeys(run.arm for run in runs)))
