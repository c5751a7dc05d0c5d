"""A wire format that sends the largest values of each chunk, with an index and two bits each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from adloco.distributed.wire.wire_format import to_bf16, to_bytes, to_numbers
from adloco.errors import require_range, require_setting
from adloco.late import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TopK:
    """The largest magnitudes of each chunk: an index, a sign and one of two magnitudes for each.

    Of equal magnitudes, the first ones are selected. The two magnitudes, in bfloat16, are the mean
    of the selected ones that are at least their mean, and the mean of those below it. Zeros and all
    values that are not selected are decoded as 0.

    The format is a contraction: |x - Q(x)|^2 <= (1 - (1 - 2^-16) / chunk) |x|^2 for each chunk if
    both means are normal numbers, and <= |x|^2 otherwise. Proof: for a group of n_g magnitudes x_i
    whose mean a_g is sent as (1 + d) a_g, |d| <= 2^-8, sum (x_i - (1 + d) a_g)^2 = sum x_i^2 -
    n_g a_g^2 (1 - d^2). With S the sum of the k selected magnitudes, sum n_g a_g^2 >= S^2 / k
    (Cauchy-Schwarz) and |x|^2 <= max |x_i| sum |x_i| <= S (chunk / k) S.
    """

    key: ClassVar[str] = "topk"

    chunk: int = 4096
    """Values among which the largest are selected; a power of two from 2 to 65536."""
    density: float = 1 / 16
    """Fraction of each chunk's values that is sent; at least one value is."""

    sums_in_blocks = False

    def __post_init__(self) -> None:
        power = self.chunk > 0 and self.chunk & (self.chunk - 1) == 0
        require_setting(
            power and 2 <= self.chunk <= 1 << 16,
            self,
            "chunk",
            "must be a power of two from 2 to 65536",
        )
        require_range(self, "density", above=0, at_most=1)

    @property
    def kept(self) -> int:
        """Values of a chunk that are sent."""
        return max(1, round(self.chunk * self.density))

    @property
    def entry_bits(self) -> int:
        """Bits of each value sent: its index, a bit for which magnitude, and one for the sign."""
        return (self.chunk - 1).bit_length() + 2

    @property
    def block(self) -> int:
        return self.chunk

    @property
    def block_bytes(self) -> int:
        return 4 + packed_size(self.kept, self.entry_bits)

    def encode(self, values: Tensor) -> Tensor:
        # The bits of positive floats, as integers, have the order of the floats. With the index
        # appended no two keys are equal, so topk selects the same values on every device.
        reversed_index = torch.arange(self.chunk - 1, -1, -1, device=values.device)
        keys = (values.abs().view(torch.int32).long() << 16).add_(reversed_index)
        index = self.chunk - 1 - (keys.topk(self.kept, dim=1).values & 0xFFFF)
        # float64, because sums of the largest float32 numbers would overflow.
        chosen = values.gather(1, index).double()
        magnitude = chosen.abs()
        large = magnitude >= mean_where(magnitude > 0, magnitude)
        means = [mean_where(large, magnitude), mean_where(~large & (magnitude > 0), magnitude)]
        entries = index << 2 | large.long() << 1 | (chosen < 0).long()
        # No code stands for 0, so a selected zero becomes a copy of the entry of the chunk's
        # largest value. The decoder then writes that value twice.
        entries = torch.where(magnitude > 0, entries, entries[:, :1])
        return torch.cat(
            [to_bytes(to_bf16(torch.cat(means, dim=1))), packed(entries, self.entry_bits)], dim=1
        )

    def decode(self, blocks: Tensor) -> Tensor:
        entries = unpacked(blocks[:, 4:], self.entry_bits, self.kept)
        chosen = of_two_means(blocks, entries)
        return chosen.new_zeros(len(blocks), self.chunk).scatter_(1, entries >> 2, chosen)


def mean_where(where: Tensor, numbers: Tensor) -> Tensor:
    """Mean of the numbers of each row where `where` is True, shape (rows, 1); 0 if nowhere."""
    return (numbers * where).sum(dim=1, keepdim=True) / where.sum(dim=1, keepdim=True).clamp_(min=1)


def of_two_means(blocks: Tensor, codes: Tensor) -> Tensor:
    """Decode codes that stand for one of two magnitudes with a sign.

    Args:
        blocks: uint8 of shape (rows, block_bytes). Each begins with the two magnitudes in bfloat16.
        codes: int64 of shape (rows, count). The lowest bit is 1 for a negative value. The second
            lowest is 1 for the first magnitude. Higher bits are ignored.

    Returns:
        float32 of shape (rows, count).
    """
    means = to_numbers(blocks[:, :4], torch.bfloat16).float()
    return means.gather(1, 1 - (codes >> 1 & 1)) * (1 - 2 * (codes & 1))


def packed_size(count: int, bits: int) -> int:
    """Bytes that `count` integers of `bits` bits take."""
    return (count * bits + 7) // 8


def packed(numbers: Tensor, bits: int) -> Tensor:
    """Pack the integers of each row into bytes without gaps, lowest bits first.

    Args:
        numbers: int64 in [0, 2^bits), of shape (rows, count).
        bits: Bits of each integer.

    Returns:
        uint8 of shape (rows, packed_size(count, bits)).
    """
    rows, count = numbers.shape
    size = packed_size(count, bits)
    ones = numbers[:, :, None] >> torch.arange(bits, device=numbers.device) & 1
    octets = torch.nn.functional.pad(ones.flatten(1), (0, 8 * size - count * bits)).view(
        rows, size, 8
    )
    return (octets << torch.arange(8, device=numbers.device)).sum(dim=2).to(torch.uint8)


def unpacked(octets: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `packed`: int64 of shape (rows, count)."""
    ones = octets[:, :, None].long() >> torch.arange(8, device=octets.device) & 1
    numbers = ones.flatten(1)[:, : count * bits].reshape(len(octets), count, bits)
    return (numbers << torch.arange(bits, device=octets.device)).sum(dim=2)
