"""The search for the largest micro-batch, on steps whose memory is known."""

from collections.abc import Callable

import pytest

from adloco.rules.micro_batch_search import Measured, largest_micro_batch


def steps(peak: Callable[[int], int], budget: int, ran: list[int]) -> Callable[[int], Measured]:
    def measure(size: int) -> Measured:
        ran.append(size)
        return Measured(
            micro_batch=size, peak_bytes=peak(size), seconds=1.0, fits=peak(size) <= budget
        )

    return measure


@pytest.mark.parametrize("answer", [1, 2, 3, 7, 8, 21, 64, 100])
def test_the_largest_that_fits_is_found(answer: int) -> None:
    """A step takes 50 units of memory and 3 for each sample."""
    ran: list[int] = []
    budget = 50 + 3 * answer
    found, measured = largest_micro_batch(
        steps(lambda size: 50 + 3 * size, budget, ran), limit_bytes=2 * budget, largest=100
    )
    assert found == answer
    assert [row.micro_batch for row in measured] == sorted(ran)
    assert len(ran) == len(set(ran)) <= 14
    assert [row.fits for row in measured] == [row.micro_batch <= answer for row in measured]


def test_nobody_asks_for_more() -> None:
    ran: list[int] = []
    assert (
        largest_micro_batch(steps(lambda size: size, 10**9, ran), limit_bytes=10**9, largest=24)[0]
        == 24
    )
    assert max(ran) == 24


def test_what_would_run_out_for_certain_is_not_run() -> None:
    """The budget is 100 of 110 units, and 16 samples would take 146."""
    ran: list[int] = []
    assert (
        largest_micro_batch(
            steps(lambda size: 50 + 6 * size, 100, ran), limit_bytes=110, largest=512
        )[0]
        == 8
    )
    assert sorted(ran) == [1, 2, 4, 8, 9, 10]


def test_a_size_that_ran_out_is_only_an_upper_bound() -> None:
    """Eight samples run out of memory although they should fit; this says nothing about seven."""

    def measure(size: int) -> Measured:
        ran_out = size >= 8
        return Measured(
            micro_batch=size,
            peak_bytes=2**62 if ran_out else 10 * size,
            seconds=0.0 if ran_out else 1.0,
            fits=not ran_out,
        )

    assert largest_micro_batch(measure, limit_bytes=1000, largest=64)[0] == 7


def test_one_sample_must_fit() -> None:
    with pytest.raises(ValueError, match="not even a micro-batch of 1 fits: use a smaller model"):
        largest_micro_batch(steps(lambda size: 50, 40, []), limit_bytes=100, largest=8)
