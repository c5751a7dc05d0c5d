"""Lengths of texts in tokens: how many there are of each length."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(kw_only=True)
class TextLengths:
    """Number of texts of each length.

    T tokens have at most sqrt(2 T) texts of different lengths, so this stays small.
    """

    counts: Counter[int] = field(default_factory=Counter)
    """Length in tokens -> texts of this length."""
    unended: int = 0
    """Tokens of the text that `add_packed` has not seen the end of."""

    def add(self, lengths: NDArray[np.int64]) -> None:
        """Count texts of these lengths."""
        different, counts = np.unique(lengths, return_counts=True)
        self.counts.update(dict(zip(different.tolist(), counts.tolist(), strict=True)))

    def add_packed(self, tokens: NDArray[Any], end_of_text: int) -> None:
        """Count the texts that end in the next part of a packed text; the end does not count.

        Args:
            tokens: Token ids that follow those of the call before, [tokens].
            end_of_text: Id that ends each text.
        """
        ends = np.flatnonzero(tokens == end_of_text)
        self.add(np.diff(ends, prepend=-1 - self.unended) - 1)
        self.unended = len(tokens) - 1 - int(ends[-1]) if len(ends) else self.unended + len(tokens)

    @property
    def texts(self) -> int:
        return self.counts.total()

    @property
    def shortest(self) -> int:
        return min(self.counts)

    @property
    def longest(self) -> int:
        return max(self.counts)

    @property
    def median(self) -> float:
        """The length in the middle; the mean of the two in the middle of an even number."""
        lengths = sorted(self.counts)
        up_to = np.cumsum([self.counts[length] for length in lengths])
        middle = np.searchsorted(up_to, [(self.texts - 1) // 2, self.texts // 2], side="right")
        return float(np.mean([lengths[index] for index in middle]))
