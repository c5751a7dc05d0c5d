"""2 bits: a sign, and one of two magnitudes of each block."""

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
from adloco.errors import require


@dataclass(frozen=True, kw_only=True)
class Int2(ErrorFeedback):
    """A bit for the sign and one for which of two magnitudes: the means of those from a block's
    mean magnitude on and of those below, in bfloat16.

    For a normal distribution nearly the best four levels there are. A block with a zero in it, a
    filled-up last one too, has three: what is below the mean becomes zero.

    A contraction: |x - Q(x)|^2 <= (1 - (1 - 2^-16) / block) |x|^2 for each block, as long as the
    means are normal numbers (|x|^2 otherwise): the n_g magnitudes from the mean S / block on, with
    sum S_g, have S_g >= n_g S / block and S_g >= max |x_i|, so that S_g^2 / n_g >= max |x_i| S /
    block >= |x|^2 / block; the rest as in `TopK`.
    """

    key: ClassVar[str] = "int2"

    block: int = 128
    """Values that share their two magnitudes, which cost 4 bytes; a multiple of 4, as four values
    share a byte.
    """
    error_feedback: float = 0.9
    """Part of what a sync leaves unsent that the worker keeps, to send it later; 0: none."""

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
        magnitude = values.abs().double()  # So that sums of the largest float32 stay finite.
        large = magnitude >= magnitude.mean(dim=1, keepdim=True)
        small = mean_where(~large, magnitude).masked_fill_(
            (magnitude == 0).any(dim=1, keepdim=True), 0.0
        )
        codes = (large << 1 | (values < 0)).to(torch.uint8)
        # Not by `packed`, which makes an int64 of every bit.
        fours = codes[:, ::4] << 6 | codes[:, 1::4] << 4 | codes[:, 2::4] << 2 | codes[:, 3::4]
        return torch.cat(
            [to_bytes(to_bf16(torch.cat([mean_where(large, magnitude), small], dim=1))), fours],
            dim=1,
        )

    def decode(self, blocks: Tensor) -> Tensor:
        codes = torch.stack([blocks[:, 4:] >> shift & 3 for shift in (6, 4, 2, 0)], dim=2).flatten(
            1
        )
        return of_two_means(blocks, codes.long())
