"""The protocol of wire formats, which turn values of a sync into bytes, and code that they share.

Each format has a file, and none has a state. The caller adds up decoded values in float32, and
keeps what encoding loses (`Feedback`).

`Bf16` halves what is sent. INTELLECT-1 sent `Int8` between continents (arXiv 2412.01152), and
Streaming DiLoCo 4 bits a value (arXiv 2501.18512), which `Int4` does with other levels. `Int2` has
2, which need error feedback (MuLoCo, arXiv 2505.23725), and `Int1` 1.
"""

from __future__ import annotations

from typing import Protocol

from adloco.errors import require
from adloco.late import torch

SMALLEST = 2.0**-100
"""Blocks in whole numbers whose absmax is smaller are decoded as zeros."""
BF16_MAX = (2 - 2**-7) * 2.0**127
"""The largest finite bfloat16."""


class WireFormat(Protocol):
    """Encodes values for a link: each block of `block` values becomes `block_bytes` bytes.

    The size does not depend on the values, so both ends know it.
    """

    @property
    def block(self) -> int:
        """Values of a block."""

    @property
    def block_bytes(self) -> int:
        """Bytes of an encoded block."""

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Encode blocks. The bytes of a block depend on its values alone, which stay as they are.

        values: Finite float32 of shape (blocks, block).

        Returns:
            Contiguous uint8 of shape (blocks, block_bytes).
        """

    def decode(self, blocks: torch.Tensor) -> torch.Tensor:
        """Decode blocks.

        blocks: uint8 of shape (blocks, block_bytes).

        Returns:
            Finite float32 of shape (blocks, block).
        """


def check_format(wire: WireFormat, device: torch.device | str = "cpu") -> None:
    """Raise ValueError unless a format does with two blocks on a device what the protocol says."""
    name = f"the wire format {type(wire).__name__} does not fit: "
    values = torch.linspace(-1, 3, 2 * wire.block, dtype=torch.float32, device=device)
    values = values.view(2, wire.block)
    given, shape = values.clone(), (2, wire.block_bytes)
    encoded = wire.encode(given)
    require(
        torch.equal(given, values),
        f"{name}encode must leave the values that it is given as they are",
    )
    require(
        (encoded.dtype, encoded.shape) == (torch.uint8, shape) and encoded.is_contiguous(),
        f"{name}encode must give contiguous uint8 of shape {shape}, got {encoded.dtype} of "
        f"{tuple(encoded.shape)}",
    )
    require(
        torch.equal(wire.encode(values[:1]), encoded[:1]),
        f"{name}encode must give a block the same bytes each time, whatever other blocks there are",
    )
    decoded = wire.decode(encoded)
    require(
        decoded.shape == values.shape and bool(decoded.isfinite().all()),
        f"{name}decode must give finite numbers of shape {tuple(values.shape)}, got "
        f"{decoded.dtype} of {tuple(decoded.shape)}",
    )


def at_least(wire: WireFormat | None, floor: WireFormat) -> WireFormat | None:
    """The wire format, or `floor` if the format has fewer bits for each value.

    None if nothing is encoded.
    """
    if wire is None or wire.block_bytes * floor.block >= floor.block_bytes * wire.block:
        return wire
    return floor


def bytes_per_value(wire: WireFormat | None) -> float:
    """Bytes of a value that is sent; wire None: in float32."""
    return 4.0 if wire is None else wire.block_bytes / wire.block


def signed_absmax(values: torch.Tensor) -> torch.Tensor:
    """The value with the largest magnitude of each block, shape (blocks, 1).

    If a value and its negative are the largest, it is the positive one.
    """
    highest, lowest = values.amax(dim=1, keepdim=True), values.amin(dim=1, keepdim=True)
    return torch.where(highest >= -lowest, highest, lowest)


def largest_whole(block: int) -> int:
    """The largest magnitude of a block as a whole number: a power of two, which times the block is
    at most 2^24, so that sums in float32 are exact.
    """
    return 1 << min(20, 24 - (block - 1).bit_length())


def in_whole_numbers(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(whole, unit): values as whole numbers of each block's unit, absmax / `largest_whole`.

    The shapes are (blocks, block) and (blocks, 1). Blocks whose absmax is below `SMALLEST` give
    zeros.
    """
    absmax = signed_absmax(values).abs_()
    # Exact, because it is a power of two.
    unit = (absmax / largest_whole(values.shape[1])).masked_fill_(absmax < SMALLEST, 1.0)
    return (values / unit).round_(), unit


def divided(values: torch.Tensor, number: float) -> torch.Tensor:
    """values / number, with the bits of a CPU on a GPU, too, which would multiply by the rounded
    inverse of a number and divides by a tensor.
    """
    return values / torch.full((), number, dtype=values.dtype, device=values.device)


def to_bf16(values: torch.Tensor) -> torch.Tensor:
    """The nearest finite bfloat16 of each value."""
    return values.clamp(-BF16_MAX, BF16_MAX).to(torch.bfloat16)


def to_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """The bytes of the numbers, as uint8 along the last dimension."""
    return numbers.contiguous().view(torch.uint8)


def to_numbers(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of this type in the bytes; the inverse of `to_bytes`."""
    # Copied, because a part of a block may begin at an address where no number of the type can.
    return blocks.clone(memory_format=torch.contiguous_format).view(dtype)
