"""`adloco config`: prints a recipe with every setting, resolved and explained."""

from argparse import Namespace

from adloco.cli.arguments import Commands, add_command, read_recipe


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "config",
        run,
        summary="print a recipe with every setting and its meaning",
        description="Print a recipe with every setting and its meaning, as a TOML file. The\n"
        "default stands beside a value that differs from it.",
        takes_settings=True,
    )
    parser.add_argument(
        "--search",
        metavar="TEXT",
        help="print the settings with this in their name or meaning, and exit",
    )


def run(arguments: Namespace) -> int:
    if arguments.search is not None:
        from adloco.cli.settings_help import print_found

        return print_found(arguments)
    from adloco.config.recipe_text import to_toml

    print(to_toml(read_recipe(arguments), with_meanings=True), end="")
    return 0
