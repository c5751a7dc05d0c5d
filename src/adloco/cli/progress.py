"""Progress of a command that takes a while: a bar on a terminal, elsewhere a line now and then."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_PER_LINE = 10.0


class Advance(Protocol):
    """Shows that work was done."""

    def __call__(self, more: int, total: int | None, numbers: str = "") -> None:
        """Show it.

        Args:
            more: Units of work since the last call.
            total: Units of all work; None if not known.
            numbers: What to show beside the bar, and in a line instead of the part that is done.
        """


@contextmanager
def shown_progress(console: Console, what: str, done: int = 0) -> Iterator[Advance]:
    """Show a bar on a terminal, which goes away at the end, or a line every SECONDS_PER_LINE.

    Args:
        what: What is done; a line begins with it.
        done: Units of work that were done before.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
    )
    shown = time.monotonic()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=None, completed=done, numbers="")

        def advance(more: int, total: int | None, numbers: str = "") -> None:
            nonlocal done, shown
            done += more
            progress.update(task, completed=done, total=total, numbers=numbers)
            now = time.monotonic()
            if not console.is_terminal and now - shown >= SECONDS_PER_LINE:
                shown = now
                part = f"{done / total:.0%}" if total else f"{done:,}"
                console.print(f"{what}: {numbers or part}", soft_wrap=True)

        yield advance
