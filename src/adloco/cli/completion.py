"""`adloco completion`: prints a script with which a shell completes commands, options, recipes,
settings and their values.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from adloco.cli.arguments import Command, SettingsCommand, argument

SCRIPT = """\
# Completion of adloco {version}, written by `adloco completion {shell}`.
{start}
_adloco() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
    # The = of --section.key=value is a word of its own.
    if [[ "$word" == "=" ]]; then word=""; fi
    if [[ "$before" == "=" ]]; then before="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
    if [[ $COMP_CWORD -eq 1 ]]; then
        words="{commands} --help --version"
    elif [[ "$word" == -* ]]; then
        case "${{COMP_WORDS[1]}}" in
{options}
        esac
    else
        case "$before" in
{values}
            --*) ;;
            *)
                case "${{COMP_WORDS[1]}}" in
                    {with_settings}) words="{recipes}" ;;
                    completion) words="{shells}" ;;
                esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
# Where nothing fits, the shell completes the names of files.
complete -o default -F _adloco adloco
"""
SHELLS = ("bash", "zsh", "fish")
ZSH_START = "autoload -Uz compinit bashcompinit && compinit && bashcompinit"


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
        from adloco.cli.launch import Launch
        from adloco.cli.main import COMMANDS, build_parser
        from adloco.cli.settings_help import known_settings
        from adloco.config.recipe import build_recipe, read_values
        from adloco.config.sections import SECTIONS
        from adloco.config.shipped import shipped_recipes

        _, commands = build_parser()
        settings = list(known_settings(build_recipe(read_values("adloco"))))
        flags = [f"--{setting.name}" for setting in settings]
        takes = {name: issubclass(kind, SettingsCommand) for name, kind in COMMANDS.items()}
        options = {
            name: ["--help", *re.findall(r"--[\w.-]+", parser.format_usage())]
            + (flags if takes[name] else [])
            for name, parser in commands.choices.items()
        }
        values: dict[str, Sequence[str]] = {
            f"--{setting.name}": setting.choices for setting in settings if setting.choices
        }
        values |= {
            "--help-settings": list(SECTIONS),
            "--on": get_args(Launch.__annotations__["on"]),
        }
        if self.shell == "fish":
            print(_fish(options, values, takes, shipped_recipes()), end="")
            return 0
        print(
            SCRIPT.format(
                version=_version(),
                shell=self.shell,
                start=ZSH_START if self.shell == "zsh" else "",
                commands=" ".join(commands.choices),
                options=_cases({name: sorted(words) for name, words in options.items()}),
                values=_cases(values),
                with_settings="|".join(filter(takes.get, takes)),
                recipes=" ".join(shipped_recipes()),
                shells=" ".join(SHELLS),
            ),
            end="",
        )
        return 0


def _cases(words: dict[str, Sequence[str]]) -> str:
    """Branches of a shell's `case`, one for each key."""
    return "\n".join(f'            {key}) words="{" ".join(words[key])}" ;;' for key in words)


def _fish(
    options: Mapping[str, Sequence[str]],
    values: Mapping[str, Sequence[str]],
    takes_settings: Mapping[str, object],
    recipes: Sequence[str],
) -> str:
    """The script for fish: a line for each option, with the commands that have it."""

    def after(commands: Iterable[str]) -> str:
        return f"complete -c adloco -n '__fish_seen_subcommand_from {' '.join(commands)}'"

    begin = "complete -c adloco -n __fish_use_subcommand"
    named = [name for name, takes in takes_settings.items() if takes]
    lines = [
        f"# Completion of adloco {_version()}, written by `adloco completion fish`.",
        f"{begin} -f -a '{' '.join(options)}'",
        f"{begin} -l help",
        f"{begin} -l version",
        f"{after(['completion'])} -f -a '{' '.join(SHELLS)}'",
        f"{after(named)} -a '{' '.join(recipes)}'",
    ]
    for option in sorted({option for known in options.values() for option in known}):
        line = f"{after(name for name in options if option in options[name])} -l {option[2:]}"
        if option in values:
            line += f" -x -a '{' '.join(values[option])}'"
        elif "." in option:
            line += " -r"
        lines.append(line)
    return "\n".join([*lines, ""])


def _version() -> str:
    from importlib.metadata import version  # Its modules take as long to import as half of others.

    return version("adloco")
