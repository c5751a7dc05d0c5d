"""The commands of the line: a class for each, whose fields are its arguments; and the settings of a
recipe, which may stand anywhere on the line.

A setting has no argparse entry. `take_settings` (`config/setting_words.py`) cuts
`--section.key VALUE` out of the line, `override` (`config/recipe.py`) puts the text into the
recipe's values, and `build_recipe` converts it to the type of the field (`config/values.py`).
`settings_help` (`cli/settings_help.py`) lists the fields' docstrings.
"""

import argparse
import inspect
import math
import re
import textwrap
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, TypeAlias, get_args, get_origin

from adloco.errors import require
from adloco.setting import field_meanings

if TYPE_CHECKING:  # These import torch, which takes seconds; `--help` should not wait for it.
    from adloco.config.sections import Recipe
    from adloco.run.trained import Trained

SETTINGS = """\

settings:
  Any setting of the recipe can be given as --section.key VALUE, anywhere on the
  line; adloco train --help lists those of the recipe adloco, those used often
  first, and adloco config --search TEXT finds any.
"""
NUMBERS = {int: "a whole number", float: "a number"}
ARGUMENT = "argument"
"""Key in a field's metadata under which argparse's options stand."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are ValueErrors of one sentence."""

    overview: Callable[[], str] | None = None
    """Makes a text that stands below the help, when that is asked for; None: nothing does."""

    def format_help(self) -> str:
        return super().format_help() + (self.overview() if self.overview else "")

    def error(self, message: str) -> NoReturn:
        """Raise the message; argparse would print the usage and exit."""
        raise ValueError(f"{message}; see {self.prog} --help")


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def argument(
    default: Any = MISSING,
    metavar: str | tuple[str, ...] | None = None,
    *,
    flag: str = "",
    place: bool = False,
    nargs: int | str | None = None,
    again: bool = False,
) -> Any:
    """A field of a command that is an argument of the line. Its type reads the word, and the
    docstring below it is its help. A bool is a flag without a value; a list is one word, cut at
    commas, unless `nargs` or `again` says otherwise.

    Args:
        default: Its value if it is not given; without one it must be given.
        metavar: The word for a value in the help.
        flag: Its name on the line, if that is not --its-name.
        place: True if it is known by its place on the line, and has no name there.
        nargs: How many words it takes, as in argparse.
        again: True if it may be given several times, and is the list of all.
    """
    action = "append" if again else None
    options = {"metavar": metavar, "nargs": nargs, "action": action}
    given = {name: value for name, value in options.items() if value is not None}
    metadata = {ARGUMENT: (flag, place, given)}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class Command(ABC):
    """A command of `adloco`. In its help, the first paragraph of its class's docstring stands above
    the options, and the rest below them.

    Only `run` imports torch and transformers, which takes seconds: help and errors in the line
    should not wait for that.
    """

    key: ClassVar[str]
    """The word after `adloco`."""
    summary: ClassVar[str]
    """Text of `adloco --help`."""
    overview: ClassVar[Callable[[], str] | None] = None
    """Makes a text for the end of its help, where that takes time."""
    words: list[str]
    """The whole line."""
    settings: list[tuple[str, str]]
    """(section.key, value) of the settings in it."""

    @abstractmethod
    def run(self) -> int:
        """Run the command and return its exit code."""


@dataclass(kw_only=True)
class SettingsCommand(Command):
    """A command that takes --section.key VALUE."""

    lists: ClassVar[bool] = False
    """True if it takes several values behind one key."""
    recipe: str | None = None
    """The recipe that the line names; None: it names none."""

    def read_recipe(self) -> "Recipe":
        """The recipe that the line names, with the settings of the line in it."""
        from adloco.config.recipe import build_recipe, override, read_values

        return build_recipe(override(read_values(self.recipe or "adloco"), self.settings))


@dataclass(kw_only=True)
class RecipeCommand(SettingsCommand):
    """A command that takes one recipe, with settings."""

    recipe: str | None = argument(None, "RECIPE", place=True, nargs="?")
    """A file, or the name of a shipped recipe (default: adloco)."""

    def __post_init__(self) -> None:
        named = self.recipe != ""  # As by an unset variable of the shell.
        require(named, "the recipe '' has no name; name one, or leave it out for adloco")


@dataclass(kw_only=True)
class RanksCommand(RecipeCommand):
    """A command that runs on several ranks."""

    ranks: int = argument(1, "N")
    """Processes on this machine to spread the workers over (default: 1)."""


@dataclass(kw_only=True)
class MachinesCommand(RanksCommand):
    """A command that runs on several machines."""

    machines: int = argument(1, "M")
    """Machines that begin together, each by this command (default: 1); to a run, others may come
    later, and those that failed may come back."""
    meet: str = argument("", "HOST:PORT")
    """Address of the first machine, and a free port there."""


