"""Output of commands. Text from names, files, models and other machines is shown as it is: it is no
markup, and it cannot control the terminal.
"""

import os
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Literal, TextIO, cast

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderableType, RenderHook
from rich.segment import Segment
from rich.table import Table

CONTROLS = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # Colours and movements of the cursor.
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"  # Titles of windows, links and the clipboard.
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
    r"|[\u200e\u200f\u202a-\u202e\u2066-\u2069]"  # These change the direction of text.
)


def printable(text: str, encoding: str = "utf-8") -> str:
    """The text without escape sequences and control characters other than line ends and tabs.

    What the encoding lacks, and half a surrogate pair, as in a file name that is not UTF-8, becomes
    a question mark.
    """
    return CONTROLS.sub("", text).encode(encoding, "replace").decode(encoding)


@dataclass(frozen=True)
class Printable:
    """Anything that Rich prints, with `printable` text. For what a Live display shows."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Segment]:
        for segment in console.render(self.content, options):
            # Rich's own control codes are segments apart from text.
            text = segment.text if segment.control else printable(segment.text, options.encoding)
            yield segment._replace(text=text)


def open_console(*, quiet: bool = False, trains: bool = False) -> Console:
    """A console that shows every text as it is, without what would control the terminal.

    trains: True for a run, which does not end because nobody can read what it says any more.
    """
    file = cast(IO[str], _Lossy(sys.stdout)) if trains and sys.stdout else None
    console = Console(file=file, highlight=False, markup=False, emoji=False, quiet=quiet)
    console.push_render_hook(_PrintableHook())
    return console


class _Lossy:
    """Standard output that is given up once it takes nothing more: its reader has ended, its
    terminal is gone, or its disk is full. Rich alone would end the process in the first case.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        with self._given_up():
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with self._given_up():
            self._file.flush()

    @contextmanager
    def _given_up(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            # What is still in the file's buffer goes there too, else Python's end would fail.
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self._file.fileno())
            os.close(nothing)
            print_error(
                f"standard output cannot be written ({error.strerror}); the run continues, and its "
                "train.log has what is said there"
            )


def say(console: Console, text: str, style: str | None = None, indent: str = "") -> None:
    """Print a sentence: on a terminal in lines that end between words, elsewhere on one line.

    A path that is longer than the terminal is wide stays whole, so that it can be copied.
    """
    lines = textwrap.wrap(
        text,
        console.width if console.is_terminal else len(indent + text) + 1,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in lines:
        console.print(line, style=style, soft_wrap=True)


def table_of(*columns: str, names: int = 0, title: str | None = None) -> Table:
    """An empty table; the first `names` columns hold names, and the others numbers."""
    table = Table(box=None, title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < names else "right", overflow="fold")
    return table


def print_whole(
    console: Console,
    rows: Sequence[Mapping[str, str]],
    *,
    names: Collection[str],
    least: Sequence[str],
) -> None:
    """Print a table in which no cell is broken. Columns that a terminal has no room for are left
    out; elsewhere all are printed. If no other column has room beside those that must stay, these
    are broken at half the terminal's width.

    Args:
        rows: The cells of each row, by the name of their column.
        names: The columns that hold names, and not numbers.
        least: The columns that may be left out, in this order.
    """

    def table_with(columns: Collection[str], most: int | None = None) -> Table:
        table = Table(box=None)
        for column in columns:
            side: Literal["left", "right"] = "left" if column in names else "right"
            if column in least:
                table.add_column(column, justify=side, no_wrap=True)
            else:
                table.add_column(column, justify=side, overflow="fold", max_width=most)
        for row in rows:
            table.add_row(*(row[column] for column in columns))
        return table

    def width(table: Table) -> int:
        return console.measure(table, options=console.options.update(max_width=sys.maxsize)).maximum

    columns, leaving, most = list(rows[0]), list(least), None
    if console.is_terminal:
        staying = [column for column in columns if column not in least[:-1]]
        if width(table_with(staying)) > console.width:
            most = console.width // 2
        while leaving and width(table_with(columns, most)) > console.width:
            columns.remove(leaving.pop(0))
    table = table_with(columns, most)
    console.width = max(console.width, width(table))
    console.print(table)


def print_error(sentence: str, speaker: str = "adloco") -> None:
    """Print a sentence on one line of stderr, if it can be written."""
    with suppress(OSError):
        print(f"{speaker}: {printable(' '.join(sentence.split()))}", file=sys.stderr, flush=True)


@contextmanager
def working(console: Console, what: str) -> Iterator[Callable[[str], None]]:
    """Show what is being done until the context ends; the yielded function shows another text in
    its place. Where nothing can be taken back, each text is a line; in notebooks nothing is shown,
    because Rich needs ipywidgets for that and warns without them.
    """
    if console.is_terminal and not console.is_jupyter:
        with console.status(what) as status:
            yield status.update
    else:

        def tell(text: str) -> None:
            if not console.is_jupyter:
                say(console, text)

        tell(what)
        yield tell


class _PrintableHook(RenderHook):
    """Rich calls it with all that is printed."""

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [Printable(each) for each in renderables]
