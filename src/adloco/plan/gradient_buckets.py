"""Gradients of data-parallel training, which leave in buckets while the backward pass continues.

torch's DistributedDataParallel, which adloco uses, reduces a bucket as soon as the backward pass
has all of its gradients, one bucket after another. The last one is complete only when the pass
ends, so its transfer is never hidden. With very small buckets a step takes

    max(forward + backward, forward + transfer)
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

FIRST_BYTES, BYTES = 2**20, 25 * 2**20
"""Bytes of the first bucket, and of each other one; the defaults of DistributedDataParallel."""
BACKWARD = 2 / 3
"""Part of a pass that goes backward: it computes twice what the forward pass does."""


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """The buckets of a step's gradients."""

    parts: tuple[float, ...]
    """Part of all bytes that each bucket has, in the order in which they leave."""
    backward: float
    """Part of a step's seconds in which they fill up, at its end: the backward pass of the last
    micro-batch.
    """

    @staticmethod
    def of(num_bytes: float, passes: int) -> "Buckets":
        """The buckets of so many bytes, in a step of this many micro-batches."""
        rest = max(0.0, num_bytes - FIRST_BYTES)
        whole, last = divmod(rest, BYTES)
        sizes = [min(num_bytes, FIRST_BYTES), *[BYTES] * int(whole), *([last] if last else [])]
        return Buckets(parts=tuple(size / num_bytes for size in sizes), backward=BACKWARD / passes)

    def leave_at(self) -> Iterator[float]:
        """Part of a step after which each bucket is complete."""
        for part in itertools.accumulate(self.parts):
            yield 1 - self.backward * max(0.0, 1 - part)  # Sums of parts may end above 1.

    def late(self, transfer: float, step: float) -> float:
        """Seconds from the end of a step until its last bucket has arrived.

        transfer: Seconds of the transfer of all bytes.
        """
        arrived = 0.0
        for part, leaves in zip(self.parts, self.leave_at(), strict=True):
            arrived = max(arrived, leaves * step) + part * transfer
        return max(0.0, arrived - step)
