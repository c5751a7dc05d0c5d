"""A wire format with 4 bits for each value: one of 16 levels, from the best of four tables."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

from adloco.distributed.wire.wire_format import divided, signed_absmax, to_bytes, to_numbers
from adloco.errors import require_setting
from adloco.late import torch

UNIT = 1023
"""Levels and values of a block are whole numbers of 1/1023 of its largest magnitude."""
LEVELS = (
    (0, 109, 220, 334, 454, 580, 716, 863, 1023),
    (0, 71, 147, 232, 331, 452, 601, 787, 1023),
    (0, 39, 84, 141, 217, 325, 479, 701, 1023),
    (0, 20, 44, 80, 136, 227, 376, 620, 1023),
)
"""Each table's levels; the last one only with the sign of the scale.

They are 1023 sinh(a k / 8) / sinh(a), rounded, with a = 1, 2, 3 and 4: the larger a, the more of
them are near zero.
"""
SMALLEST = 2.0**-116
"""Blocks whose absmax is smaller are decoded as zeros, because absmax / 1023 would lose digits."""
CELLS = 2048
"""Entries of a table for encoding: one for each whole number from -1024."""


@dataclass(frozen=True, kw_only=True)
class Int4:
    """4 bits for each value: one of 16 levels, scaled for each block.

    A block's scale is its value with the largest magnitude, absmax. Its levels are 0 and eighths of
    the scale on a curve, k = -7...8, from one of four tables (`LEVELS`). The heavier the tails of
    the block, which is how absmax compares with the mean magnitude, the more its table bends:
    absmax / mean < 3.5, 7, 16 or more. The scale is sent in float32, whose two lowest bits say
    which table it is.

    |x - Q(x)| / |x| is 0.092 for normal values (no 16 levels for all blocks leave less than 0.0975,
    Lloyd-Max), and 0.108 for values of Student's t with 3 degrees of freedom. For each value,
    |error| <= max(0.4 |x|, c absmax) with c = 0.055, 0.036, 0.021 and 0.011, and never more than
    |x|, apart from rounding in float32. So the format is a contraction: |x - Q(x)|^2 <= (1 - (1 -
    2^-20) / block) |x|^2 for each block whose absmax is at least 2^-116, and <= |x|^2 otherwise.

    All sums are of whole numbers, so every device makes the same bytes.
    """

    key: ClassVar[str] = "int4"

    block: int = 128
    """Values that share a scale, which takes 4 bytes. Even, because two values share a byte; at
    most 65536.
    """

    def __post_init__(self) -> None:
        whole = 2 <= self.block <= 1 << 16 and self.block % 2 == 0
        require_setting(whole, self, "block", "must be even and from 2 to 65536")

    @property
    def block_bytes(self) -> int:
        return 4 + self.block // 2

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        scale = signed_absmax(values).add_(0.0)  # A zero of either sign becomes positive.
        unit = divided(scale, UNIT).masked_fill_(scale.abs() < SMALLEST, 1.0)
        cells = (values / unit).to(torch.int32)  # Towards zero, so no error exceeds its value.
        total = cells.abs().sum(dim=1, keepdim=True, dtype=torch.int32).long()
        most = UNIT * self.block  # most / total = absmax / mean
        table = (2 * most >= 7 * total).int() + (most >= 7 * total) + (most >= 16 * total)
        # The limits keep blocks that are not finite within the tables.
        cells.add_(table * CELLS + CELLS // 2).clamp_(0, 4 * CELLS - 1)
        codes = _codes(values.device).index_select(0, cells.flatten()).view(torch.int16)
        # Two codes in the bytes of an int16 have their byte in its high bits.
        pairs = codes.mul_(1 << 12 | 1).bitwise_right_shift_(8)
        blocks = values.new_empty(len(values), self.block_bytes, dtype=torch.uint8)
        blocks[:, :4] = to_bytes(scale.view(torch.int32) & ~3 | table)
        blocks[:, 4:] = pairs.view(len(values), self.block // 2)
        return blocks

    def decode(self, blocks: torch.Tensor) -> torch.Tensor:
        header = to_numbers(blocks[:, :4], torch.int32)
        pairs = blocks[:, 4:].int().add_((header & 3) << 8)
        ratio = _pairs(blocks.device).index_select(0, pairs.flatten()).view(torch.float32)
        return ratio.view(len(blocks), self.block).mul_((header & ~3).view(torch.float32))


def table_levels(table: int) -> list[int]:
    """The levels of the codes 0...15 of a table, in units of 1/1023 of the scale."""
    return [-level for level in LEVELS[table][7:0:-1]] + list(LEVELS[table])


@functools.cache
def _codes(device: torch.device) -> torch.Tensor:
    """The code of each cell: of the level that is nearest to its end next to zero."""
    cells = torch.arange(-CELLS // 2, CELLS // 2, device="cpu")[:, None]
    levels = [torch.tensor(table_levels(table), device="cpu") for table in range(4)]
    codes = [(cells - own).abs().argmin(dim=1) for own in levels]
    return torch.cat(codes).to(device, torch.uint8)


@functools.cache
def _pairs(device: torch.device) -> torch.Tensor:
    """The two float32 of each byte as one int64, which are looked up at once."""
    pairs = [
        torch.cartesian_prod(levels, levels)
        for levels in (
            torch.tensor(table_levels(table), dtype=torch.float32, device="cpu") / UNIT
            for table in range(4)
        )
    ]
    return torch.cat(pairs).view(torch.int64).flatten().to(device)
