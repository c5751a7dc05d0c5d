"""Shows a run while it trains: a live view on a terminal (live_view.py), one display for all rounds
in a notebook, one plain line per round elsewhere.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live

from adloco.cli.live_view import LiveView
from adloco.cli.run_text import event_texts, round_text, wire_name
from adloco.metrics import Metric, Record
from adloco.rules.failure_signs import Sign
from adloco.run.training_run import TrainingRun

NOTEBOOK_COLUMNS = 110


class View(Protocol):
    """Shows rounds as they end."""

    def show(self, record: Record, signs: Sequence[Sign] = ()) -> None:
        """Show a round, and the warnings that begin with it."""
        ...


@contextmanager
def open_view(run: TrainingRun, console: Console, signs: Sequence[Sign] = ()) -> Iterator[View]:
    """Open the view that suits the console until the context ends.

    Args:
        run: The run.
        console: Where to show it.
        signs: Warnings that were given before the run was resumed.
    """
    if console.is_jupyter and not console.quiet:
        yield NotebookView(LiveView(run, signs))
    elif console.is_terminal:
        view = LiveView(run, signs)
        # Live calls render() several times a second, so that progress moves within a round too.
        with Live(get_renderable=view.render, console=console, refresh_per_second=4):
            yield view
    else:
        yield PlainView(console, wire_name(run), run.recipe.task.measures)


@dataclass
class PlainView:
    """Prints one line per round."""

    console: Console
    wire: str
    """The value of `wire.format`, which encodes the pseudo-gradients."""
    measures: Sequence[Metric]
    """What the task measures in an evaluation, the loss first."""

    def show(self, record: Record, signs: Sequence[Sign] = ()) -> None:
        self.console.print(round_text(record, self.wire, self.measures), soft_wrap=True)
        for text in event_texts(record):
            self.console.print(f"            {text}", soft_wrap=True)
        for sign in signs:
            self.console.print(f"            warning: {sign.text}", style="yellow", soft_wrap=True)


class NotebookView:
    """One display of a Jupyter notebook, which every round updates.

    Rich's own live display needs ipywidgets there; without them it warns, and adds an output at
    each refresh.
    """

    def __init__(self, view: LiveView) -> None:
        from IPython.display import display

        self._view = view
        self._display = display(self._page(), display_id=True)

    def show(self, record: Record, signs: Sequence[Sign] = ()) -> None:
        self._view.show(record, signs)
        self._display.update(self._page())

    def _page(self) -> Any:
        from IPython.display import HTML

        paper = Console(
            file=io.StringIO(), record=True, width=NOTEBOOK_COLUMNS, force_jupyter=False
        )
        paper.print(self._view.render())
        return HTML(paper.export_html(inline_styles=True, code_format="<pre>{code}</pre>"))
