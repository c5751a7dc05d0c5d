"""Choices of the settings that are auto, from given measurements."""

import json
from typing import Any

import pytest

from adloco.lab.auto.controller import AutoController, MeasuredRound, changed
from adloco.lab.auto.option import Auto
from adloco.rules.batch_rules.norm_test import Estimator, NormTest
from adloco.rules.chosen import Change, Chosen


def measured(
    sync_seconds: float | None,
    step_seconds: float = 1.0,
    trainer_batch: float = 8,
    noise_scale: float | None = None,
) -> MeasuredRound:
    return MeasuredRound(
        trainer_batch=trainer_batch,
        fits=8,
        noise_scale=noise_scale,
        step_seconds=step_seconds,
        sync_seconds=sync_seconds,
    )


class Run:
    """A controller, and the numbers in force."""

    def __init__(self, controller: AutoController, first: Chosen) -> None:
        self.controller, self.chosen = controller, controller.within_bounds(first)

    def update(self, measured: MeasuredRound, rounds_done: int) -> tuple[Change, ...]:
        changes = self.controller.update(self.chosen, measured, rounds_done)
        self.chosen = changed(self.chosen, changes)
        return changes


def of_sync_every(first: int = 20, fewest_steps: int = 1, **limits: Any) -> Run:
    auto = Auto(chooses=("sync_every",), **{"every": 1, **limits})
    return Run(AutoController(auto, fewest_steps=fewest_steps), Chosen(sync_every=first))


def of_eta(eta: float = 0.8, estimator: Estimator = "unbiased", **limits: Any) -> Run:
    auto = Auto(chooses=("eta",), **{"every": 1, "eta_maximum": 2.0, **limits})
    controller = AutoController(auto, norm_test=NormTest(estimator=estimator))
    return Run(controller, Chosen(sync_every=20, eta=eta))


def values(run: Run, syncs: list[float | None], begin: int = 2) -> list[int]:
    """H after each of these rounds."""
    result = []
    for index, sync_seconds in enumerate(syncs):
        run.update(measured(sync_seconds), begin + index)
        result.append(run.chosen.sync_every)
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
    run = of_sync_every(every=3)
    # The first round does not count; of 4 and 100 the median is 52, of 2, 3 and 100 it is 3.
    changes = [
        run.update(measured(seconds), number)
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
    run = of_sync_every(every=2)
    run.update(measured(9.0), 3)
    run.controller.forget()
    assert values(run, [0.2], begin=4) == [10], "a merge ends what was measured before"
    given = Run(AutoController(Auto(every=1)), Chosen(sync_every=20))
    assert values(given, [9.0]) == [20]


def test_eta_makes_the_fastest_batch_by_hand() -> None:
    """A sample takes 0.1 s and a sync 20 s in 20 steps: with a noise scale of 40 samples a batch of
    sqrt(40 x 1 / 0.1) = 20 is best. That is eta = sqrt(40 / 20), or of the plug-in form
    sqrt(40 / 60), which is a fifth and less from 0.8.
    """
    round_of_eight = measured(20.0, 0.8, trainer_batch=8, noise_scale=40.0)
    run = of_eta()
    (change,) = run.update(round_of_eight, 2)
    assert (change.before, change.after) == (0.8, pytest.approx(2**0.5))
    assert run.chosen == Chosen(sync_every=20, eta=change.after)
    assert change.reason == (
        "a sample takes 0.1 s and a step with its part of a sync 1 s more, so at a noise scale of "
        "40 samples a batch of 20 is best"
    )
    assert of_eta(estimator="plug-in").update(round_of_eight, 2) == ()
    (change,) = of_eta(eta=0.5, estimator="plug-in").update(round_of_eight, 2)
    assert change.after == pytest.approx((40 / 60) ** 0.5)


def test_eta_learns_the_seconds_of_a_step_from_batches_that_differ() -> None:
    """Without syncs: of eight samples alone nothing says that a step has seconds of its own."""
    run = of_eta(eta=1.0, eta_maximum=5.0)
    run.update(measured(None, 1.8, trainer_batch=8, noise_scale=40.0), 2)
    assert run.chosen.eta == 2.0, "no batch is too small, but a factor of two at a time"
    run.update(measured(None, 2.6, trainer_batch=16, noise_scale=40.0), 3)
    # One second, and 0.1 s a sample: again 20 samples.
    assert run.chosen.eta == pytest.approx(2**0.5)


def test_bounds_of_eta() -> None:
    assert of_eta(eta=5.0).chosen.eta == 2.0
    slow, fast = measured(9e9, 0.8, noise_scale=40.0), measured(0.0, 0.8, noise_scale=40.0)
    run = of_eta()
    for number, expected in ((2, 0.4), (3, 0.2), (4, 0.2)):
        run.update(slow, number)
        assert run.chosen.eta == expected
    run = of_eta()
    for number, expected in ((2, 1.6), (3, 2.0), (4, 2.0)):
        run.update(fast, number)
        assert run.chosen.eta == expected
    assert of_eta().update(measured(9e9, 0.8, noise_scale=None), 2) == (), "no noise scale"


def test_n_by_hand() -> None:
    """A sample takes 0.125 s, so a pass of eight a second; a step's part of a sync is one more. At
    a noise scale of 10^6 it is then best to accumulate above 3 / 2 of what fits.
    """
    auto = Auto(chooses=("multiplier",), every=1, multiplier_maximum=3.0)
    run = Run(AutoController(auto), Chosen(sync_every=20))
    (change,) = run.update(measured(20.0, 1.0, noise_scale=1e6), 2)
    assert (change.setting, change.before) == ("multiplier", 2.0)
    assert change.after == run.chosen.multiplier == pytest.approx(1.5, abs=1e-4)
    assert change.reason.endswith("it is best to accumulate from 1.5 times what fits")
    run.update(measured(0.0, 1.0, noise_scale=10.0), 3)
    assert run.chosen.multiplier == 3.0, "never, within the bounds"
    assert run.update(measured(20.0, 1.0), 4) == (), "no noise scale"


def test_a_restored_controller_continues() -> None:
    syncs = [3.0, 8.0, 1.0, 5.0, 4.0, 0.2, 0.3]
    whole, part, other = (of_sync_every(every=2) for _ in range(3))
    expected = values(whole, syncs)
    values(part, syncs[:3])
    other.controller.load_state_dict(json.loads(json.dumps(part.controller.state_dict())))
    other.chosen = part.chosen
    assert values(other, syncs[3:], begin=5) == expected[3:]
    assert other.controller.state_dict() == whole.controller.state_dict()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("every", 0),
        ("eta_minimum", 0.0),
        ("eta_maximum", 0.1),
        ("multiplier_maximum", 0.5),
        ("sync_every_minimum", 0),
        ("sync_every_maximum", 0),
        ("sync_cost", 1.0),
    ],
)
def test_bad_limits(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field} must be .*, got {value}"):
        Auto(**{field: value})
