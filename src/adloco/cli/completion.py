"""`adloco completion`: prints a script with which a shell completes what can stand on the line."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from adloco.cli.arguments import Command, SettingsCommand, argument


@dataclass(kw_only=True)
class Completion(Command):
    """Print a script that completes commands, options, recipes, settings and their values.

    Write it to a file once, and let the shell read it when it starts:

      adloco completion bash > ~/.adloco-completion
      echo 'source ~/.adloco-completion' >> ~/.bashrc

    fish reads it from ~/.config/fish/completions/adloco.fish by itself.
    """

    key = "completion"
    summary = "print a script that completes `adloco` in a shell"
    shell: Literal["bash", "zsh", "fish"] = argument(metavar="{bash,zsh,fish}", place=True)
    """The shell."""

    def run(self) -> int:
        from importlib.metadata import version

        import jinja2

        from adloco.cli.launch import Launch
        from adloco.cli.main import COMMANDS, build_parser
        from adloco.config.recipe import build_recipe, read_values
        from adloco.config.recipe_text import known_settings
        from adloco.config.shipped import shipped_recipes

        settings = list(known_settings(build_recipe(read_values("adloco"))))
        options = {
            name: {"--help", *re.findall(r"--[\w.-]+", parser.format_usage())}
            for name, parser in build_parser()[1].choices.items()
        }
        with_settings = [name for name in options if issubclass(COMMANDS[name], SettingsCommand)]
        for name in with_settings:
            options[name] |= {f"--{setting.name}" for setting in settings}
        values = {f"--{setting.name}": setting.choices for setting in settings if setting.choices}
        values["--on"] = get_args(Launch.__annotations__["on"])
        loader = jinja2.PackageLoader("adloco.cli")
        templates = jinja2.Environment(loader=loader, trim_blocks=True, keep_trailing_newline=True)
        template = "completion.fish" if self.shell == "fish" else "completion.sh"
        script = templates.get_template(template).render(
            version=version("adloco"),
            shell=self.shell,
            shells=get_args(Completion.__annotations__["shell"]),
            recipes=shipped_recipes(),
            options={name: sorted(words) for name, words in options.items()},
            values=values,
            with_settings=with_settings,
            commands_with={
                option: [name for name in options if option in options[name]]
                for option in sorted(set().union(*options.values()))
            },
        )
        print(script, end="")
        return 0
