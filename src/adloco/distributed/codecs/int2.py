"""A wire format with 2 bits for each value: a sign, and one of two magnitudes of its block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from adloco.distributed.codecs.codec import (
    ErrorFeedback,
    mean_where,
    of_two_means,
    to_bf16,
    to_bytes,
)
from adloco.errors import require
from adloco.late import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Int2(ErrorFeedback):
    """2 bits for each value: one for the sign, and one for which of the block's two magnitudes.

    The two magnitudes, in bfloat16, are the mean of the block's magnitudes that are at least their
    mean, and the mean of those below it. For normally distributed values, these four levels are
    nearly the best ones. If a block contains a zero (a padded last block does), the magnitudes
    below the mean become zero, so there are three levels.

    The format is a contraction: |x - Q(x)|^2 <= (1 - (1 - 2^-16) / block) |x|^2 for each block if
    the two means are normal numbers, and <= |x|^2 otherwise. Proof: let S be the sum of the
    block's magnitudes, and S_g the sum of the n_g that are at least the mean S / block. Then S_g >=
    n_g S / block and S_g >= max |x_i|, so S_g^2 / n_g >= max |x_i| S / block >= |x|^2 / block. The
    rest is as in `TopK`.
    """

    key: ClassVar[str] = "int2"

    block: int = 128
    """Values that share two magnitudes, which take 4 bytes. A multiple of 4, because four values
    share a byte.
    """
    error_feedback: float = 0.9
    """Fraction of what a sync leaves unsent that the worker keeps, to send it later; 0: nothing."""

    sums_in_blocks = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.block > 0 and self.block % 4 == 0,
            f"block must be a multiple of 4 and > 0, got {self.block}",
        )

    @property
    def block_bytes(self) -> int:
        return 4 + self.block // 4

    def encode(self, values: Tensor) -> Tensor:
        # float64, because sums of the largest float32 numbers would overflow.
        magnitude = values.abs().double()
        large = magnitude >= magnitude.mean(dim=1, keepdim=True)
        small = mean_where(~large, magnitude).masked_fill_(
            (magnitude == 0).any(dim=1, keepdim=True), 0.0
        )
        codes = (large << 1 | (values < 0)).to(torch.uint8)
        # `packed` would need much more memory, because it makes an int64 of every bit.
        four_in_a_byte = (
            codes[:, ::4] << 6 | codes[:, 1::4] << 4 | codes[:, 2::4] << 2 | codes[:, 3::4]
        )
        return torch.cat(
            [
                to_bytes(to_bf16(torch.cat([mean_where(large, magnitude), small], dim=1))),
                four_in_a_byte,
            ],
            dim=1,
        )

    def decode(self, blocks: Tensor) -> Tensor:
        codes = torch.stack([blocks[:, 4:] >> shift & 3 for shift in (6, 4, 2, 0)], dim=2).flatten(
            1
        )
        return of_two_means(blocks, codes.long())
