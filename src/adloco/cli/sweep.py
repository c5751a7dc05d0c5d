"""`adloco sweep`: a recipe over lists of settings."""

from argparse import Namespace
from pathlib import Path

from adloco.cli.arguments import Commands, add_command
from adloco.cli.study_arguments import add_study_arguments

EXAMPLES = """\
A setting with several values is an axis of the sweep:

  adloco sweep diloco --method.sync_every 20 50 100 --inner.lr 1e-3 2e-3

The same command again continues where it was stopped.
"""


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "sweep",
        run,
        summary="train a recipe over lists of settings",
        description="Train a recipe over lists of settings, and compare the points.",
        takes_settings="lists",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=0,
        metavar="N",
        help="random points of the grid instead of all",
    )
    parser.add_argument(
        "--halve-at",
        default="",
        metavar="PART,...",
        help="stop the worse half of the points at these parts of the budget, as in 0.25,0.5",
    )
    add_study_arguments(parser, seeds=1)  # It looks for candidates.


def run(arguments: Namespace) -> int:
    from adloco.cli.studies import run_study, study_settings
    from adloco.report.sweep_plots import draw_sweep
    from adloco.study.arms import planned_run
    from adloco.study.comparison import Comparison
    from adloco.study.grid import point_name, sweep_axes, sweep_points
    from adloco.study.halving import parse_parts

    halve_at = parse_parts(arguments.halve_at)
    recipe = arguments.recipe or "adloco"
    axes, fixed = sweep_axes(arguments.settings)
    arguments.settings = fixed
    folder, common = study_settings(arguments, f"sweep-{Path(recipe).stem}-{'-'.join(axes)}")
    points = {point_name(point): point for point in sweep_points(axes, arguments.samples)}
    runs = [
        planned_run(name, recipe, common, point, seed, folder)
        for name, point in points.items()
        for seed in range(arguments.seeds)
    ]

    def draw(comparison: Comparison) -> list[Path]:
        return draw_sweep(comparison, axes, points, folder)

    title = f"{Path(recipe).stem} over {', '.join(axes)}"
    return run_study(
        runs, arguments, folder, title, varied=list(axes), draw=draw, halve_at=halve_at
    )
