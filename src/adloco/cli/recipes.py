"""`adloco recipes`: the shipped recipes and what each is for."""

from argparse import Namespace

from adloco.cli.arguments import Commands, add_command
from adloco.config.shipped import purpose, shipped_recipes


def add_parser(commands: Commands) -> None:
    add_command(
        commands,
        "recipes",
        run,
        summary="list the shipped recipes",
        description="List the shipped recipes and what each is for.",
        epilog="`adloco config RECIPE` shows the settings of one, `adloco train RECIPE` trains\n"
        "it. Other recipes are TOML files of your own.",
    )


def run(arguments: Namespace) -> int:
    names = shipped_recipes()
    width = max(map(len, names))
    for name in names:
        print(f"{name:<{width}}  {purpose(name)}")
    return 0
