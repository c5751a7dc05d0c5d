"""Pseudo-gradients and means in a wire format: what workers send, and what they keep as residuals.

`CompressedSum._encoded` is the chain of a sync: a worker's difference, plus its residual, is
encoded and sent, and the feedback keeps what that has lost. With feedback in the parameters it is
`OuterSync.copy_to_workers` that subtracts the residual from the new global parameters.

Each tensor (each rank's shard, if it is sharded) is cut into blocks of its own. So the bytes of a
tensor depend neither on its neighbours nor on its fragment. They do not depend on the placement
either, as long as shards are whole blocks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from adloco.distributed.comm.block_sums import Rows, in_pieces, sum_blocks
from adloco.distributed.comm.buckets import (
    Contributions,
    bucket_indices,
    rounded_origin,
    sum_dtype,
    together,
)
from adloco.distributed.comm.sum_islands import Islands
from adloco.distributed.comm.sync_stats import SumStats
from adloco.distributed.device import to_device, used_here
from adloco.distributed.dtensor import converted, first_element, local, with_local
from adloco.distributed.parallel.gradient_norms import squared_norms
from adloco.distributed.traffic import ring
from adloco.distributed.wire.wire_format import WireFormat


class CompressedSum:
    """A weighted sum over workers that is exchanged in a wire format: of origin - entry, or of the
    entries if there is no origin.
    """

    @torch.no_grad()
    def __init__(self, given: Contributions, wire: WireFormat, islands: Islands) -> None:
        self._given, self._wire, self._islands = given, wire, islands
        self._like = given.per_worker[0]
        self._buckets = bucket_indices(self._like)
        self.stats = SumStats([], [], [])
        self._norms_sq = [torch.zeros(3, len(given.weights), dtype=torch.float64, device="cpu")]
        """Squared norms of each bucket, (3, workers): of what workers wanted to send, of what they
        sent, and of the difference.
        """
        self._rows = [self._rows_of(indices) for _, indices in self._buckets]
        self._blocks = [
            self._encoded(indices, rows, islands.counts(sharded))
            for (sharded, indices), rows in zip(self._buckets, self._rows, strict=True)
        ]
        self._sums: list[tuple[Tensor, Tensor | None]] = []

    @torch.no_grad()
    def transfer(self) -> None:
        wire, islands, stats = self._wire, self._islands, self.stats
        times = ring(islands.num_workers)
        for (sharded, _), rows, blocks in zip(self._buckets, self._rows, self._blocks, strict=True):
            mine = islands.slices(blocks, sharded)
            rows = rows[islands.part(len(rows.owners), sharded)]
            kept = bool(self._given.residuals)
            values, lost, total_sq = sum_blocks(mine, wire, rows, islands, kept=kept)
            self._sums.append((values, lost))
            if islands.owns(sharded):
                stats.num_bytes += islands.traffic.add(mine.numel(), times)
                stats.total_sq += total_sq

    @torch.no_grad()
    def result(self) -> list[Tensor]:
        self._blocks = []  # Not earlier, because on a GPU another stream may still read them.
        results = list(self._like)
        join = self._islands.joined
        for (sharded, indices), rows, (values, lost) in zip(
            self._buckets, self._rows, self._sums, strict=True
        ):
            count = len(rows.owners)
            used_here([values, *([] if lost is None else [lost])])
            if lost is not None:
                self._keep(join(lost, count, sharded), rows.owners, indices)
            places = self._places(join(values, count, sharded), indices)
            for index, place in zip(indices, places, strict=True):
                dtype = sum_dtype(self._like[index].dtype)
                results[index] = with_local(place.to(dtype), like=self._like[index])
        # Last, because it waits for the device.
        norms_sq = torch.stack([each.cpu() for each in self._norms_sq]).sum(0)
        self.stats.wanted_sq, self.stats.sent_sq, self.stats.error_sq = norms_sq.tolist()
        return results

    def _encoded(self, indices: Sequence[int], about: Rows, counted: bool) -> Tensor:
        """Encode these tensors of all local workers, and set their residuals to what is left.

        Returns uint8 of shape (workers, rows, block_bytes).
        """
        given, wire, device = self._given, self._wire, local(self._like[indices[0]]).device
        size = len(about.owners), wire.block
        values = torch.zeros(size, dtype=torch.float32, device=device)  # Padding stays zero.
        size_encoded = len(given.weights), len(values), wire.block_bytes
        encoded = torch.empty(size_encoded, dtype=torch.uint8, device=device)
        places, kept = self._places(values, indices), bool(given.residuals)
        origin = [local(given.origin[index]) for index in indices] if given.origin else []
        norms_sq = torch.zeros(3, len(given.weights), dtype=torch.float64, device=device)
        self._norms_sq.append(norms_sq)
        for worker, (entry, weight) in enumerate(zip(given.per_worker, given.weights, strict=True)):
            residuals = [local(given.residuals[worker][index]) for index in indices] if kept else []
            _fill(places, [local(entry[index]) for index in indices], origin, residuals)
            for rows in in_pieces(values, wire):
                # Weighted before it is encoded: receivers then only add, and the blocks of a sum
                # are encoded like a worker's own.
                # A worker without weight may hold what is not finite.
                wanted = values[rows] * weight if weight else torch.zeros_like(values[rows])
                encoded[worker, rows] = about[rows].encoded(wanted, wire)
                sent = about[rows].without_padding(wire.decode(encoded[worker, rows]))
                if counted:
                    terms = [wanted, sent, wanted - sent]
                    norms_sq[:, worker] += torch.stack(squared_norms(terms))
                # A worker with weight 0 sends nothing and keeps everything.
                if kept and weight:
                    values[rows] -= sent / weight
            for part in together(places if kept else []):
                left = torch._foreach_mul(places[part], given.feedback.feedback_decay)
                torch._foreach_copy_(residuals[part], left)
        return encoded

    def _rows_of(self, indices: Sequence[int]) -> Rows:
        """Facts about the rows of these tensors.

        They are dealt out to owners block by block, each tensor's from its first one on, so a block
        has the same owner on every placement.
        """
        block = self._wire.block
        counts, begins, sizes = torch.tensor(
            [
                [self._num_rows(index) for index in indices],
                [first_element(self._like[index]) // block for index in indices],
                [local(self._like[index]).numel() for index in indices],
            ],
            device="cpu",
        )
        number = torch.arange(int(counts.sum()), device="cpu")
        number -= (counts.cumsum(0) - counts).repeat_interleave(counts)
        owners = (number + begins.repeat_interleave(counts)) % self._islands.num_workers
        filled = sizes.repeat_interleave(counts) - number * block
        return Rows(owners, filled.clamp_(max=block))

    def _keep(self, lost: Tensor, owners: Tensor, indices: Sequence[int]) -> None:
        """Add what a sum has lost to its owners' residuals.

        A worker whose weight is less than that of equal workers keeps only as much as they would,
        because its residual must not become larger than what it sends.
        """
        owners = to_device(owners, lost.device)
        for worker, weight, residuals in zip(
            self._islands.here, self._given.weights, self._given.residuals, strict=True
        ):
            # Divided by the weight, with which the residual will be multiplied when it is sent.
            kept = self._given.feedback.feedback_decay / max(weight, 1 / self._islands.num_workers)
            share = (owners == worker).to(lost.dtype)[:, None] * kept
            places = self._places(lost * share, indices)
            own = [local(residuals[index]) for index in indices]
            for part in together(places):
                added = [
                    place.to(residual.device)
                    for place, residual in zip(places[part], own[part], strict=True)
                ]
                torch._foreach_add_(own[part], added)

    def _num_rows(self, index: int) -> int:
        return -(-local(self._like[index]).numel() // self._wire.block)

    def _places(self, values: Tensor, indices: Sequence[int]) -> list[Tensor]:
        """A view of each tensor in rows of blocks, in the shape of this rank's shard."""
        rows = torch.split(values, [self._num_rows(index) for index in indices])
        shards = [local(self._like[index]) for index in indices]
        return [
            part.reshape(-1)[: shard.numel()].view_as(shard)
            for part, shard in zip(rows, shards, strict=True)
        ]


def _fill(
    places: list[Tensor], values: list[Tensor], origin: list[Tensor], residuals: list[Tensor]
) -> None:
    """Set places to origin - values, or to the values if there is no origin, plus the residuals if
    there are any.
    """
    for part in together(places):
        terms = values[part]
        if origin:
            # bf16 minus bf16 in bf16 would round away most of a small change.
            exact = sum_dtype(terms[0].dtype)
            starts = converted(rounded_origin(origin[part], terms), exact)
            terms = [*torch._foreach_sub(starts, converted(terms, exact))]
        torch._foreach_copy_(places[part], terms)
        if residuals:
            kept = [residual.to(places[0].device) for residual in residuals[part]]
            torch._foreach_add_(places[part], kept)
