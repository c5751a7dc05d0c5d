"""Filling a token cache before training (`adloco prepare`).

Several processes tokenise while this one reads and writes. The result does not depend on their
number.
"""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

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
    pool = None
    if processes > 1:  # It starts them when it is given the first chunk.
        spawned = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(processes, spawned, begin_process)
    try:
        yield from store.grow(
            lambda state: state.complete, pool, ahead=CHUNKS_PER_PROCESS * processes
        )
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)
