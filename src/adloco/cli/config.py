"""`adloco config`: prints a recipe with every setting, resolved and explained."""

from dataclasses import dataclass

from adloco.cli.arguments import RecipeCommand, argument


@dataclass(kw_only=True)
class Config(RecipeCommand):
    """Print a recipe with every setting and its meaning, as a TOML file. The default stands beside
    a value that differs from it. Classes of somebody's own that the recipe names are imported.
    """

    key = "config"
    summary = "print a recipe with every setting and its meaning"
    search: str | None = argument(None, "TEXT")
    """Print the settings with this in their name or meaning, and exit."""

    def run(self) -> int:
        if self.search is not None:
            from adloco.cli.settings_help import print_found

            return print_found(self, self.search)
        from adloco.config.recipe_text import to_toml

        print(to_toml(self.read_recipe(), with_meanings=True), end="")
        return 0
