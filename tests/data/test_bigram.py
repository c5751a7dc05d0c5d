"""The bigram model: hand arithmetic, and probabilities that add up to one."""

import math

import numpy as np
import pytest

from adloco.data.bigram import BigramModel


def test_by_hand() -> None:
    # Pairs: 01 twice, 10 twice, 02 once. So c(0) = 3 with n(0) = 2, c(1) = 2 with n(1) = 1, and
    # 2 begins none. Unigrams: p = (3 + 1, 2 + 1, 1 + 1) / (6 + 3).
    model = BigramModel.fit(np.array([0, 1, 0, 1, 0, 2], dtype=np.uint16), vocab_size=3)
    #     P(1 | 0) = (2 + 2 * 3/9) / (3 + 2) = 8/15
    #     P(2 | 1) = (0 + 1 * 2/9) / (2 + 1) = 2/27
    #     P(1 | 2) = p(1) = 1/3
    expected = -math.log(8 / 15 * 2 / 27 * 1 / 3) / 3
    assert model.loss(np.array([0, 1, 2, 1])) == pytest.approx(expected, rel=1e-14)
    # A pair that comes twice counts twice.
    twice = -(2 * math.log(8 / 15) + math.log((2 + 1 * 4 / 9) / 3)) / 3
    assert model.loss(np.array([0, 1, 0, 1])) == pytest.approx(twice, rel=1e-14)


def test_probabilities_add_up_to_one() -> None:
    tokens = np.random.default_rng(0).zipf(1.5, 500) % 20
    model = BigramModel.fit(tokens, vocab_size=23)
    for first in range(23):
        losses = [model.loss(np.array([first, second])) for second in range(23)]
        assert sum(math.exp(-loss) for loss in losses) == pytest.approx(1, rel=1e-12)


def test_large_vocabularies_and_a_chain_that_is_known() -> None:
    """Ids near 2^18, and a text in which each token decides the next: the loss tends to zero."""
    tokens = np.tile(np.arange(2**18 - 4, 2**18, dtype=np.uint32), 25_000)
    model = BigramModel.fit(tokens, vocab_size=2**18)
    assert 0 < model.loss(tokens[:1000]) < 1e-3
