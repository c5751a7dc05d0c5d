"""The protocol of reductions among workers, with one entry for each local worker.

Local entries are added first. A communicator over several ranks then reduces over its group, and
callers cannot tell the difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from adloco.distributed.comm.background import Transfers
from adloco.distributed.comm.buckets import PerWorker
from adloco.distributed.wire.feedback import Feedback
from adloco.distributed.wire.wire_format import WireFormat


@dataclass(frozen=True, kw_only=True)
class Contributions:
    """What the local workers contribute to a mean of pseudo-gradients."""

    per_worker: PerWorker
    """The parameters of each local worker."""
    weights: Sequence[float]
    """One number for each local worker. Over all workers of the mean they add up to 1."""
    origin: Sequence[Tensor]
    """The global parameters, from which the workers' are subtracted. May be in host memory.

    They are rounded to the type of a worker's parameters before the subtraction. Empty: what
    workers contribute is added up as it is, without a subtraction; only in a wire format.
    """
    wire: WireFormat | None = None
    """The wire format; None: differences are sent uncompressed."""
    feedback: Feedback = field(default_factory=Feedback)
    """What is kept of what encoding loses, if there are residuals."""
    residuals: PerWorker = ()
    """With error feedback, what each local worker has not sent so far, but for what is in its
    parameters. Changed in place. Empty: what encoding loses is lost."""


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

    @staticmethod
    def zero(num_workers: int) -> "SumStats":
        """Statistics of workers that sent nothing."""
        return SumStats([0.0] * num_workers, [0.0] * num_workers, [0.0] * num_workers)

    @staticmethod
    def lossless(sent_sq: Tensor) -> "SumStats":
        """Statistics of workers that sent without loss.

        sent_sq: The squared norms of what they sent, shape (workers,).
        """
        return SumStats(sent_sq.tolist(), sent_sq.tolist(), [0.0] * len(sent_sq))


class Work(Protocol):
    """A sum over workers that has been started."""

    stats: SumStats
    """Complete after `wait`."""
    background_seconds: float
    """Seconds that the exchange took in the background, after `wait`; 0 if it ran in `wait`."""

    def wait(self) -> list[Tensor]:
        """Return the sum, the same bits on all islands. May be called once."""
        ...


class CompletedWork:
    """A sum that needed no other rank."""

    background_seconds = 0.0

    def __init__(self, sums: list[Tensor], stats: SumStats) -> None:
        self.stats = stats
        self._sums = sums

    def wait(self) -> list[Tensor]:
        return self._sums


class Exchange(Protocol):
    """The two halves of a sum over several ranks."""

    stats: SumStats

    def transfer(self) -> None:
        """Return when everything has been exchanged. May be called once, in any thread."""
        ...

    def result(self) -> list[Tensor]:
        """Return the sum. Called after `transfer`."""
        ...


class ExchangeWork:
    """A sum whose exchange runs in the background, or when it is waited for."""

    def __init__(self, exchange: Exchange, transfers: Transfers | None) -> None:
        """transfers: Runs the exchange in the background; None: it runs in `wait`."""
        self.stats = exchange.stats
        self.background_seconds = 0.0
        self._exchange = exchange
        self._transfer = transfers.start(exchange.transfer) if transfers else None

    def wait(self) -> list[Tensor]:
        if self._transfer:
            self._transfer.wait()
            self.background_seconds = self._transfer.seconds
        else:
            self._exchange.transfer()
        return self._exchange.result()


class Comm(Protocol):
    """Reductions among a fixed set of workers.

    Every worker of the set takes part in every call, in the same order. Results are views of memory
    that the next reduction overwrites, so copy what must be kept. Sums of half-precision tensors
    are computed, exchanged and returned in float32.
    """

    num_workers: int
    """Workers of the set, on all ranks."""

    def mean(
        self, per_worker: PerWorker, weights: Sequence[float], wire: WireFormat | None = None
    ) -> list[Tensor]:
        """The weighted mean of all workers' entries, the same bits on all islands.

        Args:
            per_worker: The tensors of each local worker.
            weights: One number for each local worker; over the whole set they add up to 1.
            wire: The wire format; None: entries are sent uncompressed.

        Returns:
            One tensor for each tensor of a worker, float32 or more precise. Empty on ranks without
            a worker of the set.
        """
        ...

    def pseudo_gradient(self, given: Contributions, *, overlapped: bool = False) -> Work:
        """Start the weighted mean of origin - entry.

        The workers' entries have been read when this returns.

        Args:
            given: What the local workers contribute.
            overlapped: Exchange in the background, in memory of its own, so that training and
                other reductions may come before `wait`.
        """
        ...

    def broadcast(
        self, tensors: Sequence[Tensor], source: int, receivers: Sequence[int]
    ) -> list[Tensor]:
        """Send the tensors of worker `source` to the workers in `receivers`.

        Nothing is sent if there are no receivers.

        Returns:
            The tensors of the source, in their own type.
        """
        ...


@torch.no_grad()
def rounded_origin(origin: Tensor, entry: Tensor) -> Tensor:
    """The global parameters as a worker received them: on its device, rounded to its data type."""
    return origin.to(device=entry.device, dtype=entry.dtype)
