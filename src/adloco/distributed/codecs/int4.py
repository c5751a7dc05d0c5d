"""A wire format with 4 bits for each value: signed powers of two (E3M0), scaled for each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from adloco.distributed.codecs.codec import ErrorFeedback, normalised, to_bytes, to_numbers
from adloco.errors import require
from adloco.late import torch

if TYPE_CHECKING:
    from torch import Tensor

E3M0 = tuple(
    sign * magnitude for sign in (1.0, -1.0) for magnitude in (*(2.0**-k for k in range(7)), 0.0)
)
"""Values of the 16 codes of `Int4`, as fractions of the block's largest magnitude.

The highest bit is the sign. The other three say how often the magnitude is halved; 7 stands for 0.
"""


@dataclass(frozen=True, kw_only=True)
class Int4(ErrorFeedback):
    """E3M0: each value becomes the nearest of 0 and +-absmax 2^-k, k = 0...6.

    absmax is the block's largest magnitude and is sent in float32. If two levels are equally near,
    the one with the larger magnitude is taken.

    A power of two is the nearest level up to 1.5 times itself, so |error| <= max(|x| / 3,
    absmax / 128), and never more than |x|. Rounding in float32 adds two terms: that of x / absmax
    near a threshold (2^-21 of the bound) and that of denormal results (2^-150). The nearest level
    is biased: of magnitudes whose logarithm is uniformly distributed, the mean is multiplied by
    (2 - log2 1.5) ln 2 = 0.981. With thresholds at sqrt(2) it would be multiplied by 1.040.
    """

    key: ClassVar[str] = "int4"

    block: int = 128
    """Values that share a scale, which takes 4 bytes. Even, because two values share a byte."""

    sums_in_blocks = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.block > 0 and self.block % 2 == 0,
            f"block must be even and > 0, got {self.block}",
        )

    @property
    def block_bytes(self) -> int:
        return 4 + self.block // 2

    def encode(self, values: Tensor) -> Tensor:
        absmax, ratio = normalised(values)
        # All thresholds are 1 or 1.5 times a power of two. So a float's first 10 bits (the sign,
        # the exponent and one bit of the mantissa) decide which level is nearest: it is the one
        # nearest to the middle of all floats with these bits. A look-up in this table of 1024
        # entries takes a third of the time of arithmetic, and a tenth of that of torch.bucketize.
        middles = ((torch.arange(-512, 512, dtype=torch.int32) << 22) + (1 << 21)).view(
            torch.float32
        )
        nearest = (middles[:, None] - torch.tensor(E3M0, dtype=torch.float32)).abs().argmin(dim=1)
        index = (ratio.view(torch.int32) >> 22).add_(512)
        codes = (
            nearest.to(values.device, torch.uint8)
            .index_select(0, index.flatten())
            .view(values.shape)
        )
        return torch.cat([to_bytes(absmax), codes[:, ::2] << 4 | codes[:, 1::2]], dim=1)

    def decode(self, blocks: Tensor) -> Tensor:
        levels = torch.tensor(E3M0, dtype=torch.float32)
        # A byte's two float32 values are looked up at once, as one int64.
        pairs = (
            torch.cartesian_prod(levels, levels)
            .contiguous()
            .view(torch.int64)
            .flatten()
            .to(blocks.device)
        )
        ratio = (
            pairs.index_select(0, blocks[:, 4:].int().flatten())
            .view(torch.float32)
            .view(len(blocks), self.block)
        )
        return ratio.mul_(to_numbers(blocks[:, :4], torch.float32))
