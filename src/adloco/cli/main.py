"""The entry point of `adloco`: reads the line, runs one command and turns errors into exit codes.

Bad input ends with one sentence on stderr and exit code 2, the failure of a rank with exit code 1,
an interruption with exit code 130.
"""

import atexit
import difflib
import gc
import io
import os
import re
import sys
from argparse import SUPPRESS
from collections.abc import Container, Mapping, Sequence

from adloco.cli.ablate import Ablate
from adloco.cli.arguments import (
    Command,
    Commands,
    Parser,
    SettingsCommand,
    add_command,
)
from adloco.cli.compare import Compare
from adloco.cli.completion import Completion
from adloco.cli.config import Config
from adloco.cli.doctor import Doctor
from adloco.cli.evaluate import Evaluate
from adloco.cli.export import Export
from adloco.cli.generate import Generate
from adloco.cli.launch import Launch
from adloco.cli.plan import Plan
from adloco.cli.prepare import Prepare
from adloco.cli.probe import Probe
from adloco.cli.recipes import Recipes
from adloco.cli.report import Report
from adloco.cli.rewind import Rewind
from adloco.cli.runs import Runs
from adloco.cli.sweep import Sweep
from adloco.cli.terminal import print_error
from adloco.cli.train import Train
from adloco.config.setting_words import check_text_named, take_settings
from adloco.discovery import lab_classes
from adloco.errors import NonFiniteLossError, OtherRankError, OutOfMemoryError, exit_code
from adloco.whole_file import FULL, remedy

_OWN: tuple[type[Command], ...] = (
    *(Train, Compare, Sweep, Ablate, Plan, Runs, Recipes, Prepare, Probe),
    *(Config, Evaluate, Generate, Export, Report, Rewind, Launch, Doctor, Completion),
)
COMMANDS: Mapping[str, type[Command]] = {
    **{kind.key: kind for kind in _OWN},
    **lab_classes("command"),
}
"""The commands, in the order of the help."""

VERSION = ("-V", "--version")
QUIET_LIBRARIES = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "critical",
    # For a store that has ended, torch prints the frames of its C++ functions.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run(words)
        if sys.stdout:  # None if it was closed, as by `adloco train >&-`.
            sys.stdout.flush()  # Here, so that a closed pipe is handled below and not at exit.
        return code
    except BrokenPipeError:
        # The reader of our output went away, as in `adloco config | head`.
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print_error("interrupted")
        return 130
    except Exception as error:
        if not _is_for_users(error):
            raise
        rank = os.environ.get("RANK", "0")
        name = "adloco" if rank == "0" else f"adloco (rank {rank})"
        text = str(error)
        if isinstance(error, OSError) and error.filename and error.strerror:
            full = error.errno in FULL
            text = f"{error.filename} cannot be {'written' if full else 'used'} ({error.strerror})"
            text += f"; {remedy(error) if full else 'mend it, or give another'}"
        print_error(text, name)
        return exit_code(error)


def build_parser(only: Container[str] = COMMANDS) -> tuple[Parser, Commands]:
    """Build the parser of the whole line; return it and its commands.

    only: The commands whose arguments are needed; to read those of all takes 50 ms.
    """
    parser = Parser(
        prog="adloco",
        description="Train language models with little communication.",
        epilog="`adloco COMMAND --help` lists what a command takes.",
        allow_abbrev=False,
    )
    about = "show program's version number and exit"  # `_run` prints it.
    parser.add_argument(*VERSION, action="store_true", default=SUPPRESS, help=about)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for kind in COMMANDS.values():
        add_command(commands, kind, with_arguments=kind.key in only)
    return parser, commands


def parse_line(words: list[str]) -> Command:
    """Parse a line; ValueError if it is wrong."""
    if not words or words[0] == "help":
        words = [*words[1:], "--help"]
    name = words[0]
    parser, commands = build_parser({name})
    known = (*commands.choices, "-h", "--help", *VERSION)
    if name not in known:
        names = ", ".join(commands.choices)
        nearest = difflib.get_close_matches(name.lower(), known, n=1)
        suggestion = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        raise ValueError(f"there is no command {name!r}{suggestion}; commands are {names}")
    command = commands.choices.get(name, parser)
    kind = COMMANDS.get(name)
    settings: list[tuple[str, str]] = []
    others, takes_settings = words, False
    if kind and issubclass(kind, SettingsCommand):
        settings, others = take_settings(words, lists=kind.lists)
        check_text_named(settings)
        takes_settings = True
    given, unknown = parser.parse_known_args(others)
    if unknown:
        suggestion = _suggest(unknown[0], command, takes_settings)
        command.error(f"unrecognized arguments: {' '.join(unknown)}{suggestion}")
    assert kind  # Help has ended above.
    return kind(words=words, settings=settings, **vars(given))


def _run(words: list[str]) -> int:
    if words and words[0] in VERSION:
        # Not at the top: the modules for this take as long to import as half of all others.
        from importlib.metadata import version

        print(f"adloco {version('adloco')}")
        return 0
    try:
        command = parse_line(words)
    except SystemExit:  # argparse has printed the help.
        return 0
    # The libraries read these variables on import; the command line shows its own progress.
    for variable, level in QUIET_LIBRARIES.items():
        os.environ.setdefault(variable, level)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Rich's spinners have letters that a terminal in another encoding than UTF-8 lacks. Files
        # may get a recipe, which reads these escapes as the letters.
        sys.stdout.reconfigure(errors="replace" if sys.stdout.isatty() else "backslashreplace")
    atexit.register(_skip_last_collection)
    return command.run()


def _skip_last_collection() -> None:
    """At exit: spares Python's search of all objects of torch and transformers, over a second.

    Not with triton, whose library (nanobind) prints a line for each object that is not collected.
    """
    if "triton" not in sys.modules:
        gc.freeze()


def _suggest(word: str, command: Parser, takes_settings: bool) -> str:
    """A suggestion for an unknown word: settings by key or another name, or the nearest option."""
    # All have dashes, which would make any two similar; word processors make longer ones of two.
    option, is_setting, _ = word.partition("=")
    option = option.lstrip("-\u2013\u2014")
    if word.startswith(option):
        dotted = takes_settings and is_setting and "." in option
        return f" (did you mean --{word}?)" if dotted else ""
    options = re.findall(r"--([\w.-]+)", command.format_usage())
    meant = [f"--{name}" for name in difflib.get_close_matches(option, options, n=1)]
    if takes_settings:
        from adloco.config.finding import settings_meant, settings_near

        named = settings_meant(option) or ([] if meant else settings_near(option))
        meant = [f"--{name}" for name in named] or meant
    return f" (did you mean {' or '.join(meant)}?)" if meant else ""


def _is_for_users(error: Exception) -> bool:
    """True if the message is all that a user needs."""
    ours = (ValueError, OSError, NonFiniteLossError, OutOfMemoryError, OtherRankError)
    # Before this module is imported, no error can be torch's.
    memory = sys.modules.get("adloco.distributed.device_memory")
    return isinstance(error, ours) or bool(
        memory and isinstance(error, RuntimeError) and memory.ran_out_of_memory(error)
    )
