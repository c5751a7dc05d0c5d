"""Costs and losses of syncs: of one sum (`SumStats`), and of a worker in a round (`SyncStats`)."""

import operator
from dataclasses import astuple, dataclass, replace


@dataclass
class SumStats:
    """This rank's part of what one sum of pseudo-gradients cost and lost.

    Squared norms are taken after multiplication by the worker's weight.
    """

    wanted_sq: list[float]
    """Squared norm of each local worker's contribution before encoding."""
    sent_sq: list[float]
    """Squared norm of what each local worker sent."""
    error_sq: list[float]
    """Squared norm of the difference of the two."""
    total_sq: float = 0.0
    """This rank's part of the squared norm of the sum over all workers of what they sent.

    The parts of all ranks add up to the squared norm.
    """
    num_bytes: float = 0.0
    """Payload that the local workers sent."""
    transfer_seconds: float = 0.0
    """Seconds that the sum was in flight, filling included if it did not run in the background."""
    hidden_seconds: float = 0.0
    """The part of these seconds for which nobody waited."""

    def of_workers(self, ranks: int, *, crossing: bool) -> list["SyncStats"]:
        """This rank's part of each local worker's statistics.

        Args:
            ranks: Ranks that serve each worker, whose parts add up. Seconds are averaged over them.
            crossing: True if the sum crossed between islands.
        """
        num_bytes, seconds = self.num_bytes / len(self.sent_sq), self.transfer_seconds
        return [
            SyncStats(
                wanted_sq=wanted_sq,
                sent_sq=sent_sq,
                error_sq=error_sq,
                total_sq=self.total_sq if index == 0 else 0.0,
                num_bytes=num_bytes,
                hidden_seconds=self.hidden_seconds / ranks,
                transfer_seconds=seconds / ranks,
                peak_bytes_per_second=num_bytes / seconds if crossing and seconds else 0.0,
            )
            for index, (wanted_sq, sent_sq, error_sq) in enumerate(
                zip(self.wanted_sq, self.sent_sq, self.error_sq, strict=True)
            )
        ]


@dataclass(frozen=True)
class SyncStats:
    """Costs of a round's syncs to one worker; statistics of several syncs add up. Ranks gather them
    in float64.
    """

    wanted_sq: float = 0.0
    sent_sq: float = 0.0
    error_sq: float = 0.0
    """These three are its entries in the lists of `SumStats`."""
    total_sq: float = 0.0
    """This worker's part of the squared norm of the sum over its trainer's workers.

    The first worker of a process has the whole part of its process, the others 0.
    """
    num_bytes: float = 0.0
    """Payload of its pseudo-gradients, in one direction; what leaves a worker can be more."""
    exposed_seconds: float = 0.0
    """Seconds that training stopped for syncs, averaged over the ranks that serve it."""
    hidden_seconds: float = 0.0
    """Seconds that fragments were in flight while training continued."""
    transfer_seconds: float = 0.0
    """Seconds that fragments were in flight, hidden or not."""
    peak_bytes_per_second: float = 0.0
    """`num_bytes` over `transfer_seconds` of the fastest fragment that crossed between islands."""

    def __add__(self, other: "SyncStats") -> "SyncStats":
        sums = SyncStats(*map(operator.add, astuple(self), astuple(other)))
        peak = max(self.peak_bytes_per_second, other.peak_bytes_per_second)
        return replace(sums, peak_bytes_per_second=peak)
