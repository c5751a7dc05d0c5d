"""Settings that a stage may change while a run trains, and the record of a change."""

from dataclasses import dataclass, replace

from adloco.rules.switch import SwitchMode


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The numbers in force of the settings that may change between rounds."""

    sync_every: int
    """H, inner steps from one sync to the next."""
    eta: float | None = None
    """Tolerance of the norm test; None with another batch rule."""
    multiplier: float = 2.0
    """n, the threshold of switch mode. It begins as `switch.multiplier` (set in `AdLoCo`), and
    only lab/auto changes it."""
    pass_limit: int = 0
    """Cap on micro-batches since memory ran out; 0: none."""

    def switch(self, settings: SwitchMode) -> SwitchMode:
        """Switch mode with the numbers in force."""
        return replace(settings.at_most(self.pass_limit), multiplier=self.multiplier)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting that the run has changed."""

    setting: str
    """A field of `Chosen`."""
    before: float
    after: float
    reason: str