@dataclass(kw_only=True)
class StudyCommand(SettingsCommand):
    """A command over many runs."""

    seeds: int = argument(3, "N")
    """Runs of each arm (default: 3)."""
    parallel: int = argument(1, "N")
    """Runs at a time (default: 1)."""
    targets: list[float] = argument([], "LOSS,...")
    """Losses to reach (default: the highest final loss of any run)."""
    link: list[str] = argument([], "BANDWIDTH,LATENCY", again=True)
    """Model the time on a link, for instance 100mbit,20ms; may be given again."""
    force: bool = argument(False)
    """Compare runs with unequal data, model or budget, and mark it everywhere; train budgets that
    end within the first round.
    """

    def study(self, name: str) -> tuple[Path, list[tuple[str, str]]]:
        """The study's folder, and the settings that all its runs share, after a check of the line.

        name: Named after it if the line names no folder.
        """
        from adloco.run.folder import RECIPE

        given = ",".join(f"{target:g}" for target in self.targets)
        require(
            all(0 < target < math.inf for target in self.targets),
            f"--targets must be finite and > 0, got {given}",
        )
        require(self.seeds >= 1, f"--seeds must be >= 1, got {self.seeds}")
        settings = dict(self.settings)
        slug = re.sub(r"[^\w.]+", "-", name).strip("-")[:80]
        folder = Path(settings.pop("run.folder", "") or f"runs/{slug}")
        require(
            not (folder / RECIPE).exists(),
            f"--run.folder {str(folder)!r} is the folder of a run; a study needs one of its own",
        )
        return folder, list(settings.items())


@dataclass(kw_only=True)
class TrainerCommand(Command):
    """A command that takes one trainer of a run."""

    run_folder: Path = argument(metavar="RUN", place=True)
    """The run's folder."""
    trainer: int | None = argument(None, "N")
    """Trainer to take (default: the one with the lowest validation loss)."""
    trust_recipe: bool = argument(False)
    """Also run code that the folder's recipe names and the run did not begin with."""


@dataclass(kw_only=True)
class ModelCommand(TrainerCommand):
    """A command that takes the newest or the best model of a run."""

    best: bool = argument(False)
    """Take the checkpoint with the lowest validation loss of those that are kept (see
    run.keep_best; default: the newest)."""

    def load(self) -> "Trained":
        """The model of the line."""
        from adloco.run.folder import run_folder

        run_folder(self.run_folder)  # It is refused before torch is imported.
        from adloco.run.trained import load_trained

        return load_trained(
            self.run_folder,
            self.trainer,
            "best" if self.best else None,
            trust_recipe=self.trust_recipe,
        )


def add_command(commands: Commands, kind: type[Command], *, with_arguments: bool) -> None:
    """Add a command to the parser, with its arguments or only for the list of all commands."""
    description, _, below = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")
    if issubclass(kind, SettingsCommand) and not kind.overview:
        below = f"{below}\n{SETTINGS}".lstrip("\n")
    parser = commands.add_parser(
        kind.key,
        help=kind.summary,
        description=textwrap.fill(" ".join(description.split()), 80),
        epilog=below,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # --r must not silently mean --resume.
    )
    parser.overview = kind.overview
    for each in fields(kind) if with_arguments else ():
        if ARGUMENT in each.metadata:
            _add_argument(parser, each, field_meanings(kind)[each.name].replace("%", "%%"))


def _add_argument(parser: Parser, known: Field[Any], meaning: str) -> None:
    flag, place, options = known.metadata[ARGUMENT]
    options = {"help": meaning, **options}
    if known.default is not MISSING:
        options["default"] = known.default
    elif known.default_factory is not MISSING:
        options["default"] = known.default_factory()
    elif not place:
        options["required"] = True
    hint: Any = known.type
    if isinstance(hint, types.UnionType):  # With None.
        hint = get_args(hint)[0]
    if hint is bool:
        options["action"] = "store_true"
    elif get_origin(hint) is Literal:
        options["choices"] = get_args(hint)
    elif get_origin(hint) is list:
        several = options.keys() & {"nargs", "action"}
        kind = get_args(hint)[0]
        options["type"] = partial(_value if several else _between_commas, kind)
    else:
        options["type"] = partial(_value, hint)
    if place:
        parser.add_argument(known.name, **options)
    else:
        name = flag or f"--{known.name.replace('_', '-')}"
        parser.add_argument(name, dest=known.name, **options)


def _between_commas(kind: type, text: str) -> list[Any]:
    return [_value(kind, word.strip()) for word in text.split(",") if word.strip()]


def _value(kind: type, text: str) -> Any:
    """The value of an argument, with the numbers of settings: 1k, 305M."""
    if kind not in NUMBERS:
        return kind(text)
    from adloco.config.values import read_number

    number = read_number(text)
    try:
        return kind(text if number is None else str(number))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {NUMBERS[kind]}, got {text!r}") from error
