"""Byte counts: what workers send to one another, and what the ranks of an island exchange.

Traffic between workers is counted as if every worker had an island of its own, so that the figure
is a property of the algorithm and not of the placement. What the ranks of one island exchange is
counted separately.

Who counts what crosses between workers: `PlainSum`, `CompressedSum`, `Comm.broadcast` and
`Placement.gather`; inside an island: `IslandGroup`, `WholeModel`, `ShardedModel`, `MatrixOwners`
and `Islands`. Of ranks that have the same tensors, each counts its own slice if they share the
exchange, else one of them counts all (`Islands.owns`, `Islands.counts`).

From there to metrics.jsonl: `Placement.total_bytes` adds up the ranks; `AdLoCo._bytes_handed`
subtracts what was counted before the run, and adds the total of the checkpoint that it continues
from; `report_round` divides by workers what crossed between them, and by ranks what did not;
`round_record` copies fields of reports by name. A second count, `SumStats.num_bytes`, is of the
sums of outer syncs alone; it becomes `sync.bytes`. Bytes of checkpoints are counted apart, by
`run/recovery.py` and elastic/.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from adloco.distributed.dtensor import local


class Bytes(NamedTuple):
    """Payload in one direction."""

    between: float
    """Payload of what workers send one another: sums, broadcasts and gathered numbers."""
    sent: float
    """Bytes that leave a worker's island for it: in a ring of W workers 2 (W - 1) / W times the
    payload.
    """
    inside: float
    """Payload of collectives among the ranks that serve one worker."""

    def __sub__(self, other: "Bytes") -> "Bytes":
        return Bytes(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


class Traffic:
    """Bytes that this process has given to collectives; see `Bytes`."""

    def __init__(self) -> None:
        self.between = 0
        self.sent = 0.0
        self.inside = 0

    def add(self, payload: int, times: float) -> int:
        """Count bytes for other workers, and return them.

        Args:
            payload: Bytes given to a collective.
            times: How often each of them leaves the island.
        """
        self.between += payload
        self.sent += payload * times
        return payload

    def total(self) -> Bytes:
        """All bytes so far."""
        return Bytes(self.between, self.sent, self.inside)


def ring(workers: int) -> float:
    """Number of times that each byte of an all-reduce in a ring leaves a worker.

    Once in the reduce-scatter and once in the all-gather, except for the worker's own part.
    """
    return 2 * (workers - 1) / workers


def num_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of these tensors; of sharded ones, the bytes of this rank's shards."""
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)
