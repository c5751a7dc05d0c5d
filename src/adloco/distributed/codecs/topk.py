"""The largest magnitudes of each chunk."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from adloco.distributed.codecs.codec import (
    ErrorFeedback,
    mean_where,
    of_two_means,
    to_bf16,
    to_bytes,
)
from adloco.distributed.codecs.packing import packed, packed_size, unpacked
from adloco.errors import require


@dataclass(frozen=True, kw_only=True)
class TopK(ErrorFeedback):
    """The largest magnitudes of each chunk, the first of equal ones: where they are, their signs,
    and which of two magnitudes stands for each.

    The two are the means of the selected magnitudes above (or at) their mean and below it, in
    bfloat16. All else, and every zero, is decoded as 0.

    A contraction: |x - Q(x)|^2 <= (1 - (1 - 2^-16) / chunk) |x|^2 for each chunk, as long as both
    means are normal numbers (|x|^2 otherwise). For n_g magnitudes x_i with mean a_g sent as (1 + d)
    a_g, |d| <= 2^-8, sum (x_i - (1 + d) a_g)^2 = sum x_i^2 - n_g a_g^2 (1 - d^2); with S for the
    sum of the k selected magnitudes, sum n_g a_g^2 >= S^2 / k (Cauchy-Schwarz) and |x|^2 <= max
    |x_i| sum |x_i| <= S (chunk / k) S.
    """

    key: ClassVar[str] = "topk"

    chunk: int = 4096
    """Values of which the largest are chosen together; a power of two from 2 to 65536."""
    density: float = 1 / 16
    """Part of each chunk's values that is sent; at least one is."""
    error_feedback: float = 0.9
    """Part of what a sync leaves unsent that the worker keeps, to send it later; 0: none, and what
    is never among the largest is lost.
    """

    sums_in_blocks = False

    def __post_init__(self) -> None:
        super().__post_init__()
        power = self.chunk > 0 and self.chunk & (self.chunk - 1) == 0
        require(
            power and 2 <= self.chunk <= 1 << 16,
            f"chunk must be a power of two from 2 to 65536, got {self.chunk}",
        )
        require(0 < self.density <= 1, f"density must be in (0, 1], got {self.density}")

    @property
    def kept(self) -> int:
        """Values of a chunk that are sent."""
        return max(1, round(self.chunk * self.density))

    @property
    def entry_bits(self) -> int:
        """Bits of each value sent: its index, one for the larger magnitude and one for the sign."""
        return (self.chunk - 1).bit_length() + 2

    @property
    def block(self) -> int:
        return self.chunk

    @property
    def block_bytes(self) -> int:
        return 4 + packed_size(self.kept, self.entry_bits)

    def encode(self, values: Tensor) -> Tensor:
        # Bits of positive floats are ordered as the floats are. With the index behind them all
        # differ, so there is one answer on every device.
        behind = torch.arange(self.chunk - 1, -1, -1, device=values.device)
        keys = (values.abs().view(torch.int32).long() << 16).add_(behind)
        index = self.chunk - 1 - (keys.topk(self.kept, dim=1).values & 0xFFFF)
        chosen = values.gather(
            1, index
        ).double()  # So that sums of the largest float32 stay finite.
        magnitude = chosen.abs()
        large = magnitude >= mean_where(magnitude > 0, magnitude)
        means = [mean_where(large, magnitude), mean_where(~large & (magnitude > 0), magnitude)]
        entries = index << 2 | large.long() << 1 | (chosen < 0).long()
        # No code stands for 0: a chosen zero repeats the chunk's largest value, which is written
        # twice then.
        entries = torch.where(magnitude > 0, entries, entries[:, :1])
        return torch.cat(
            [to_bytes(to_bf16(torch.cat(means, dim=1))), packed(entries, self.entry_bits)], dim=1
        )

    def decode(self, blocks: Tensor) -> Tensor:
        entries = unpacked(blocks[:, 4:], self.entry_bits, self.kept)
        chosen = of_two_means(blocks, entries)
        return chosen.new_zeros(len(blocks), self.chunk).scatter_(1, entries >> 2, chosen)
