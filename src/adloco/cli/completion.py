"""`adloco completion`: prints a script with which a shell completes commands, options, recipes,
settings and their values.
"""

import re
from argparse import Namespace
from collections.abc import Sequence
from importlib import metadata

from adloco.cli.arguments import Commands, add_command

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
                    completion) words="bash zsh" ;;
                esac ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
# Where nothing fits, the shell completes the names of files.
complete -o default -F _adloco adloco
"""
ZSH_START = "autoload -Uz compinit bashcompinit && compinit && bashcompinit"


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "completion",
        run,
        summary="print a script that completes `adloco` in bash or zsh",
        description="Print a script that completes commands, options, recipes, settings and their\n"
        "values. Write it to a file once, and let the shell read it when it starts:\n\n"
        "  adloco completion bash > ~/.adloco-completion\n"
        "  echo 'source ~/.adloco-completion' >> ~/.bashrc",
    )
    parser.add_argument("shell", choices=["bash", "zsh"], metavar="{bash,zsh}", help="the shell")


def run(arguments: Namespace) -> int:
    from adloco.cli.main import build_parser
    from adloco.cli.settings_help import known_settings
    from adloco.config.recipe import build_recipe, read_values
    from adloco.config.sections import SECTIONS
    from adloco.config.shipped import shipped_recipes

    _, commands = build_parser()
    settings = list(known_settings(build_recipe(read_values("adloco"))))
    flags = [f"--{setting.name}" for setting in settings]
    takes = {
        name: parser.get_default("takes_settings") for name, parser in commands.choices.items()
    }
    options = {
        name: ["--help", *re.findall(r"--[\w.-]+", parser.format_usage())]
        + (flags if takes[name] else [])
        for name, parser in commands.choices.items()
    }
    values = {f"--{setting.name}": setting.choices for setting in settings if setting.choices}
    print(
        SCRIPT.format(
            version=metadata.version("adloco"),
            shell=arguments.shell,
            start=ZSH_START if arguments.shell == "zsh" else "",
            commands=" ".join(commands.choices),
            options=_cases({name: sorted(words) for name, words in options.items()}),
            values=_cases(values | {"--help-settings": list(SECTIONS)}),
            with_settings="|".join(name for name, has_settings in takes.items() if has_settings),
            recipes=" ".join(shipped_recipes()),
        ),
        end="",
    )
    return 0


def _cases(words: dict[str, Sequence[str]]) -> str:
    """Branches of a shell's `case`, one for each key."""
    return "\n".join(f'            {key}) words="{" ".join(words[key])}" ;;' for key in words)
