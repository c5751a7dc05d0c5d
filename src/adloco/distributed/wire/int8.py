"""A wire format with 8 bits for each value: integers with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from adloco.distributed.wire.wire_format import divided, signed_absmax, to_bytes, to_numbers
from adloco.errors import require_range
from adloco.late import torch

INT8_MAX = 127


@dataclass(frozen=True, kw_only=True)
class Int8:
    """8 bits for each value: the nearest multiple of absmax / 127, with a scale for each block.

    absmax is the block's largest magnitude. |error| <= absmax / 254, apart from rounding in
    float32. The scale that is sent is absmax itself in float32, and not absmax / 127, which would
    lose its digits if absmax is a denormal number.
    """

    key: ClassVar[str] = "int8"

    block: int = 256
    """Values that share a scale, which takes 4 bytes; at most 65536."""

    def __post_init__(self) -> None:
        require_range(self, "block", at_least=1, at_most=1 << 16)

    @property
    def block_bytes(self) -> int:
        return 4 + self.block

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        absmax = signed_absmax(values).abs_()
        # A division and not a product, because the inverse of a denormal number is infinite.
        ratio = values / absmax.masked_fill(absmax == 0, 1.0)
        codes = ratio.mul_(INT8_MAX).round_().to(torch.int8)
        return torch.cat([to_bytes(absmax), to_bytes(codes)], dim=1)

    def decode(self, blocks: torch.Tensor) -> torch.Tensor:
        ratio = divided(blocks[:, 4:].view(torch.int8).float(), INT8_MAX)
        return ratio.mul_(to_numbers(blocks[:, :4], torch.float32))
