"""Transfers that run while training continues, in a thread and on a GPU in a CUDA stream."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Transfer:
    """A function that runs in a background thread."""

    def __init__(
        self,
        function: Callable[[], None],
        stream: torch.cuda.Stream | None,
        after: "Transfer | None",
    ) -> None:
        """
        Args:
            function: What to run.
            stream: CUDA stream on which it runs; None: the current one.
            after: A transfer that must end first.
        """
        self.seconds = 0.0
        """Seconds that the function took; known after `wait`."""
        self._function = function
        self._stream = stream
        self._after = after
        if stream:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        self._error: BaseException | None = None
        # A daemon thread: a process that fails meanwhile must not wait for a collective's end.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the function has returned, and raise what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            if self._after:
                self._after.wait()
                self._after = None
            began = time.monotonic()
            with _one_thread():
                self._call()
            self.seconds = time.monotonic() - began
        except BaseException as error:
            self._error = error

    def _call(self) -> None:
        if self._stream is None:
            self._function()
            return
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            self._function()
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


class Transfers:
    """Runs transfers one after another, so that collectives meet in the same order on all ranks."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._last: Transfer | None = None

    def start(self, function: Callable[[], None]) -> Transfer:
        """Run the function in the background once the transfers before it have ended."""
        self._last = Transfer(function, self._stream, self._last)
        return self._last
