"""The parts that all rounds of a run share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Event

from adloco.algorithms.method import Batching, Merging, Syncing
from adloco.algorithms.planning import Planner
from adloco.distributed.placement.placement import Placement
from adloco.distributed.traffic import Bytes


@dataclass(frozen=True, kw_only=True)
class RoundParts:
    """The parts that all rounds of a run share."""

    planner: Planner
    batching: Batching
    syncing: Syncing
    merging: Merging
    placement: Placement
    clock: Callable[[], float]
    base_rate: float
    """Learning rate of the inner optimizer at a factor of 1."""
    model_bytes: int
    """Size of the trainable parameters in the model's own data type."""
    bytes_handed: Callable[[], Bytes]
    """Returns the bytes that all ranks have given to collectives since the run began."""
    islands: Mapping[int, int]
    """The island of each worker, by id, whose text it reads (`Problem.islands`)."""
    halted: Event = field(default_factory=Event)
    """Set it to stop the round once the current inner steps are done."""
