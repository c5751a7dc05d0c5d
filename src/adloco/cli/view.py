"""Shows a run while it trains: a live view on a terminal (live_view.py), one display for all rounds
in a notebook, one plain line per round elsewhere, as on a terminal that cannot move its cursor
(TERM=dumb).
"""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.live import Live

from adloco.cli.live_view import LiveView
from adloco.cli.run_text import event_texts, round_text, wire_name
from adloco.metrics import Record
from adloco.rules.failure_signs import Sign
from adloco.run.training_run import TrainingRun

NOTEBOOK_COLUMNS = 110

Show = Callable[[Record, Sequence[Sign]], None]
"""Shows a round as it ends, and the warnings that begin with it."""


@contextmanager
def open_view(run: TrainingRun, console: Console, signs: Sequence[Sign] = ()) -> Iterator[Show]:
    """Open the view that suits the console until the context ends.

    signs: Warnings that were given before the run was resumed.
    """
    if console.is_jupyter and not console.quiet:
        yield _in_notebook(LiveView(run, signs))
    elif console.is_terminal and not console.is_dumb_terminal:
        view = LiveView(run, signs)
        # Live calls render() several times a second, so that progress moves within a round too.
        with Live(get_renderable=view.render, console=console, refresh_per_second=4):
            yield view.show
    else:
        yield partial(print_round, console, run)


def print_round(console: Console, run: TrainingRun, record: Record, signs: Sequence[Sign]) -> None:
    """Print one line about a round, and one for each event and warning."""
    text = round_text(record, wire_name(run), run.recipe.task.measures)
    console.print(text, soft_wrap=True)
    for text in event_texts(record):
        console.print(f"            {text}", soft_wrap=True)
    for sign in signs:
        console.print(f"            warning: {sign.text}", style="yellow", soft_wrap=True)


def _in_notebook(view: LiveView) -> Show:
    """One display of a Jupyter notebook, which every round updates.

    Rich's own live display needs ipywidgets there; without them it warns, and adds an output at
    each refresh.
    """
    from IPython.display import HTML, display

    def page() -> Any:
        paper = Console(
            file=io.StringIO(), record=True, width=NOTEBOOK_COLUMNS, force_jupyter=False
        )
        paper.print(view.render())
        return HTML(paper.export_html(inline_styles=True, code_format="<pre>{code}</pre>"))

    shown = display(page(), display_id=True)

    def show(record: Record, signs: Sequence[Sign]) -> None:
        view.show(record, signs)
        shown.update(page())

    return show
