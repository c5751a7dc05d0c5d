"""`adloco ablate`: a recipe without each of its mechanisms, and without all."""

from argparse import Namespace
from pathlib import Path

from adloco.cli.arguments import Commands, add_command
from adloco.cli.study_arguments import add_study_arguments

EXAMPLES = """\
Mechanisms, and what the recipe is without them (docs/studies.md):

  adaptive-batch   the batch stays at batch.initial
  merging          all trainers live to the end
  switch-mode      what does not fit is accumulated at once, not above n times
  accumulation     the batch is capped at what fits
"""


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "ablate",
        run,
        summary="train a recipe without each of its mechanisms",
        description="Train a recipe, the same without each of its mechanisms, and without all.",
        takes_settings=True,
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "--without",
        metavar="NAME,...",
        help="mechanisms to leave out (default: those of adaptive-batch, merging and switch-mode "
        "that the recipe has)",
    )
    add_study_arguments(parser, seeds=3)


def run(arguments: Namespace) -> int:
    from adloco.cli.studies import run_study, study_settings
    from adloco.study.ablation import ablated_arms, own_mechanisms
    from adloco.study.arms import planned_run

    recipe = arguments.recipe or "adloco"
    stem = Path(recipe).stem
    folder, common = study_settings(arguments, f"ablate-{stem}")
    whole = planned_run(stem, recipe, common, (), 0, folder).recipe
    if arguments.without is None:
        names = own_mechanisms(whole)
    else:
        names = [name for name in arguments.without.split(",") if name]
    runs = [
        planned_run(name, recipe, common, flags, seed, folder)
        for name, flags in ablated_arms(whole, names).items()
        for seed in range(arguments.seeds)
    ]
    return run_study(runs, arguments, folder, f"{stem} without {', '.join(names)}")
