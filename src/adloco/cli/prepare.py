"""`adloco prepare`: tokenises a recipe's text into the token cache ahead of time, and checks it."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from adloco.cli.arguments import RecipeCommand, argument
from adloco.cli.progress import shown_progress
from adloco.cli.terminal import open_console
from adloco.errors import require

if TYPE_CHECKING:
    from adloco.data.token_cache import TokenCache
    from adloco.data.token_store import State


@dataclass(kw_only=True)
class Prepare(RecipeCommand):
    """Tokenise a recipe's text ahead of time. After an interruption, the same command continues.
    Code of somebody's own that the recipe names is imported, and data.factory is called.
    """

    key = "prepare"
    summary = "tokenise a recipe's text ahead of time"
    processes: int | None = argument(None, "N")
    """Processes that tokenise (default: one per core)."""
    verify: bool = argument(False)
    """Then compare all tokens with their digests; a run compares a sample."""
    check: bool = argument(False)
    """Then show rows, counts of tokens and samples."""

    def run(self) -> int:
        from adloco.cli.data_check import check_labelled, check_packed
        from adloco.data.sources import check_one_window, hold_out_more
        from adloco.data.token_cache import begin_cache
        from adloco.distributed.launch.local_ranks import INTERRUPTED
        from adloco.distributed.placement.threads import num_cores
        from adloco.tasks.kinds.classification_settings import ClassificationSettings

        console = open_console()
        recipe = self.read_recipe()
        if self.check and isinstance(recipe.task, ClassificationSettings):
            check_labelled(recipe.data, recipe.task, console)
            return 0
        require(
            recipe.task.packed,
            "adloco prepare packs text into windows, which only language models train on; "
            "a run of this task tokenises its texts when it starts",
        )
        processes = num_cores() if self.processes is None else self.processes
        require(processes >= 1, f"--processes must be >= 1, got {processes}")
        require(
            not recipe.data.streaming or recipe.data.samples > 0,
            "data.streaming is true, so say how much to prepare; set data.samples, or "
            "data.streaming to false for all of it",
        )
        for data in recipe.data.texts():
            cache = begin_cache(data)
            try:
                state = _fill(cache, processes, console)
            except KeyboardInterrupt:
                console.print(
                    f"stopped; {cache.store.state.rows:,} rows are in {cache.folder}, "
                    "and the same command continues from there",
                    soft_wrap=True,
                )
                return INTERRUPTED
            console.print(
                f"{cache.folder}: {state.train:,} tokens to train on and {state.validation:,} to "
                f"validate on, from {state.documents:,} texts in {state.rows:,} rows",
                soft_wrap=True,
            )
            if amiss := cache.skipped():
                console.print(amiss, style="bold", soft_wrap=True)
            if self.verify:
                _verify(cache, console)
            if self.check:
                check_packed(cache, console)
            if state.complete and not self.check:  # That has said so already.
                check_one_window(data, state.train, "train", " or lower data.context_tokens")
                check_one_window(data, state.validation, "evaluate", hold_out_more(data))
        return 0


def _fill(cache: "TokenCache", processes: int, console: Console) -> "State":
    """Tokenise, and show how far it is."""
    from adloco.data.token_cache import fill

    state, data = cache.store.state, cache.data
    limits = [data.samples, *([data.validation_samples] if data.validation_split else [])]
    most = sum(limits) if all(limits) else None
    rows_before, started = state.rows, time.monotonic()
    rows = rows_before
    with shown_progress(console, "tokenising", done=rows) as advance:
        for state in fill(cache, processes):
            speed = (state.rows - rows_before) / max(1e-9, time.monotonic() - started)
            tokens = state.train + state.validation
            numbers = f"{state.rows:,} rows, {tokens:,} tokens, {speed:,.0f} rows/s"
            advance(state.rows - rows, most, numbers)
            rows = state.rows
    return state


def _verify(cache: "TokenCache", console: Console) -> None:
    """Compare all tokens with their digests, and show how far it is."""
    total = len(cache.train) + len(cache.validation)
    done = 0
    with shown_progress(console, "comparing") as advance:
        for tokens in cache.store.verify():
            done += tokens
            advance(tokens, total, f"{done:,} tokens")
    console.print(f"all {done:,} tokens match their digests", soft_wrap=True)
