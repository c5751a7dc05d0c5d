"""A transfer that goes on while training does: on a thread of its own, and on a GPU on a stream of its own."""

import threading
import time
from collections.abc import Callable

import torch


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream for the transfers of a run, one after another; None where there are no streams."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


class Background:
    """Runs a function behind the caller's back. What it raises is raised by `wait`."""

    def __init__(self, function: Callable[[], None], stream: torch.cuda.Stream | None) -> None:
        self.seconds = 0.0
        """That the function has taken, after `wait`."""
        self._function = function
        self._stream = stream
        if stream:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
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
        # For this thread, as workers have the cores; put back because threads that begin later start with what was set last.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            if self._stream:
                with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
                    self._function()
                self._stream.synchronize()
            else:
                self._function()
        except BaseException as error:
            self._error = error
        finally:
            torch.set_num_threads(threads)
        self.seconds = time.monotonic() - began
