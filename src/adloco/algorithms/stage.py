"""The seam for options that act in a run: a list of stages, which `Round.run` calls in sight.

An option is settings in a folder of lab/, which say what the rest must know of it; its stage is
what acts.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from adloco.algorithms.reports import RoundReport
from adloco.metric import Metric
from adloco.rules.failure_signs import Sign
from adloco.rules.sync_schedule import SyncEvent

Weights = Mapping[int, float]
"""The weight of each worker of the run in a sync, by id: its samples, or less."""


class Stage:
    """Hooks by which one option acts on a run. Its methods are called on all ranks alike, and do
    nothing here; a stage overrides those that it needs.
    """

    key = ""
    """Name under which its state is saved and its numbers are reported."""

    def begin_round(self) -> None:
        """Called before the first inner step of a round, not where a stopped round continues."""

    def weights(self, event: SyncEvent, weights: Weights) -> Weights:
        """The workers' weights in a sync that is about to be sent."""
        return weights

    def report(self, report: RoundReport) -> RoundReport:
        """Called after a round's merge; returns the report with what the stage adds to it, and may
        change what is in force in the rounds to come.
        """
        return report

    def numbers(self) -> Any:
        """The stage's state, as plain numbers that every process has; None if it has none."""
        return None

    def load_numbers(self, numbers: Any) -> None:
        """Continue from `numbers` that are not None."""


class Option:
    """The settings of an option: a frozen dataclass in `lab/NAME/option.py`. What is said here of
    an option holds if it says nothing else.
    """

    key: ClassVar[str]
    """Name of its folder."""
    section: ClassVar[str]
    """Section of a recipe in which its fields are settings."""
    stage: ClassVar[str]
    """Dotted path of its `Stage`, which takes the option, the run's `RoundParts` and its state."""
    worker_metrics: ClassVar[tuple[Metric, ...]] = ()
    """Numbers of a worker that the stage adds to a round's report."""

    @property
    def active(self) -> bool:
        """True if the run has the stage."""
        return True

    def unused(self, largest: int) -> str:
        """A sentence if the option has no effect; else empty.

        largest: Workers of the largest trainer that the run can have.
        """
        return ""

    @staticmethod
    def events(record: Mapping[str, Any]) -> Iterator[str]:
        """Events of the stage in a round, as sentences that begin with whom they concern."""
        return iter(())

    @staticmethod
    def signs(record: Mapping[str, Any]) -> Iterator[Sign]:
        """Warnings that a round gives."""
        return iter(())
