"""A bigram model: the probability of a token given the one before it, counted on a text.

Its perplexity shows that a text and its tokenizer fit each other before any model is trained: a
trained model should soon be below it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class BigramModel:
    """Counts of tokens and of pairs of neighbours, with Witten-Bell smoothing.

    P(b | a) = (c(ab) + n(a) p(b)) / (c(a) + n(a)), with c(ab) the count of the pair, c(a) that of
    all pairs that begin with a, n(a) the number of different tokens after a, and the add-one
    estimate p(b) = (c(b) + 1) / (N + V) from the counts of N tokens over V ids. Every probability
    is above 0 (Witten and Bell, IEEE Transactions on Information Theory 37, 1991, method C).
    """

    pairs: NDArray[np.int64]
    """The pairs ab that occur, as a V + b, in ascending order: [different pairs]."""
    pair_counts: NDArray[np.int64]
    """c(ab) of each."""
    begun: NDArray[np.int64]
    """c(a): [V]."""
    followers: NDArray[np.int64]
    """n(a): [V]."""
    unigram: NDArray[np.float64]
    """p(b): [V]."""

    @staticmethod
    def fit(tokens: NDArray[Any], vocab_size: int) -> "BigramModel":
        """Count the pairs of a text, at least two tokens. Memory is about 35 bytes per token.

        Args:
            tokens: Token ids, [tokens].
            vocab_size: Number of ids (V).
        """
        pairs, counts = np.unique(_pairs(tokens, vocab_size), return_counts=True)
        seen = np.bincount(tokens, minlength=vocab_size)
        return BigramModel(
            pairs=pairs,
            pair_counts=counts,
            begun=np.bincount(tokens[:-1], minlength=vocab_size),
            followers=np.bincount(pairs // vocab_size, minlength=vocab_size),
            unigram=(seen + 1) / (len(tokens) + vocab_size),
        )

    def loss(self, tokens: NDArray[Any]) -> float:
        """Mean negative log-probability of the tokens after the first, in nats.

        Args:
            tokens: Token ids, [tokens], at least two.
        """
        pairs, counts = np.unique(_pairs(tokens, len(self.begun)), return_counts=True)
        first, second = np.divmod(pairs, len(self.begun))
        at = np.minimum(np.searchsorted(self.pairs, pairs), len(self.pairs) - 1)
        together = np.where(self.pairs[at] == pairs, self.pair_counts[at], 0)
        begun, followers = self.begun[first], self.followers[first]
        smoothed = together + followers * self.unigram[second]
        # A token that begins no pair says nothing about the next.
        probabilities = np.where(
            begun > 0, smoothed / np.maximum(begun + followers, 1), self.unigram[second]
        )
        return float(-(counts @ np.log(probabilities)) / counts.sum())


def _pairs(tokens: NDArray[Any], vocab_size: int) -> NDArray[np.int64]:
    ids = np.asarray(tokens, dtype=np.int64)
    return ids[:-1] * vocab_size + ids[1:]
