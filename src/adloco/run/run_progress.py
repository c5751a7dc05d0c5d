"""Progress of a run: its tokens, its seconds and its budget, with the round in progress."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a run; cheap enough to ask for many times a second."""

    tokens: int
    rows: int | None
    """Rows of a stream read so far; None without a stream."""
    seconds: float
    part: float
    """The part of the budget that is used, from 0 to 1."""
    budget: str
    """Progress in the budget, in words."""
    inner_step: int
    """Inner steps done in the round in progress; 0 between rounds."""
    round_steps: int
    """Inner steps of the round in progress; 0 between rounds."""


class Clock:
    """The seconds of training that count, over all processes that trained the run.

    seconds: Those of the state from which training continues.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self._counted = seconds
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds that it has counted."""
        running = 0.0 if self._since is None else time.monotonic() - self._since
        return self._counted + running

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count seconds while the context lasts."""
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._counted, self._since = self.seconds, None
