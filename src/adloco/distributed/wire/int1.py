"""A wire format with 1 bit for each value: its sign, with the mean magnitude of its block."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from adloco.distributed.wire.wire_format import (
    divided,
    in_whole_numbers,
    to_bf16,
    to_bytes,
    to_numbers,
)
from adloco.errors import require_setting
from adloco.late import torch

BYTE_OF_EIGHT = 0x0102040810204080
"""Eight bits in the bytes of an int64, times this, have their byte in the highest eight bits: the
first one is the lowest bit.
"""


@dataclass(frozen=True, kw_only=True)
class Int1:
    """1 bit for each value: its sign. All values of a block get its mean magnitude, in bfloat16.

    A zero counts as positive. This is the scaled sign of EF-signSGD (arXiv 1901.09847), for each
    block.

    |x - Q(x)| / |x| is 0.602 for normal values (sqrt(1 - 2 / pi)), and 0.76 for values of Student's
    t with 3 degrees of freedom. So the format needs error feedback, also of sums.

    The format is a contraction: |x - Q(x)|^2 <= (1 - (1 - 2^-16) / block) |x|^2 for each full block
    if the mean is a normal number and absmax >= 2^-100, and <= |x|^2 otherwise, apart from rounding
    in float32. Proof: with S the sum of the block's magnitudes, what is left is |x|^2 - S^2 /
    block, and S^2 >= |x|^2.

    Magnitudes are rounded to whole numbers (`in_whole_numbers`), whose sums are exact, so every
    device makes the same bytes.
    """

    key: ClassVar[str] = "int1"

    block: int = 256
    """Values that share a magnitude, which takes 2 bytes. A multiple of 8, because eight values
    share a byte; at most 4096.
    """

    def __post_init__(self) -> None:
        whole = 8 <= self.block <= 1 << 12 and self.block % 8 == 0
        require_setting(whole, self, "block", "must be a multiple of 8 and from 8 to 4096")

    @property
    def block_bytes(self) -> int:
        return 2 + self.block // 8

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        whole, unit = in_whole_numbers(values)
        mean = to_bf16(divided(whole.abs_().sum(dim=1, keepdim=True), self.block) * unit)
        blocks = values.new_empty(len(values), self.block_bytes, dtype=torch.uint8)
        blocks[:, :2] = to_bytes(mean)
        eights = (values >= 0).contiguous().view(torch.int64)
        blocks[:, 2:] = eights.mul_(BYTE_OF_EIGHT).bitwise_right_shift_(56)
        return blocks

    def decode(self, blocks: torch.Tensor) -> torch.Tensor:
        mean = to_numbers(blocks[:, :2], torch.bfloat16).float()
        octets = blocks[:, 2:].int().flatten()
        signs = _signs(blocks.device).index_select(0, octets)
        return signs.view(len(blocks), self.block).mul_(mean)


@functools.cache
def _signs(device: torch.device) -> torch.Tensor:
    """The eight signs of each byte, -1 or 1: float32 of shape (256, 8)."""
    octets, places = (torch.arange(count, device="cpu") for count in (256, 8))
    bits = octets[:, None] >> places & 1
    return (2 * bits - 1).float().to(device)
