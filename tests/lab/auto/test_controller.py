"""Choices of H from given measurements."""

import json
from typing import Any

import pytest

from adloco.lab.auto.controller import AutoController, MeasuredRound
from adloco.lab.auto.option import Auto
from adloco.rules.chosen import Change


def measured(sync_seconds: float | None, step_seconds: float = 1.0) -> MeasuredRound:
    return MeasuredRound(step_seconds=step_seconds, sync_seconds=sync_seconds)


class Run:
    """A controller, and the H in force."""

    def __init__(self, first: int = 20, fewest_steps: int = 1, **settings: Any) -> None:
        auto = Auto(sync_interval=True, **{"every": 1, **settings})
        self.controller = AutoController(auto, fewest_steps=fewest_steps)
        self.sync_every = self.controller.within_bounds(first)

    def update(self, measured: MeasuredRound, rounds_done: int) -> Change | None:
        change = self.controller.update(self.sync_every, measured, rounds_done)
        self.sync_every = int(change.after) if change else self.sync_every
        return change

    def values(self, syncs: list[float | None], begin: int = 2) -> list[int]:
        """H after each of these rounds, with steps of one second."""
        result = []
        for index, sync_seconds in enumerate(syncs):
            self.update(measured(sync_seconds), begin + index)
            result.append(self.sync_every)
        return result


@pytest.mark.parametrize(
    ("sync_seconds", "step_seconds", "cost"), [(3.0, 0.5, 0.05), (0.2, 0.1, 0.3), (8.0, 0.2, 0.1)]
)
def test_h_is_the_least_of_a_grid(sync_seconds: float, step_seconds: float, cost: float) -> None:
    def seconds(steps: float) -> float:
        return steps**cost * (step_seconds + sync_seconds / steps)

    least = min(range(1, 1000), key=seconds)
    run = Run(first=least + least // 3 + 1, sync_cost=cost)
    change = run.update(measured(sync_seconds, step_seconds), 2)
    assert change is not None
    assert change.after == pytest.approx(least, abs=1)
    assert max(seconds(1.2 * least), seconds(least / 1.2)) < 1.006 * seconds(least)


def test_h_follows_the_syncs_by_at_most_a_factor_of_two() -> None:
    """With a cost of 0.1 and steps of one second the best H is 9 times the seconds of a sync."""
    assert Run().values([12.0] * 4) == [40, 80, 108, 108]
    assert Run().values([0.5] * 4) == [10, 5, 5, 5]


def test_small_differences_change_nothing() -> None:
    # 24 is a fifth above 20, 24.3 is more; 16.7 is a fifth below, 16.6 is less.
    assert Run().values([24 / 9, 16.7 / 9]) == [20, 20]
    assert Run().values([24.3 / 9]) == [24]
    assert Run().values([16.6 / 9]) == [17]


def test_bounds() -> None:
    assert Run(first=200).values([1e9] * 3) == [400, 500, 500]
    assert Run(first=4).values([0.1] * 3) == [2, 1, 1]
    assert Run(fewest_steps=15).values([0.1]) == [15]
    assert Run(first=5, fewest_steps=12).sync_every == 12
    assert Run(first=900).sync_every == 500
    assert Run(fewest_steps=600).sync_every == 600
    assert Run().update(measured(1.0, step_seconds=0.0), 2) is not None, "clocks may stand still"


def test_a_choice_uses_the_medians_of_the_rounds_since_the_last() -> None:
    run = Run(every=3)
    # The first round does not count; of 4 and 100 the median is 52, of 2, 3 and 100 it is 3.
    changes = [
        run.update(measured(seconds), number)
        for number, seconds in enumerate([9e9, 4.0, 100.0, 2.0, 100.0, 3.0], start=1)
    ]
    reason = "syncs take 72% of the time, and 10% is best"
    up = Change(setting="sync_every", before=20, after=40, reason=reason)
    reason = "syncs take 7% of the time, and 10% is best"
    down = Change(setting="sync_every", before=40, after=27, reason=reason)
    assert changes == [None, None, up, None, None, down]


def test_nothing_is_chosen_from_nothing() -> None:
    assert Run().values([None, None]) == [20, 20], "no trainer has two workers"
    assert Run().update(measured(9.0), 1) is None, "the first round does not count"
    still = Run(every=3)
    for number, sync in enumerate([0.0, 0.0, 1.0], start=4):
        assert still.update(measured(sync, step_seconds=0.0), number) is None, "a clock stood still"
    run = Run(every=2)
    run.update(measured(9.0), 3)
    run.controller.forget()
    assert run.values([0.2], begin=4) == [10], "a merge ends what was measured before"


def test_a_restored_controller_continues() -> None:
    syncs = [3.0, 8.0, 1.0, 5.0, 4.0, 0.2, 0.3]
    whole, part, other = (Run(every=2) for _ in range(3))
    expected = whole.values(syncs)
    part.values(syncs[:3])
    other.controller.load_state_dict(json.loads(json.dumps(part.controller.state_dict())))
    other.sync_every = part.sync_every
    assert other.values(syncs[3:], begin=5) == expected[3:]
    assert other.controller.state_dict() == whole.controller.state_dict()


@pytest.mark.parametrize(("field", "value"), [("every", 0), ("sync_cost", 1.0)])
def test_bad_settings(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be .*, got {value}"):
        Auto(**{field: value})
