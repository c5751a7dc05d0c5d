"""Wire formats: how the values of an outer synchronisation become bytes. One class each; none has a
state.

`Bf16` halves what is sent. INTELLECT-1 sent `Int8` between continents (arXiv 2412.01152). `Int4` is
the E3M0 of Streaming DiLoCo (arXiv 2501.18512), 4 bits that are summed in float32; `Int2` has half
of them. `TopK` follows SparseLoCo (arXiv 2508.15706): the largest values of each chunk. 2 bits need
error feedback (MuLoCo, arXiv 2505.23725): what was not sent stays the worker's, for another sync.
The memory that this takes is the caller's, and so are sums, which are of decoded values.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from adloco.distributed.codecs.packing import packed, packed_size, unpacked

BF16_MAX = torch.finfo(torch.bfloat16).max
INT8_MAX = 127
E3M0 = tuple(
    sign * magnitude for sign in (1.0, -1.0) for magnitude in (*(2.0**-k for k in range(7)), 0.0)
)
"""What the 16 codes of `Int4` stand for, as parts of the block's largest magnitude: a bit for the
sign, and how often it is halved; 7: zero.
"""


class WireFormat(Protocol):
    """How values cross a link: blocks of `block` values each become `block_bytes` bytes, whatever
    the values, so that both ends know every size.
    """

    @property
    def error_feedback(self) -> float:
        """See `ErrorFeedback`."""
        ...

    @property
    def step_ahead(self) -> bool: ...

    @property
    def block(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def sums_in_blocks(self) -> bool:
        """Whether the sum of several workers' values is sent on in this format again.

        If not, every worker gets every other's blocks and adds them itself: sums of sparse blocks
        are not sparse.
        """
        ...

    def encode(self, values: Tensor) -> Tensor:
        """(blocks, block) finite float32 -> (blocks, block_bytes) uint8, contiguous. A block's
        bytes depend on its values alone.
        """
        ...

    def decode(self, blocks: Tensor) -> Tensor:
        """(blocks, block_bytes) uint8 -> (blocks, block) float32, finite; sending what was decoded
        once more changes nothing.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback:
    """What becomes of the residual, which is what a sync leaves unsent: settings of every lossy
    format.

    It is sent later in either case. Added to the next difference, as usual, it is missing in the
    model that the worker trains meanwhile, which makes the same progress once more. A worker a step
    ahead trains the model that has it: SAEF (arXiv 2008.05823), and SA-PEF (arXiv 2601.20738) with
    its coefficient at 1.
    """

    error_feedback: float = 0.0
    """Part of what a sync leaves unsent that the worker keeps, to send it later; 0: none."""
    step_ahead: bool = True
    """Whether that stays in the worker's parameters, ahead of the global ones; false: it waits in
    memory, to be added to what is sent next.
    """

    def __post_init__(self) -> None:
        _require(
            0 <= self.error_feedback <= 1,
            f"wire.error_feedback must be in [0, 1], got {self.error_feedback}",
        )


@dataclass(frozen=True, kw_only=True)
class Bf16(ErrorFeedback):
    """The nearest bfloat16, the even one of two: |error| <= |x| / 256 + 2^-134. What lies beyond
    the largest finite one becomes that one.
    """

    block = 64
    block_bytes = 2 * block
    sums_in_blocks = True

    def encode(self, values: Tensor) -> Tensor:
        return _bytes(_bf16(values))

    def decode(self, blocks: Tensor) -> Tensor:
        return _numbers(blocks, torch.bfloat16).float()


@dataclass(frozen=True, kw_only=True)
class Int8(ErrorFeedback):
    """Multiples of absmax / 127, with each block's largest magnitude in float32: |error| <= absmax
    / 254, but for float32's own rounding.

    What is sent is absmax itself, exactly, and not absmax / 127, which has no digits left where
    absmax is a denormal number.
    """

    block: int = 256
    """Values that share a scale, which costs 4 bytes."""

    sums_in_blocks = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.block > 0, f"wire.block must be > 0, got {self.block}")

    @property
    def block_bytes(self) -> int:
        return 4 + self.block

    def encode(self, values: Tensor) -> Tensor:
        absmax, ratio = _normalised(values)
        return torch.cat(
            [_bytes(absmax), _bytes(ratio.mul_(INT8_MAX).round_().to(torch.int8))], dim=1
        )

    def decode(self, blocks: Tensor) -> Tensor:
        return (
            blocks[:, 4:]
            .view(torch.int8)
            .float()
            .div_(INT8_MAX)
            .mul_(_numbers(blocks[:, :4], torch.float32))
        )


