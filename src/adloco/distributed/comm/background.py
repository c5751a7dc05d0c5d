"""Transfers that run while training continues, in a thread and on a GPU in a CUDA stream."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from adloco.distributed.device import new_stream


class Transfers:
    """Runs transfers one after another, so that collectives meet in the same order on all ranks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = new_stream(device)
        self._last: Future[float] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return Transfers, (self._device,)  # A copy has a stream of its own, and nothing in flight.

    def start(self, function: Callable[[], None]) -> Future[float]:
        """Run the function in the background once the transfers before it have ended; the result is
        the seconds that it took.
        """
        before, done = self._last, Future[float]()
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

        def run() -> None:
            try:
                if before:
                    before.result()
                began = time.monotonic()
                with _one_thread():
                    self._call(function)
                done.set_result(time.monotonic() - began)
            except BaseException as error:
                done.set_exception(error)

        # A daemon thread: a process that fails meanwhile must not wait for a collective's end.
        threading.Thread(target=run, daemon=True).start()
        self._last = done
        return done

    def finish(self) -> None:
        """Wait for all transfers: two threads could begin collectives of one group in another order
        than they do on other ranks.
        """
        if self._last:
            self._last.result()

    def _call(self, function: Callable[[], None]) -> None:
        if self._stream is None:
            function()
            return
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            function()
        self._stream.synchronize()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one intra-operator thread inside, to leave the cores to the workers.

    The setting is put back at the end, because later threads start with what was set last.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
