"""bfloat16 as a wire format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from adloco.distributed.wire.wire_format import to_bf16, to_bytes, to_numbers
from adloco.late import torch


@dataclass(frozen=True, kw_only=True)
class Bf16:
    """The nearest bfloat16, 16 bits for each value.

    |error| <= |x| / 256 + 2^-134. Ties are rounded to even. Values beyond the largest finite
    bfloat16 become that one.
    """

    key: ClassVar[str] = "bf16"

    block = 64
    block_bytes = 2 * block

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return to_bytes(to_bf16(values))

    def decode(self, blocks: torch.Tensor) -> torch.Tensor:
        return to_numbers(blocks, torch.bfloat16).float()
