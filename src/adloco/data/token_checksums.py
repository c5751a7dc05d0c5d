"""Checksums of a token store, which find tokens that were changed after they were written.

The tokens of a chunk are cut into blocks of at most `BLOCK_TOKENS`. The file `SPLIT.sums` has a
record for each block: the number of tokens up to its end, and the digest of its own.
"""

import hashlib
import random
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

RECORD = struct.Struct("<Q16s")
BLOCK_TOKENS = 1 << 20
SAMPLED_BLOCKS = 8
"""Blocks of a split that are read when a store is opened; with the largest, 32 MiB."""


def sums_file(folder: Path, split: str) -> Path:
    """The file of a split's checksums."""
    return folder / f"{split}.sums"


def block_records(tokens: NDArray[Any], before: int) -> list[bytes]:
    """The records of a chunk's blocks.

    Args:
        tokens: The chunk's tokens of a split.
        before: Tokens of the split before them.
    """
    blocks = [tokens[start : start + BLOCK_TOKENS] for start in range(0, len(tokens), BLOCK_TOKENS)]
    ends = np.cumsum([before, *map(len, blocks)])[1:]
    return [RECORD.pack(int(end), _digest(block)) for end, block in zip(ends, blocks, strict=True)]


def sample_blocks(count: int) -> list[int]:
    """Some of this many blocks: always the same, the first and the last among them."""
    inner = range(1, count - 1)
    chosen = random.Random(0).sample(inner, min(len(inner), SAMPLED_BLOCKS - 2))
    return sorted({*chosen, *range(count)[:1], *range(count)[-1:]})


def check_blocks(
    folder: Path, split: str, tokens: NDArray[Any], blocks: Sequence[int]
) -> Iterator[int]:
    """Compare blocks with their checksums.

    Args:
        folder: The store's folder.
        split: train or validation.
        tokens: All tokens of the split.
        blocks: Numbers of the blocks, from 0.

    Yields:
        The number of tokens of each block.

    Raises:
        ValueError: A block is not what was written.
    """
    records = sums_file(folder, split).read_bytes()
    for block in blocks:
        start = RECORD.unpack_from(records, (block - 1) * RECORD.size)[0] if block else 0
        end, digest = RECORD.unpack_from(records, block * RECORD.size)
        if not start < end <= len(tokens) or _digest(tokens[start:end]) != digest:
            raise ValueError(changed(folder, f"{split}.bin"))
        yield end - start


def changed(folder: Path, name: str) -> str:
    """A sentence that says that a file of a token store was changed."""
    return (
        f"{folder / name} in the token cache is not what was written there; remove {folder}, and "
        "it is made again from the text"
    )


def _digest(tokens: NDArray[Any]) -> bytes:
    return hashlib.sha256(tokens.tobytes()).digest()[:16]
