"""Filling a token cache before training (`adloco prepare`).

Several processes tokenise while this one reads and writes. The result does not depend on their
number.
"""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from adloco.data.data_settings import DataSettings
from adloco.data.encoding import begin_process
from adloco.data.token_cache import TokenCache, begin_cache
from adloco.data.token_store import State
from adloco.errors import require

CHUNKS_PER_PROCESS = 2
"""Chunks of rows in flight for each process, so that no process waits for the writer."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """A token cache and the number of processes that fill it."""

    cache: TokenCache
    processes: int
    """Processes that tokenise; with 1, this process does it."""

    @property
    def total_rows(self) -> int | None:
        """Largest number of rows that will be read; None if the recipe sets no limit."""
        data = self.cache.data
        limits = (
            [data.samples, data.validation_samples] if data.validation_split else [data.samples]
        )
        return sum(limits) if all(limits) else None

    def states(self) -> Iterator[State]:
        """Fill the cache, continuing from its content; yields its state first and after each
        chunk.
        """
        yield self.cache.store.state
        if self.cache.store.state.complete:
            return
        with _pool(self.processes) as pool:
            yield from self.cache.store.grow(
                lambda state: state.complete, pool, ahead=CHUNKS_PER_PROCESS * self.processes
            )


def prepare(data: DataSettings, processes: int) -> Preparation:
    """Open the token cache of a source; filling it continues from what was prepared before.

    Args:
        data: Names the source and the tokenizer.
        processes: Number of processes that tokenise, at least 1.

    Raises:
        ValueError: A setting does not fit, or the source cannot be read.
    """
    require(processes >= 1, f"--processes must be >= 1, got {processes}")
    require(
        not data.streaming or data.samples > 0,
        "data.streaming is true, so say how much to prepare; set data.samples, or data.streaming "
        "to false for all of it",
    )
    return Preparation(cache=begin_cache(data), processes=processes)


@contextmanager
def _pool(processes: int) -> Iterator[Executor | None]:
    if processes == 1:
        yield None
        return
    pool = ProcessPoolExecutor(
        processes, mp_context=multiprocessing.get_context("spawn"), initializer=begin_process
    )
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
