"""`adloco recipes`: the shipped recipes and what each is for."""

from dataclasses import dataclass

from adloco.cli.arguments import Command
from adloco.config.shipped import purpose, shipped_recipes


@dataclass(kw_only=True)
class Recipes(Command):
    """List the shipped recipes and what each is for.

    `adloco config RECIPE` shows the settings of one, `adloco train RECIPE` trains
    it. Other recipes are TOML files of your own.
    """

    key = "recipes"
    summary = "list the shipped recipes"

    def run(self) -> int:
        names = shipped_recipes()
        width = max(map(len, names))
        for name in names:
            print(f"{name:<{width}}  {purpose(name)}")
        return 0
