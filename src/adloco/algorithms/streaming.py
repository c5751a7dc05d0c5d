"""Carrying out the syncs of a round: fragments leave, travel while training goes on, and are mixed in (Streaming DiLoCo, arXiv 2501.18512).

When they leave and arrive is decided in `rules.streaming`. What travels has been read and, in a lossy format, encoded: workers may move on.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from adloco.algorithms.outer import OuterStep
from adloco.distributed.comm.background import Background, side_stream
from adloco.distributed.comm.buckets import PerWorker, Squares
from adloco.distributed.comm.local import Comm, Sum
from adloco.distributed.dtensor import in_memory_of
from adloco.distributed.placement.one_process import Placement
from adloco.rules.sync_schedule import Streaming, SyncEvent


@dataclass(frozen=True, kw_only=True)
class Served:
    """A trainer's outer step, and those of its workers that live here."""

    trainer: int
    outer: OuterStep
    params: PerWorker
    residuals: PerWorker
    """Of each worker, with error feedback."""
    weights: Sequence[float]
    """Each worker's share of the trainer's samples."""
    comm: Comm


@dataclass(frozen=True, kw_only=True)
class SyncNumbers:
    """What syncs were to one worker; those of several syncs add up. Norms are of what is multiplied with the worker's weight."""

    wanted: float = 0.0
    """Squared norm of what it was to send."""
    sent: float = 0.0
    """The same of what it sent."""
    error: float = 0.0
    """The same of the difference."""
    total: float = 0.0
    """Its part of that of the sum over its trainer's workers: all of what its process knows of it, for the first worker there."""
    sync_bytes: float = 0.0
    """Handed over."""
    exposed_seconds: float = 0.0
    """That training stood still, on the ranks that serve it."""
    hidden_seconds: float = 0.0
    """That fragments travelled while training went on."""
    transfer_seconds: float = 0.0
    """That fragments travelled, hidden or not."""
    peak_bytes_per_second: float = 0.0
    """Of the fragment that travelled fastest, `sync_bytes` over `transfer_seconds`."""

    def __add__(self, other: "SyncNumbers") -> "SyncNumbers":
        sums = [mine + theirs for mine, theirs in zip(self.to_numbers(), other.to_numbers(), strict=True)]
        return SyncNumbers.from_numbers([*sums[:-1], max(self.peak_bytes_per_second, other.peak_bytes_per_second)])

    def to_numbers(self) -> list[float]:
        """The float64 scalars that cross the network."""
        return [getattr(self, field.name) for field in fields(self)]

    @staticmethod
    def from_numbers(numbers: Sequence[float]) -> "SyncNumbers":
        return SyncNumbers(**{field.name: number for field, number in zip(fields(SyncNumbers), numbers, strict=True)})


