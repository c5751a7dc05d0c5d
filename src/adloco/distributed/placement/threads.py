"""Runs the workers of one process in threads, one per core.

On CPUs, threads beat processes, vmap and stacking for models of about a million parameters (1.9x
the speed of running workers one after another, on two cores), because torch releases the
interpreter lock inside its operators. Several workers compute with one intra-operator thread each,
however many of them run at once, so the numbers do not depend on the number of threads. A single
worker uses all cores.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def map_in_threads(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    on_failure: Callable[[], None],
    threads: int,
    device: torch.device,
) -> list[Result]:
    """Call the function on each item, on so many at once; see `Placement.map`."""

    on_gpu = device.type == "cuda"
    # Each thread has its own current device; one without a number is the caller's.
    gpu = torch.cuda.current_device() if on_gpu and device.index is None else device.index

    def set_up() -> None:
        # One intra-operator thread per worker: two busy workers with two each ran 70x slower.
        torch.set_num_threads(1)
        if on_gpu:
            torch.cuda.set_device(gpu)

    with ThreadPoolExecutor(threads, initializer=set_up) as pool:
        try:
            futures = [pool.submit(function, item) for item in items]
            _wait(futures, on_failure)
        except BaseException:  # After Ctrl+C the threads must not train on.
            on_failure()
            raise
    return [future.result() for future in futures]


def _wait(futures: Sequence[Future[Result]], on_failure: Callable[[], None]) -> None:
    pending = set(futures)
    while pending:
        # The timeout lets the main thread run now and then: Python handles signals only there.
        ended, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
        if any(future.exception() for future in ended):
            on_failure()


def set_up_arithmetic() -> None:
    """Make the process's first cosine and matrix products here, where nothing else runs.

    MKL's vector mathematics (cosines, exponentials and the like) sets itself up on its first call.
    When two threads made it at once, the cosines of one differed in rounding in 18 of 22,032
    processes, and so did the rest of such a run. After this it was 0 of 6,590. The products are
    there because a first gradient differed so on another machine (reproduce/LOG.md, 2026-11-29).
    """
    square = torch.ones(256, 256, device="cpu")
    for left, right in ((square, square), (square.T, square), (square, square.T)):
        torch.mm(left, right)
    square.cos()


def num_cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
