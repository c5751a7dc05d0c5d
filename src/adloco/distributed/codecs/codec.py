"""What a wire format is, how the values of an outer synchronisation become bytes, and what the
formats share. They have a file each; none has a state.

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

from adloco.errors import require

BF16_MAX = torch.finfo(torch.bfloat16).max


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
        """True if the sum of several workers' values is sent on in this format again.

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
    """Keep the residual in the worker's parameters, ahead of the global ones; false: it waits in
    memory, to be added to what is sent next.
    """

    def __post_init__(self) -> None:
        require(
            0 <= self.error_feedback <= 1,
            f"error_feedback must be in [0, 1], got {self.error_feedback}",
        )


def normalised(values: Tensor) -> tuple[Tensor, Tensor]:
    """(absmax, values / absmax) of each block, zeros where all are. A division, as the inverse of a
    denormal number is infinite.
    """
    absmax = values.abs().amax(dim=1, keepdim=True)
    return absmax, values / absmax.masked_fill(absmax == 0, 1.0)


def to_bf16(values: Tensor) -> Tensor:
    return values.clamp(-BF16_MAX, BF16_MAX).to(torch.bfloat16)


def to_bytes(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.uint8)


def to_numbers(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers, in memory of their own: a part of a block may begin where no number can."""
    return blocks.clone(memory_format=torch.contiguous_format).view(dtype)


def mean_where(where: Tensor, numbers: Tensor) -> Tensor:
    """Mean of a row's numbers at these places, (rows, 1); 0 where there are none."""
    return (numbers * where).sum(dim=1, keepdim=True) / where.sum(dim=1, keepdim=True).clamp_(min=1)


def of_two_means(blocks: Tensor, codes: Tensor) -> Tensor:
    """Float32 of codes, (rows, count) int64: the second lowest bit says which of the two bfloat16
    that a block begins with, the lowest its sign.
    """
    means = to_numbers(blocks[:, :4], torch.bfloat16).float()
    return means.gather(1, 1 - (codes >> 1 & 1)) * (1 - 2 * (codes & 1))
