"""The mean of a trainer's global parameters over the last rounds of training.

Averages of the iterates of SGD (Polyak and Juditsky 1992; SWA, arXiv 1803.05407) have less noise
than the last one. The mean is evaluated and exported; training does not read it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from adloco.algorithms.model_state import copy_all
from adloco.distributed.comm.buckets import sum_dtype
from adloco.distributed.dtensor import copied, local


class TailAverage:
    """The plain mean of global parameters and buffers as they were at the ends of some rounds."""

    def __init__(self) -> None:
        self.rounds = 0
        """Rounds that the mean is over; the same number in every process. 0: there is no mean."""
        self.tensors: list[Tensor] = []
        """The mean, in processes that have workers of the trainer, at least in float32."""

    @torch.no_grad()
    def add(self, values: Sequence[Tensor], *, here: bool) -> None:
        """Take one more round into the mean.

        Args:
            values: Global parameters and buffers at the end of the round.
            here: True if this process has workers of the trainer; the values are old elsewhere.
        """
        self.rounds += 1
        if not here:
            return
        if self.rounds == 1:
            self.make_room(values)
            copy_all(values, self.tensors)
        for mean, value in zip(self.tensors, values, strict=True):
            own = local(mean)
            own.lerp_(local(value).to(device=own.device, dtype=own.dtype), 1 / self.rounds)

    def reset(self) -> None:
        """Forget the mean; the next round that is added begins another one."""
        self.rounds, self.tensors = 0, []

    def make_room(self, like: Sequence[Tensor]) -> None:
        """Make tensors for the mean of such values, if there are none and a mean has begun."""
        if self.rounds and not self.tensors:
            self.tensors = [
                copied(value, to_host=False, dtype=sum_dtype(value.dtype)) for value in like
            ]
