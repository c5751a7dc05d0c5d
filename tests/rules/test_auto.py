"""Choices of the settings that are auto, from given measurements."""

import json
from typing import Any

import pytest

from adloco.rules.auto import AutoController, AutoLimits, Change, Chosen, MeasuredRound


def measured(sync_seconds: float | None, step_seconds: float = 1.0) -> MeasuredRound:
    return MeasuredRound(step_seconds=step_seconds, sync_seconds=sync_seconds)


def of_sync_every(first: int = 20, fewest_steps: int = 1, **limits: Any) -> AutoController:
    return AutoController(
        AutoLimits(**{"every": 1, **limits}),
        Chosen(sync_every=first),
        auto={"sync_every"},
        fewest_steps=fewest_steps,
    )


def values(controller: AutoController, syncs: list[float | None], begin: int = 2) -> list[int]:
    """H after each of these rounds."""
    result = []
    for index, sync_seconds in enumerate(syncs):
        controller.update(measured(sync_seconds), begin + index)
        result.append(controller.chosen.sync_every)
    return result


def test_h_follows_the_syncs_by_at_most_a_factor_of_two() -> None:
    """With a cost of 0.1 and steps of one second the best H is 9 times the seconds of a sync."""
    assert values(of_sync_every(), [12.0] * 4) == [40, 80, 108, 108]
    assert values(of_sync_every(), [0.5] * 4) == [10, 5, 5, 5]


def test_small_differences_change_nothing() -> None:
    # 24 is a fifth above 20, 24.3 is more; 16.7 is a fifth below, 16.6 is less.
    assert values(of_sync_every(), [24 / 9, 16.7 / 9]) == [20, 20]
    assert values(of_sync_every(), [24.3 / 9]) == [24]
    assert values(of_sync_every(), [16.6 / 9]) == [17]


def test_bounds() -> None:
    limits = {"sync_every_minimum": 12, "sync_every_maximum": 70}
    assert values(of_sync_every(**limits), [100.0] * 3) == [40, 70, 70]
    assert values(of_sync_every(**limits), [0.1, 0.1]) == [12, 12]
    assert values(of_sync_every(fewest_steps=15, **limits), [0.1]) == [15]
    assert of_sync_every(first=5, **limits).chosen.sync_every == 12


def test_a_choice_uses_the_medians_of_the_rounds_since_the_last() -> None:
    controller = of_sync_every(every=3)
    # The first round does not count; of 4 and 100 the median is 52, of 2, 3 and 100 it is 3.
    changes = [
        controller.update(measured(seconds), number)
        for number, seconds in enumerate([9e9, 4.0, 100.0, 2.0, 100.0, 3.0], start=1)
    ]
    reason = "syncs take 72% of the time, and 10% is best"
    up = Change(setting="sync_every", before=20, after=40, reason=reason)
    reason = "syncs take 7% of the time, and 10% is best"
    down = Change(setting="sync_every", before=40, after=27, reason=reason)
    assert changes == [(), (), (up,), (), (), (down,)]


def test_nothing_is_chosen_from_nothing() -> None:
    assert values(of_sync_every(), [None, None]) == [20, 20], "no trainer has two workers"
    assert of_sync_every().update(measured(9.0), 1) == (), "the first round does not count"
    controller = of_sync_every(every=2)
    controller.update(measured(9.0), 3)
    controller.forget()
    assert values(controller, [0.2], begin=4) == [10], "a merge ends what was measured before"
    given = AutoController(AutoLimits(every=1), Chosen(sync_every=20), auto=())
    assert values(given, [9.0]) == [20]


def test_a_restored_controller_goes_on() -> None:
    syncs = [3.0, 8.0, 1.0, 5.0, 4.0, 0.2, 0.3]
    whole, part, other = (of_sync_every(every=2) for _ in range(3))
    expected = values(whole, syncs)
    values(part, syncs[:3])
    other.load_state_dict(json.loads(json.dumps(part.state_dict())))
    assert values(other, syncs[3:], begin=5) == expected[3:]
    assert other.state_dict() == whole.state_dict()


@pytest.mark.parametrize(
    ("field", "value"),
    [("every", 0), ("sync_every_minimum", 0), ("sync_every_maximum", 0), ("sync_cost", 1.0)],
)
def test_bad_limits(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be .*, got {value}"):
        AutoLimits(**{field: value})
