"""adloco prepare: a source into the token cache ahead of time."""

import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from adloco.cli.commands import parser_of, take_settings
from adloco.config.recipe import build_recipe, override, read_values
from adloco.data.preparation import Preparation
from adloco.data.preparation import prepare as prepare_cache
from adloco.data.token_store import State
from adloco.distributed.launch.local_ranks import INTERRUPTED
from adloco.distributed.placement.one_process import num_cores

SECONDS_PER_LINE = 10.0


def prepare(words: Sequence[str]) -> int:
    """Tokenise the text of a recipe."""
    parser = parser_of(
        "prepare",
        "Tokenise the text of a recipe ahead of time; cut off at any point, the same command goes on.",
    )
    parser.add_argument(
        "recipe",
        nargs="?",
        default="adloco",
        help="a file, or the name of a shipped recipe (default: adloco)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=num_cores(),
        metavar="N",
        help="processes that tokenise (default: one per core)",
    )
    settings, others = take_settings(words)
    known = parser.parse_args(others)
    console = Console(highlight=False)
    recipe = build_recipe(override(read_values(known.recipe), settings))
    if not recipe.task.packed:
        raise ValueError(
            "adloco prepare packs text into windows, as language models train on; a run of this task tokenises its texts at the start"
        )
    data = recipe.data
    preparation = prepare_cache(data, known.processes)
    if preparation.notice:
        console.print(preparation.notice, style="bold red", soft_wrap=True)
    try:
        state = _show(preparation, console)
    except KeyboardInterrupt:
        state = preparation.cache.growth.state
        console.print(
            f"stopped; {state.rows:,} rows stand in {preparation.cache.folder}, and the same command goes on",
            soft_wrap=True,
        )
        return INTERRUPTED
    text = f"{state.train:,} tokens to train on and {state.validation:,} to validate on, from {state.documents:,} texts in {state.rows:,} rows"
    console.print(f"{preparation.cache.folder}: {text}", soft_wrap=True)
    if left_out := preparation.cache.skipped():
        console.print(left_out, style="bold", soft_wrap=True)
    return 0


def _show(preparation: Preparation, console: Console) -> State:
    """A bar on a terminal, a line now and then elsewhere."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("tokenising", total=preparation.total_rows, numbers="")
        state = preparation.cache.growth.state
        rows_before, started = state.rows, time.monotonic()
        shown = started
        for state in preparation.states():
            now = time.monotonic()
            speed = (state.rows - rows_before) / max(1e-9, now - started)
            numbers = f"{state.rows:,} rows, {state.train + state.validation:,} tokens, {speed:,.0f} rows/s"
            progress.update(task, completed=state.rows, numbers=numbers)
            if not console.is_terminal and now - shown > SECONDS_PER_LINE:
                shown = now
                console.print(numbers)
    return state
