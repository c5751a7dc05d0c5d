"""The clock of a run: the seconds of training that count, over all processes that trained it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Counts seconds while it runs."""

    def __init__(self) -> None:
        self._counted = 0.0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds that it has counted."""
        running = 0.0 if self._since is None else time.monotonic() - self._since
        return self._counted + running

    def set(self, seconds: float) -> None:
        """Continue from so many seconds: those of the state from which training continues."""
        self._counted = seconds
        if self._since is not None:
            self._since = time.monotonic()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count seconds while the context lasts."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._counted, self._since = self.seconds, None
