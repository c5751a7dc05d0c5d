"""A trainer: one independent training trajectory, with its own outer optimizer and requested batch.

Its workers train copies of its model. (The object with the training loop, which other libraries
call a trainer, is `AdLoCo` here.)
"""

from collections.abc import Mapping, Sequence
from typing import Any

from adloco.algorithms.outer_sync import OuterSync
from adloco.rules.controller import BatchController
from adloco.rules.moments import Moments, estimate


class Trainer:
    """Global parameters, outer optimizer, batch controller, and the workers that serve them."""

    def __init__(
        self, trainer: int, outer: OuterSync, controller: BatchController, worker_ids: Sequence[int]
    ) -> None:
        self.id = trainer
        self.outer = outer
        self.controller = controller
        self.worker_ids = list(worker_ids)
        self.samples = 0

    @property
    def requested_batch(self) -> int:
        """Samples per inner step over all workers, before clipping at what fits in memory."""
        return self.controller.requested_batch

    def update_batch(self, moments: Sequence[Moments], samples: int, decay: float) -> None:
        """Pool the workers' moments, and set the requested batch of the next round.

        Args:
            samples: Samples that all of the trainer's workers have trained on in this round.
            decay: What the decay of the learning rate's schedule has left of the rate.
        """
        self.samples += samples
        pooled = estimate(sum(moments, start=Moments()))
        self.controller.update(pooled, self.samples, decay)

    def numbers(self) -> dict[str, Any]:
        """The part of its state that every process has; the rest is that of `outer`."""
        return {
            "trainer": self.id,
            "workers": list(self.worker_ids),
            "samples": self.samples,
            "controller": self.controller.state_dict(),
        }

    def load_numbers(self, numbers: Mapping[str, Any]) -> None:
        """Continue from `numbers`."""
        self.worker_ids = list(numbers["workers"])
        self.samples = numbers["samples"]
        self.controller.load_state_dict(numbers["controller"])
