"""Lengths of texts against lists, whatever the parts in which a packed text is counted."""

import numpy as np
import pytest

from adloco.data.text_lengths import TextLengths


@pytest.mark.parametrize("part", [1, 2, 3, 5, 100])
def test_packed_text_in_parts(part: int) -> None:
    # Texts of 2, 0, 3 and 1 tokens, each ended by 9.
    tokens = np.array([1, 2, 9, 9, 1, 1, 1, 9, 4, 9])
    lengths = TextLengths()
    for start in range(0, len(tokens), part):
        lengths.add_packed(tokens[start : start + part], end_of_text=9)
    assert lengths.counts == {2: 1, 0: 1, 3: 1, 1: 1} and lengths.unended == 0
    found = (lengths.texts, lengths.shortest, lengths.median, lengths.longest)
    assert found == (4, 0, 1.5, 3)


def test_statistics_against_numpy() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 7, 1000):
        each = rng.integers(1, 50, size)
        lengths = TextLengths()
        lengths.add(each[: size // 2])
        lengths.add(each[size // 2 :])
        found = (lengths.texts, lengths.shortest, lengths.median, lengths.longest)
        assert found == (size, each.min(), np.median(each), each.max())
