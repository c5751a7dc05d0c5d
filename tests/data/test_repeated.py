"""The share of held-out text that is trained on, against sets of Python."""

import numpy as np
import pytest

from adloco.data import repeated
from adloco.data.repeated import LENGTH, repeated_share


def brute(text: list[int], other: list[int]) -> float:
    known = {tuple(other[i : i + LENGTH]) for i in range(len(other) - LENGTH + 1)}
    windows = [tuple(text[i : i + LENGTH]) for i in range(len(text) - LENGTH + 1)]
    return sum(window in known for window in windows) / len(windows)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
@pytest.mark.parametrize("block", [7, 64, 10**6])
def test_as_sets_find_it(
    dtype: type[np.integer], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passages of several lengths, one a token too short, over the limits of blocks."""
    monkeypatch.setattr(repeated, "BLOCK", block)
    rng = np.random.default_rng(0)
    other = rng.integers(0, 200, 1000).astype(dtype)
    text = rng.integers(0, 200, 600).astype(dtype)
    text[10:110] = other[5:105]
    text[200 : 200 + LENGTH] = other[300 : 300 + LENGTH]
    text[300 : 300 + LENGTH - 1] = other[500 : 500 + LENGTH - 1]
    text[-LENGTH:] = other[-LENGTH:]
    compared: list[int] = []
    share = repeated_share(text, other, compared.append)
    assert share == brute(text.tolist(), other.tolist()) == (37 + 1 + 1) / (600 - LENGTH + 1)
    assert sum(compared) == 1000 - LENGTH + 1


def test_order_and_zeros_count() -> None:
    ones, zeros = np.ones(LENGTH, np.int32), np.zeros(LENGTH, np.int32)
    turned = np.arange(LENGTH, dtype=np.int32)[::-1]
    for text, other in ((zeros, ones), (turned, turned[::-1])):
        assert repeated_share(text, other, lambda _: None) == 0.0
        assert repeated_share(text, text, lambda _: None) == 1.0


def test_short_texts() -> None:
    short, long = np.arange(LENGTH - 1), np.arange(2 * LENGTH)
    assert repeated_share(short, long, lambda _: None) is None
    assert repeated_share(long, short, lambda _: None) == 0.0


def test_places_of_a_long_text_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the text is repeated, and a hundred places say so."""
    monkeypatch.setattr(repeated, "SAMPLES", 100)
    rng = np.random.default_rng(1)
    other, fresh = rng.integers(0, 256, 5000), rng.integers(0, 256, 5000)
    share = repeated_share(np.concatenate([other, fresh]), other, lambda _: None)
    assert share == pytest.approx(0.5, abs=0.02)