@dataclass(frozen=True, kw_only=True)
class Int4(ErrorFeedback):
    """E3M0: the nearest of 0 and +-absmax 2^-k, k = 0...6, the larger of two, with each block's
    largest magnitude in float32, which is sent exactly.

    Powers of two are nearest up to 1.5 times themselves, so |error| <= max(|x| / 3, absmax / 128),
    and never more than |x|. This holds exactly but for the float32 rounding of x / absmax at a
    threshold (a part in 2^21 of the bound) and of denormal results (2^-150). The nearest value is
    not unbiased: of magnitudes that are uniform in their logarithm it leaves (2 - log2 1.5) ln 2 =
    98.1%; thresholds at sqrt(2) would leave 104.0%.
    """

    block: int = 128
    """Values that share a scale, which costs 4 bytes; even, as two values share a byte."""

    sums_in_blocks = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.block > 0 and self.block % 2 == 0,
            f"wire.block must be even and > 0, got {self.block}",
        )

    @property
    def block_bytes(self) -> int:
        return 4 + self.block // 2

    def encode(self, values: Tensor) -> Tensor:
        absmax, ratio = _normalised(values)
        # All thresholds are 1 or 1.5 times a power of two, so a float's first 10 bits (sign,
        # exponent, one of mantissa) say which level is nearest: the one nearest to the middle of
        # the floats that share them. One look-up in so small a table takes a third of the time of
        # the same by arithmetic, and a tenth of that of torch.bucketize.
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
        return torch.cat([_bytes(absmax), codes[:, ::2] << 4 | codes[:, 1::2]], dim=1)

    def decode(self, blocks: Tensor) -> Tensor:
        levels = torch.tensor(E3M0, dtype=torch.float32)
        # Both values of a byte at once: two float32 are looked up as one int64.
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
        return ratio.mul_(_numbers(blocks[:, :4], torch.float32))


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

    block: int = 128
    """Values that share their two magnitudes, which cost 4 bytes; a multiple of 4, as four values
    share a byte.
    """
    error_feedback: float = 0.9
    """Part of what a sync leaves unsent that the worker keeps, to send it later; 0: none."""

    sums_in_blocks = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self.block > 0 and self.block % 4 == 0,
            f"wire.block must be a multiple of 4 and > 0, got {self.block}",
        )

    @property
    def block_bytes(self) -> int:
        return 4 + self.block // 4

    def encode(self, values: Tensor) -> Tensor:
        magnitude = values.abs().double()  # So that sums of the largest float32 stay finite.
        large = magnitude >= magnitude.mean(dim=1, keepdim=True)
        small = _mean_where(~large, magnitude).masked_fill_(
            (magnitude == 0).any(dim=1, keepdim=True), 0.0
        )
        codes = (large << 1 | (values < 0)).to(torch.uint8)
        # Not by `packed`, which makes an int64 of every bit.
        fours = codes[:, ::4] << 6 | codes[:, 1::4] << 4 | codes[:, 2::4] << 2 | codes[:, 3::4]
        return torch.cat(
            [_bytes(_bf16(torch.cat([_mean_where(large, magnitude), small], dim=1))), fours], dim=1
        )

    def decode(self, blocks: Tensor) -> Tensor:
        codes = torch.stack([blocks[:, 4:] >> shift & 3 for shift in (6, 4, 2, 0)], dim=2).flatten(
            1
        )
        return _of_two_means(blocks, codes.long())


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
        _require(
            power and 2 <= self.chunk <= 1 << 16,
            f"wire.chunk must be a power of two from 2 to 65536, got {self.chunk}",
        )
        _require(0 < self.density <= 1, f"wire.density must be in (0, 1], got {self.density}")

    @property
    def kept(self) -> int:
        """Values of a chunk that are sent."""
        return max(1, round(self.chunk * self.density))

    @property
    def entry_bits(self) -> int:
        """Of each value sent: its index, one bit for the larger magnitude and one for the sign."""
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
        large = magnitude >= _mean_where(magnitude > 0, magnitude)
        means = [_mean_where(large, magnitude), _mean_where(~large & (magnitude > 0), magnitude)]
        entries = index << 2 | large.long() << 1 | (chosen < 0).long()
        # No code stands for 0: a chosen zero repeats the chunk's largest value, which is written
        # twice then.
        entries = torch.where(magnitude > 0, entries, entries[:, :1])
        return torch.cat(
            [_bytes(_bf16(torch.cat(means, dim=1))), packed(entries, self.entry_bits)], dim=1
        )

    def decode(self, blocks: Tensor) -> Tensor:
        entries = unpacked(blocks[:, 4:], self.entry_bits, self.kept)
        chosen = _of_two_means(blocks, entries)
        return chosen.new_zeros(len(blocks), self.chunk).scatter_(1, entries >> 2, chosen)


def _require(condition: bool, message: str) -> None:
    # As rules.checks.require; placement imports no other layer.
    if not condition:
        raise ValueError(message)


def _normalised(values: Tensor) -> tuple[Tensor, Tensor]:
    """(absmax, values / absmax) of each block, zeros where all are. A division, as the inverse of a
    denormal number is infinite.
    """
    absmax = values.abs().amax(dim=1, keepdim=True)
    return absmax, values / absmax.masked_fill(absmax == 0, 1.0)


def _bf16(values: Tensor) -> Tensor:
    return values.clamp(-BF16_MAX, BF16_MAX).to(torch.bfloat16)


def _bytes(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8)


def _numbers(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers, in memory of their own: a part of a block may begin where no number can."""
    return blocks.clone(memory_format=torch.contiguous_format).view(dtype)


def _mean_where(where: Tensor, numbers: Tensor) -> Tensor:
    """Mean of a row's numbers at these places, (rows, 1); 0 where there are none."""
    return (numbers * where).sum(dim=1, keepdim=True) / where.sum(dim=1, keepdim=True).clamp_(min=1)


def _of_two_means(blocks: Tensor, codes: Tensor) -> Tensor:
    """Float32 of codes, (rows, count) int64: the second lowest bit says which of the two bfloat16
    that a block begins with, the lowest its sign.
    """
    means = _numbers(blocks[:, :4], torch.bfloat16).float()
    return means.gather(1, 1 - (codes >> 1 & 1)) * (1 - 2 * (codes & 1))
