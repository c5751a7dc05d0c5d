"""Packing integers of a few bits each into bytes, without gaps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from adloco.late import torch

if TYPE_CHECKING:
    from torch import Tensor


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
