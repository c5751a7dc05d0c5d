"""Settings that a stage may change while a run trains, and the record of a change."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The numbers in force of the settings that may change between rounds."""

    sync_every: int
    """H, inner steps from one sync to the next."""
    eta: float | None = None
    """Tolerance of the norm test; None with another batch rule."""
    multiplier: float = 2.0
    """n, the threshold of switch mode."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting that the run has changed."""

    setting: str
    """A field of `Chosen`."""
    before: float
    after: float
    reason: str
