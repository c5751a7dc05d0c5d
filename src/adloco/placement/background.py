"""A transfer that goes on while training does: on a thread of its own, and on a GPU on a stream of its own."""

import threading
import time
from collections.abc import Callable

import torch


class Background:
    """Runs a function behind the caller's back. What it raises is raised by `wait`."""

    def __init__(self, function: Callable[[], None], device: torch.device) -> None:
        self.seconds = 0.0
        """That the function has taken, after `wait`."""
        self._function = function
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._error: BaseException | None = None
        # A daemon: a process that fails meanwhile must not wait for the others' part of a collective.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when the function has."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        began = time.monotonic()
        torch.set_num_threads(1)  # Of this thread: workers have the cores.
        try:
            if self._stream:
                with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                    self._function()
                self._stream.synchronize()
            else:
                self._function()
        except BaseException as error:
            self._error = error
        self.seconds = time.monotonic() - began
