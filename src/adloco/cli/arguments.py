"""The parts that the commands' parsers share: errors of one sentence, settings anywhere on the
line, and arguments that several commands take.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, TypeAlias

if TYPE_CHECKING:  # This imports torch, which takes seconds; `--help` should not wait for it.
    from adloco.config.sections import Recipe

COMMON_SETTINGS = {
    "run.tokens": "how many tokens to train on",
    "run.folder": "folder of the run's files",
    "run.seed": "seed of the parameters and of the data's order",
    "run.device": "auto, cpu, cuda, cuda:1, ...",
    "data.path": "text file, or folder of text files",
    "data.dataset": "Hugging Face dataset, by hub id or folder",
    "data.tokenizer": "bytes, bpe:SIZE or a Hugging Face one",
    "data.context_tokens": "length of a sample",
    "model.shape": "size of the model",
    "method.num_trainers": "models that train until they merge",
    "method.workers_per_trainer": "copies of each model, which sync",
    "method.sync_every": "inner steps from one sync to the next (H)",
    "inner.lr": "learning rate of the inner optimizer",
    "batch.rule": "rule that decides the batch",
    "wire.format": "number format of what workers send",
}
"""The settings that the help of a command lists, with their meanings."""
TRUTHS = {"true", "false", "yes", "no", "on", "off", "1", "0"}
SETTINGS_INTRODUCTION = """\
settings:
  Any setting of the recipe can be given as --section.key VALUE, anywhere on the
  line; adloco train --help lists them all. Often used are:
"""


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


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    summary: str,
    description: str,
    takes_settings: bool | Literal["lists"] = False,
    takes_recipe: bool = True,
    epilog: str = "",
) -> Parser:
    """Add a command to the parser.

    Args:
        commands: The parser's commands.
        name: The word after `adloco`.
        run: Runs the command and returns its exit code. Its arguments have `words`, the whole
            line, and `settings`, the (section.key, value) pairs in it.
        summary: Text of `adloco --help`.
        description: Text of `adloco NAME --help`.
        takes_settings: True if the command takes --section.key VALUE; "lists" if it takes several
            values behind one key.
        takes_recipe: True if a command with settings takes one RECIPE.
        epilog: Text below the options.
    """
    width = max(map(len, COMMON_SETTINGS))
    lines = [f"  --{key:<{width}}  {meaning}" for key, meaning in COMMON_SETTINGS.items()]
    parser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog="\n".join([epilog, SETTINGS_INTRODUCTION, *lines]) if takes_settings else epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # --r must not silently mean --resume.
    )
    parser.set_defaults(run=run, takes_settings=takes_settings, help_settings=None)
    if takes_settings and takes_recipe:
        parser.add_argument(
            "recipe",
            nargs="?",
            metavar="RECIPE",
            help="a file, or the name of a shipped recipe (default: adloco)",
        )
    if takes_settings:
        parser.add_argument(
            "--help-settings",
            nargs="?",
            const="",
            metavar="SECTION",
            help="list every setting, or those of a section, and exit",
        )
    return parser


def add_ranks(parser: Parser) -> None:
    """Add --ranks."""
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="processes on this machine to spread the workers over (default: 1)",
    )


def add_machines(parser: Parser) -> None:
    """Add --machines and --meet."""
    parser.add_argument(
        "--machines",
        type=int,
        default=1,
        metavar="M",
        help="machines that begin together, each by this command (default: 1); to a run, others "
        "may come later, and those that failed may come back",
    )
    parser.add_argument(
        "--meet",
        metavar="HOST:PORT",
        default="",
        help="where they meet: the address of the first machine, and a free port there",
    )


def add_trained_run(parser: Parser, *, purpose: str) -> None:
    """Add the arguments that choose a run's folder and one of its trainers.

    Args:
        parser: The command's parser.
        purpose: A verb for the help, for instance "evaluate".
    """
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument(
        "--trainer",
        type=int,
        metavar="N",
        help=f"trainer to {purpose} (default: the one with the lowest validation loss)",
    )


def add_best(parser: Parser) -> None:
    """Add --best."""
    parser.add_argument(
        "--best",
        action="store_const",
        const="best",
        help="of the checkpoints that are kept, the one with the lowest validation loss (see "
        "run.keep_best; default: the newest)",
    )


def take_settings(
    words: Sequence[str], *, lists: bool = False
) -> tuple[list[tuple[str, str]], list[str]]:
    """Separate settings from the other words of a line.

    Args:
        words: The line.
        lists: True if a key takes all values up to the next word that begins with --.

    Returns:
        (section.key, value) of every --section.key VALUE or --section.key=VALUE, and the other
        words. A setting that is true or false needs no value to be true. A list gives a pair for
        each value, and replaces one before it.

    Raises:
        ValueError: A setting has no value.
    """
    settings: list[tuple[str, str]] = []
    others, left = [], list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in name:
            others.append(word)
            continue
        if not equals and _is_bare_switch(name, left):
            settings.append((name, "true"))
            continue
        if not equals and (not left or (lists and left[0].startswith("--"))):
            raise ValueError(f"{word} needs a value, as in {word} VALUE")
        # A list that is given again replaces the first.
        settings = [pair for pair in settings if not lists or pair[0] != name]
        settings.append((name, value if equals else left.pop(0)))
        while lists and left and not left[0].startswith("--"):
            settings.append((name, left.pop(0)))
    return settings, others


def _is_bare_switch(name: str, left: Sequence[str]) -> bool:
    """True if a setting that is true or false has no value before the words that are left."""
    if left and left[0].lower() in TRUTHS:
        return False
    from adloco.config.finding import switches

    return name in switches()


def read_recipe(arguments: argparse.Namespace) -> "Recipe":
    """The recipe that the line names, with the settings of the line in it."""
    from adloco.config.recipe import build_recipe, override, read_values

    return build_recipe(override(read_values(arguments.recipe or "adloco"), arguments.settings))
