"""Reductions among workers, with one entry per local worker (DESIGN section 3, seam 1).

Local entries are added first; a communicator over several ranks then reduces over its group, and
callers cannot tell the difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from adloco.distributed.codecs.wire import WireFormat
from adloco.distributed.comm.background import Transfers
from adloco.distributed.comm.buckets import PerWorker


@dataclass(frozen=True, kw_only=True)
class Contributions:
    """What the local workers bring to a mean of pseudo-gradients."""

    per_worker: PerWorker
    """The parameters of each local worker."""
    weights: Sequence[float]
    """One for each local worker; over all workers of the mean they add up to 1."""
    origin: Sequence[Tensor]
    """The global parameters, from which the workers' are subtracted. May be in host memory."""
    codec: WireFormat | None = None
    """The wire format; None: differences cross uncompressed."""
    residuals: PerWorker = ()
    """With error feedback, what each local worker has not sent so far; changed in place."""


@dataclass
class SumStats:
    """This rank's part of what one sum of pseudo-gradients cost and lost.

    Squared norms are of what is multiplied with the worker's weight.
    """

    wanted_sq: list[float]
    """Squared norm of what each local worker was to send."""
    sent_sq: list[float]
    """Squared norm of what each local worker sent."""
    error_sq: list[float]
    """Squared norm of the difference of the two."""
    total_sq: float = 0.0
    """A part of the squared norm of the sum over all workers of what they sent; over the workers'
    ranks these parts add up to the whole.
    """
    num_bytes: float = 0.0
    """Payload that the local workers handed over."""

    @staticmethod
    def zero(num_workers: int) -> "SumStats":
        """Statistics of workers that sent nothing."""
        return SumStats([0.0] * num_workers, [0.0] * num_workers, [0.0] * num_workers)

    @staticmethod
    def lossless(sent_sq: Tensor) -> "SumStats":
        """Statistics of workers that sent without loss. sent_sq: shape (workers,)."""
        return SumStats(sent_sq.tolist(), sent_sq.tolist(), [0.0] * len(sent_sq))


class Work(Protocol):
    """A sum over workers that has been started."""

    stats: SumStats
    """Complete after `wait`."""
    background_seconds: float
    """Seconds that the exchange took in the background, after `wait`; 0 if it was not there."""

    def wait(self) -> list[Tensor]:
        """Return the sum, with the same bits on all islands. Called once."""
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
        """Return when everything has been exchanged. Called once, in any thread."""
        ...

    def result(self) -> list[Tensor]:
        """The sum, after `transfer`."""
        ...


class ExchangeWork:
    """A sum whose exchange runs in the background, or when it is waited for."""

    def __init__(self, exchange: Exchange, transfers: Transfers | None) -> None:
        """transfers: Run the exchange there; None: run it in `wait`."""
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
    that the next reduction writes to: copy what is to stay. Half-precision tensors are added up,
    cross, and come back in float32.
    """

    num_workers: int
    """Workers of the set, on all ranks."""

    def mean(self, per_worker: PerWorker, weights: Sequence[float]) -> list[Tensor]:
        """Weighted sum of all workers' entries.

        weights: One per local worker; over the whole set they add up to 1.
        """
        ...

    def pseudo_gradient(self, given: Contributions, *, overlapped: bool = False) -> Work:
        """Start the weighted sum of origin - entry. The workers' entries have been read on return.

        overlapped: The exchange goes on in the background, in memory of its own, so that training
        and other reductions may come before `wait`.
        """
        ...

    def broadcast(
        self, tensors: Sequence[Tensor], source: int, receivers: Sequence[int]
    ) -> list[Tensor]:
        """The tensors as worker `source` has them, for the workers in `receivers`.

        Nothing is sent if there are no receivers.
        """
        ...


@torch.no_grad()
def rounded_origin(origin: Tensor, entry: Tensor) -> Tensor:
    """The global parameters as a worker got them: on its device, rounded to its data type."""
    return origin.to(device=entry.device, dtype=entry.dtype)
