"""Filling a token cache before training (`adloco prepare`).

Several processes tokenise while this one reads and writes. The result does not depend on their
number.
"""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager

from adloco.data.encoding import begin_process
from adloco.data.token_cache import TokenCache
from adloco.data.token_store import State

CHUNKS_PER_PROCESS = 2
"""Chunks of rows in flight for each process, so that no process waits for the writer."""


def fill(cache: TokenCache, processes: int) -> Iterator[State]:
    """Fill a cache, continuing from its content; yields its state first and after each chunk.

    Args:
        cache: From `begin_cache`.
        processes: Processes that tokenise; with 1, this process does it.

    Raises:
        ValueError: The source cannot be read.
    """
    store = cache.store
    yield store.state
    if not store.state.complete:
        with _pool(processes) as pool:
            yield from store.grow(
                lambda state: state.complete, pool, ahead=CHUNKS_PER_PROCESS * processes
            )


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
