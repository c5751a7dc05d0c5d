"""Filling a token cache ahead of time, with processes that tokenise while this one reads and
writes; the result does not depend on how many.
"""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread

from adloco.data.data_settings import DataSettings
from adloco.data.token_cache import TokenCache, begin_cache, reachable
from adloco.data.token_store import State
from adloco.errors import require

CHUNKS_PER_PROCESS = 2
"""Chunks in flight for each process, so that none waits for the writer."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """A cache to fill."""

    cache: TokenCache
    notice: str
    """What a person should know before; empty if nothing."""
    processes: int

    @property
    def total_rows(self) -> int | None:
        """Rows that will have been read in the end, where the recipe says how many at most."""
        data = self.cache.data
        limits = (
            [data.samples, data.validation_samples] if data.validation_split else [data.samples]
        )
        return sum(limits) if all(limits) else None

    def states(self) -> Iterator[State]:
        """Fill the cache from where it stands; yields what it holds after each chunk, at least
        once.
        """
        yield self.cache.growth.state
        if self.cache.growth.state.complete:
            return
        with _pool(self.processes) as pool:
            yield from self.cache.growth.grow(
                lambda state: state.complete, pool, ahead=CHUNKS_PER_PROCESS * self.processes
            )


def prepare(data: DataSettings, processes: int) -> Preparation:
    """The preparation of a source; it goes on from what was prepared before."""
    require(processes >= 1, f"--processes must be >= 1, got {processes}")
    require(
        not data.streaming or data.samples > 0,
        "how much of a stream to prepare must be said; set data.samples, or data.streaming to "
        "false for all of it",
    )
    notice = reachable(data)
    return Preparation(
        cache=begin_cache(data.fallback_settings() if notice else data),
        notice=notice,
        processes=processes,
    )


@contextmanager
def _pool(processes: int) -> Iterator[Executor | None]:
    if processes == 1:
        yield None
        return
    pool = ProcessPoolExecutor(
        processes, mp_context=multiprocessing.get_context("spawn"), initializer=_begin_process
    )
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_process() -> None:
    # Ctrl+C is the first process's business, and when that one is killed this one has nobody to
    # work for.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