class FragmentSyncs:
    """The syncs of one round after another, for all trainers of a run at once."""

    def __init__(self, streaming: Streaming, placement: Placement) -> None:
        self._squares: dict[int, Squares] = {}
        self._handed = 0
        self._bytes = self._transferred = self._hidden = self._exposed = 0.0
        self._streaming = streaming
        self._placement = placement
        self._under_way: list[tuple[Served, Sum]] = []
        self._transfer: Background | None = None
        self._stream = side_stream(placement.device)

    def handle(self, event: SyncEvent, served: Sequence[Served]) -> None:
        """Send or receive a fragment of every trainer that has workers here. Called on all ranks, in the same order."""
        began = time.monotonic()
        if event.kind == "send":
            self._send(event.fragment, served)
        else:
            self._receive(event.fragment, served)
        self._exposed += time.monotonic() - began

    def _send(self, fragment: int, served: Sequence[Served]) -> None:
        # Until it arrives nothing else is handed to other workers.
        self._handed = self._placement.traffic.between
        if self._streaming.tau > 0:
            self._under_way = [(one, _sent(fragment, one, overlapped=True)) for one in served]
            self._transfer = Background(self._transfer_all, self._stream)

    def _receive(self, fragment: int, served: Sequence[Served]) -> None:
        if self._streaming.tau == 0:
            self._step_at_once(fragment, served)
        self.arrive(fragment)
        self._mix(fragment, served)
        self._bytes += self._placement.traffic.between - self._handed

    def stand_still(self, seconds: float) -> None:
        """Count time that training waited for others before a sync."""
        self._exposed += seconds

    def arrive(self, fragment: int) -> None:
        """Move the global parameters by a fragment that is under way, if one is. Workers take it up when they receive it."""
        if self._transfer is None:
            return
        waiting = time.monotonic()
        self._transfer.wait()
        self._transferred += self._transfer.seconds
        self._hidden += max(0.0, self._transfer.seconds - (time.monotonic() - waiting))
        for one, total in self._under_way:
            self._step(fragment, one, total)
        self._under_way, self._transfer = [], None

    def forget(self) -> None:
        """Let what is under way arrive nowhere. Waits for it, as the others do."""
        if self._transfer is not None:
            self._transfer.wait()
        self._under_way, self._transfer = [], None

    def take(self) -> dict[int, list[SyncNumbers]]:
        """Since the last call, by trainer, for each of its workers here: this rank's part, of which those of the worker's ranks add up."""
        count = sum(len(squares.sent) for squares in self._squares.values())
        ranks = self._placement.ranks_per_worker
        taken = {}
        for trainer, squares in self._squares.items():
            taken[trainer] = [
                SyncNumbers(
                    wanted=squares.wanted[index],
                    sent=squares.sent[index],
                    error=squares.error[index],
                    total=squares.total if index == 0 else 0.0,
                    sync_bytes=self._bytes / count,
                    exposed_seconds=self._exposed / ranks,
                    hidden_seconds=self._hidden / ranks,
                    transfer_seconds=self._transferred / ranks,
                    peak_bytes_per_second=self._bytes / count / self._transferred if self._transferred else 0.0,
                )
                for index in range(len(squares.sent))
            ]
        if taken:
            self._squares = {}
            self._bytes = self._transferred = self._hidden = self._exposed = 0.0
        return taken

    def _transfer_all(self) -> None:
        for _, total in self._under_way:
            total.transfer()

    def _step_at_once(self, fragment: int, served: Sequence[Served]) -> None:
        """One trainer after another, in the same memory."""
        for one in served:
            began = time.monotonic()
            total = _sent(fragment, one, overlapped=False)
            total.transfer()
            self._transferred += time.monotonic() - began
            self._step(fragment, one, total)

    def _step(self, fragment: int, one: Served, total: Sum) -> None:
        one.outer.receive(fragment, total, one.comm)
        self._squares.setdefault(one.trainer, Squares.zero(len(one.params))).add(total.squares)

    @torch.no_grad()
    def _mix(self, fragment: int, served: Sequence[Served]) -> None:
        """The global parameters become the workers', of whose own a part alpha stays if they have moved on meanwhile.

        A step ahead: not the global parameters themselves, but less what the worker has not sent.
        """
        own = self._streaming.alpha if self._streaming.tau > 0 else 0.0
        for one in served:
            ahead = one.residuals if one.outer.steps_ahead else [None] * len(one.params)
            for params, unsent in zip(one.params, ahead, strict=True):
                for place in one.outer.fragments[fragment]:
                    _mix(params[place], one.outer.global_params[place], unsent[place] if unsent else None, own)


def _sent(fragment: int, one: Served, overlapped: bool) -> Sum:
    return one.outer.send(fragment, one.params, one.weights, one.comm, one.residuals, overlapped)


def _mix(parameter: Tensor, arrived: Tensor, unsent: Tensor | None, own: float) -> None:
    arrived = in_memory_of(arrived, parameter)
    if unsent is not None:
        arrived = (arrived - in_memory_of(unsent, parameter)).to(parameter.dtype)
    if own == 0:
        parameter.copy_(arrived)
    else:
        parameter.lerp_(arrived, 1 - own)
