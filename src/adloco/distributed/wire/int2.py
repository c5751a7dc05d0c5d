"""A wire format with 2 bits for each value: a sign, and one of two magnitudes of its block."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from adloco.distributed.wire.wire_format import (
    in_whole_numbers,
    largest_whole,
    to_bf16,
    to_bytes,
    to_numbers,
)
from adloco.errors import require_setting
from adloco.late import torch

BYTE_OF_FOUR = 1 << 30 | 1 << 20 | 1 << 10 | 1
"""Four codes in the bytes of an int32, times this, have their byte in the highest eight bits."""


@dataclass(frozen=True, kw_only=True)
class Int2:
    """2 bits for each value: one for the sign, and one for which of the block's two magnitudes.

    Magnitudes are large if they are at least the block's mean magnitude plus an eighth of the way
    from there to its largest one. The two magnitudes of the block, in bfloat16, are the mean of the
    large ones and the mean of the others. If a block contains a zero, the others become zero, so
    there are three levels.

    |x - Q(x)| / |x| is 0.341 for normal values and 0.475 for those of Student's t with 3 degrees of
    freedom; the best two magnitudes of each block would have 0.337 and 0.44.

    The format is a contraction: |x - Q(x)|^2 <= (1 - (1 - 2^-16) / block) |x|^2 for each block if
    the two means are normal numbers and absmax >= 2^-100, and <= |x|^2 otherwise, apart from
    rounding in float32. Proof: for a group of n_g magnitudes x_i whose sum is S_g and whose mean
    a_g is sent as (1 + d) a_g, |d| <= 2^-8, sum (x_i - (1 + d) a_g)^2 = sum x_i^2 - (1 - d^2) S_g^2
    / n_g. Let S be the sum of the block's magnitudes, so |x|^2 <= max |x_i| S <= S^2. Both groups
    have sum S_g^2 / n_g >= S^2 / block (Cauchy-Schwarz). The large ones alone have at least |x|^2 /
    block, because S_g >= n_g S / block and S_g >= max |x_i|.

    Magnitudes are rounded to whole numbers (`in_whole_numbers`), whose sums are exact, so every
    device makes the same bytes.
    """

    key: ClassVar[str] = "int2"

    block: int = 128
    """Values that share two magnitudes, which take 4 bytes. A multiple of 4, because four values
    share a byte; at most 512: of more, the smallest would often count as zeros.
    """

    def __post_init__(self) -> None:
        whole = 4 <= self.block <= 512 and self.block % 4 == 0
        require_setting(whole, self, "block", "must be a multiple of 4 and from 4 to 512")

    @property
    def block_bytes(self) -> int:
        return 4 + self.block // 4

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        whole, unit = in_whole_numbers(values)
        magnitude = whole.abs()
        total, least = magnitude.sum(dim=1, keepdim=True), magnitude.amin(dim=1, keepdim=True)
        # Large is what is more than this: the threshold, rounded up, less one.
        below = (7 * total.long() + largest_whole(self.block) * self.block - 1) // (8 * self.block)
        below = below.to(torch.float32)
        # Every other value becomes `below`, and then every large one `below` + 1.
        torch.maximum(magnitude, below, out=magnitude)
        excess = magnitude.sum(dim=1, keepdim=True) - self.block * below
        torch.minimum(magnitude, below + 1, out=magnitude)
        num_large = magnitude.sum(dim=1, keepdim=True) - self.block * below
        total_large = excess + num_large * below
        others = (total - total_large) / (self.block - num_large).clamp_(min=1)
        others.masked_fill_(least == 0, 0.0)
        means = torch.cat([total_large / num_large.clamp_(min=1), others], dim=1)
        # -2 and less, -1, 1, and 2 and more become the codes 0, 1, 2 and 3.
        codes = whole.div_(below + 0.5).add_(2).clamp_(0, 3)
        blocks = values.new_empty(len(values), self.block_bytes, dtype=torch.uint8)
        blocks[:, :4] = to_bytes(to_bf16(means * unit))
        fours = codes.to(torch.int8, memory_format=torch.contiguous_format).view(torch.int32)
        blocks[:, 4:] = fours.mul_(BYTE_OF_FOUR).bitwise_right_shift_(24)
        return blocks

    def decode(self, blocks: torch.Tensor) -> torch.Tensor:
        means = to_numbers(blocks[:, :4], torch.bfloat16).float()
        octets = blocks[:, 4:].int().flatten()
        large, others = (
            table.index_select(0, octets).view(torch.float32).view(len(blocks), self.block)
            for table in _signs(blocks.device)
        )
        # One of the two products is always 0, so the sum is exact.
        return large.mul_(means[:, :1]).addcmul_(others, means[:, 1:])


@functools.cache
def _signs(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The four codes of each byte as signs in float32: of the large ones, and of the others; else
    0. The four are one complex128, so they are looked up at once.
    """
    octets = torch.arange(256, device="cpu")[:, None]
    codes = octets >> torch.tensor([6, 4, 2, 0], device="cpu") & 3
    of_codes = torch.tensor([[-1, 0, 0, 1], [0, -1, 1, 0]], dtype=torch.float32, device="cpu")
    large, others = (signs[codes].view(torch.complex128).flatten().to(device) for signs in of_codes)
    return large, others
