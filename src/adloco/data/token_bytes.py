"""The UTF-8 bytes of text that tokens stand for, with which losses per token become bits per byte:
a measure that does not depend on the tokenizer.
"""

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from adloco.data.sources import TokenSource
from adloco.data.tokenizers import Tokenizer
from adloco.data.transformers_tokenizer import PROBE

LEAST_LOSS = 1e-3
"""Part of the texts' bytes up to which a loss is ignored."""
TOKENS_AT_ONCE = 1 << 24
"""Tokens that are counted together."""
WINDOWS_AT_ONCE = 1024
"""Windows whose tokens are in memory together while their bytes are counted."""


@dataclass(frozen=True, kw_only=True)
class TokenBytes:
    """Number of bytes of text that each token of packed documents stands for."""

    of_id: NDArray[np.float64]
    """Bytes of each id in the middle of a text, [vocabulary]: 0 for the end-of-text id, nan for an
    id whose bytes are not known.
    """
    end_of_text: int
    added: int
    """Bytes that the tokenizer puts before each text: 1 if it begins every text with a space."""
    end_bytes: int
    """Bytes of the characters that are read as the end-of-text id."""

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """The bytes of a tokenizer's ids; all nan if it drops parts of a text, such as spaces."""
        of_id = tokenizer.id_bytes()
        of_id[tokenizer.end_of_text] = 0
        if tokenizer.unknown is not None:
            of_id[tokenizer.unknown] = np.nan
        letter, probe = tokenizer.encode(["a", PROBE])
        added = of_id[letter].sum() - 1
        whole = tokenizer.decode(probe) == PROBE
        if not (whole and of_id[probe].sum() - added == len(PROBE.encode())):
            return cls(of_id=np.full_like(of_id, np.nan), end_of_text=-1, added=0, end_bytes=0)
        end = tokenizer.end_of_text
        end_bytes = len(tokenizer.decode([end]).encode())
        return cls(of_id=of_id, end_of_text=end, added=int(added), end_bytes=end_bytes)

    def predicted(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """The bytes of the tokens that are predicted in each window, all but its first: whole
        numbers, [windows]; nan for a window with a token whose bytes are not known.

        tokens: Ids of packed documents, [windows, tokens of a window].
        """
        before, predicted = tokens[:, :-1], tokens[:, 1:]
        first = (before == self.end_of_text) & (predicted != self.end_of_text)
        counts: NDArray[np.float64] = self.of_id[predicted].sum(1) - self.added * first.sum(1)
        return counts

    def lost(self, tokens: NDArray[Any], texts: int, text_bytes: int) -> int:
        """Bytes of texts that their tokens do not stand for: of characters that the tokenizer
        drops or changes. 0 if bytes are not known anyway.

        tokens: All ids of the texts, each of which ends with the end-of-text id.
        """
        times = np.zeros(len(self.of_id), dtype=np.int64)
        for at in range(0, len(tokens), TOKENS_AT_ONCE):
            times += np.bincount(tokens[at : at + TOKENS_AT_ONCE], minlength=len(times))
        found = float(np.sum(times * self.of_id, where=times > 0))
        # A text may contain the characters of that id, too.
        found += (times[self.end_of_text] - texts) * self.end_bytes
        difference = abs(found - self.added * texts - text_bytes)
        # A text that begins with a space may get none of its own.
        least = self.added * texts + LEAST_LOSS * text_bytes
        return int(difference) if difference > least else 0


def predicted_bytes(
    tokenizer: Tokenizer, source: TokenSource, indices: NDArray[np.int64]
) -> NDArray[np.float64]:
    """The bytes of text in each of these windows; see `TokenBytes.predicted`.

    tokenizer: Has made the tokens of `source`.
    """
    known = TokenBytes.of(tokenizer)
    chunks = np.array_split(indices, math.ceil(len(indices) / WINDOWS_AT_ONCE))
    return np.concatenate([known.predicted(source.windows(chunk).numpy()) for chunk in chunks])
