"""Settings that a stage may change while a run trains, and the record of a change."""

from dataclasses import dataclass

from adloco.rules.switch import SwitchMode


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The numbers in force of the settings that may change between rounds."""

    sync_every: int
    """H, inner steps from one sync to the next."""
    pass_limit: int = 0
    """Cap on micro-batches since memory ran out; 0: none."""

    def switch(self, settings: SwitchMode) -> SwitchMode:
        """Switch mode with the numbers in force."""
        return settings.at_most(self.pass_limit)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting that the run has changed."""

    setting: str
    """A field of `Chosen`."""
    before: float
    after: float
    reason: str
