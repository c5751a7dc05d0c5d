"""Settings that a run chooses, on clocks that move only with samples that are read and syncs."""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from adloco import (
    AdLoCo,
    BatchGuards,
    LearningRate,
    MergeSmallest,
    Method,
    NormTest,
    RoundReport,
    SwitchMode,
)
from adloco.distributed.launch.launcher import place
from adloco.distributed.testing import run_on_ranks
from adloco.lab.auto.option import Auto
from adloco.rules.batch_rules.batch_rule import UNBOUNDED
from adloco.rules.batch_rules.norm_test import UNKNOWN
from adloco.rules.sync_schedule import Streaming
from tests.problems import (
    Clock,
    ClockOfThread,
    Interrupting,
    Timed,
    make_run,
    params_of,
    regression,
)


def outer_that_takes(
    seconds: float, clock: Clock
) -> Callable[[Sequence[Tensor]], torch.optim.Optimizer]:
    """An outer optimizer with a step of so many seconds."""

    class SlowSGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            clock.now += seconds
            super().step(closure)

    return lambda parameters: SlowSGD(parameters, lr=1.0)


def limited(*chooses: Any, **changes: Any) -> Auto:
    """The bounds of these tests."""
    limits = {"every": 1, "sync_every_maximum": 12, "sync_cost": 0.5, "eta_maximum": 2.0}
    return Auto(chooses=chooses, **limits | changes)


def slow_run(sync_seconds: float = 12.0, **changes: Any) -> AdLoCo:
    """Two workers at once, four samples of a second each: a step takes four seconds."""
    clock = ClockOfThread()
    settings: dict[str, Any] = {
        "sync_every": 20,
        "data": Timed(regression(2), clock),
        "guards": BatchGuards(initial=8),
        "outer": outer_that_takes(sync_seconds, clock),
        "options": [limited("sync_every")],
        "placement": place(2, torch.device("cpu"), 2),
        "clock": clock,
    }
    return make_run(**settings | changes)


def lengths(reports: Sequence[RoundReport]) -> list[tuple[int, int]]:
    """(H in force, inner steps) of each round."""
    before = [0, *(report.inner_steps for report in reports)]
    return [
        (report.sync_every, report.inner_steps - done)
        for report, done in zip(reports, before, strict=False)
    ]


def test_rounds_have_the_h_that_takes_the_least_time() -> None:
    """With a cost of 0.5 the best H is the seconds of a sync over those of a step: 12 / 4."""
    reports = list(slow_run().rounds(5))
    # It begins at 20 within the bounds. The first round does not count; then H falls by a factor of
    # two at most.
    assert lengths(reports) == [(12, 12), (12, 12), (6, 6), (3, 3), (3, 3)]
    assert [len(report.changes) for report in reports] == [0, 1, 1, 0, 0]
    (change,) = reports[1].changes
    assert (change.setting, change.before, change.after) == ("sync_every", 12, 6)
    assert change.reason == "syncs take 20% of the time, and 50% is best"  # 12 / (12 x 4 + 12)


def test_a_number_is_never_changed() -> None:
    reports = list(slow_run(sync_every=4, options=[limited("eta")], batch=NormTest()).rounds(3))
    assert lengths(reports) == [(4, 4)] * 3
    assert "sync_every" not in {row.setting for report in reports for row in report.changes}


def test_fragments_have_the_steps_that_they_need() -> None:
    """Two fragments, each in flight for one step, need four steps of a round."""
    reports = slow_run(
        sync_seconds=0.5,
        streaming=Streaming(fragments=2, tau=1),
        build_model=lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)),
    ).rounds(4)
    assert lengths(list(reports))[-1] == (4, 4)


def test_a_resumed_run_continues_undisturbed() -> None:
    whole = slow_run()
    expected = list(whole.rounds(5))
    clock = ClockOfThread()
    data = Interrupting(Timed(regression(2), clock))
    first = slow_run(data=data, clock=clock, outer=outer_that_takes(12.0, clock))
    reports = list(first.rounds(2))
    data.before(5, first.stop)
    assert first.round() is None, "stopped in the third round, which has 6 steps"
    second = slow_run()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert (second.sync_every, second.state.round_steps) == (6, 6)
    reports += list(second.rounds(3))
    assert [report.changes for report in reports] == [report.changes for report in expected]
    assert lengths(reports) == lengths(expected)
    assert torch.equal(params_of(second), params_of(whole))
    kept, expected_kept = second.state.stages[-1], whole.state.stages[-1]
    assert kept.state_parts() == expected_kept.state_parts()
    assert second.state.chosen == whole.state.chosen


def choices_on_ranks() -> list[Any]:
    """A rank's sync takes 24 seconds, the other's 12: the least counts, others may have waited."""
    clock = Clock()
    run = slow_run(
        batch=NormTest(),
        options=[limited("sync_every", "eta")],
        data=Timed(regression(2), clock, slow=0),
        clock=clock,
        outer=outer_that_takes(12.0 * (1 + dist.get_rank()), clock),
        placement=place(2, torch.device("cpu"), 1),
    )
    return [
        (report.sync_every, report.eta, report.changes, report.trainers[0].requested_batch)
        for report in run.rounds(5)
    ]


def test_two_ranks_choose_the_same() -> None:
    one, other = run_on_ranks(choices_on_ranks, 2)
    assert one == other
    assert {change.setting for row in one for change in row[2]} == {"sync_every", "eta"}


def test_the_norm_test_requests_with_the_eta_in_force() -> None:
    """The slower a sync, the larger the batch: eta falls, and the next test requests with it."""
    guards = BatchGuards(initial=8, maximum=64, max_growth=4)
    reports = list(
        slow_run(
            600.0,
            test_steps=3,
            batch=NormTest(),
            guards=guards,
            options=[limited("sync_every", "eta")],
        ).rounds(4)
    )
    etas = [report.eta for report in reports]
    assert etas[:2] == [0.8, 0.8] and etas[2] == reports[1].changes[-1].after != 0.8
    for report, following in itertools.pairwise(reports):
        row, eta = report.trainers[0], report.eta
        assert eta is not None and row.grad_variance is not None and row.grad_norm_sq is not None
        assert row.noise_scale_factor is not None
        known = row.noise_scale_factor <= UNKNOWN
        wanted = math.ceil(row.grad_variance / (eta**2 * row.grad_norm_sq)) if known else UNBOUNDED
        assert following.trainers[0].requested_batch == guards.limit(wanted, row.requested_batch)
    assert known


def test_the_switch_clips_and_accumulates_by_the_n_in_force() -> None:
    """A request of 24, where 16 fit: below n = 2 it is clipped. A sync of an hour makes steps
    dear, so n falls to 1, and the request is accumulated.
    """
    run = slow_run(
        3600.0,
        batch=NormTest(),
        guards=BatchGuards(initial=24, minimum=24, maximum=24),
        switch=SwitchMode(max_micro_batch=8),
        sync_every=2,
        options=[limited("multiplier")],
    )
    reports = list(run.rounds(4))
    assert [report.multiplier for report in reports[:2]] == [2.0, 2.0]
    assert [report.trainers[0].trainer_batch for report in reports] == [16, 16, 24, 24]
    assert [report.changes[0].setting for report in reports if report.changes] == ["multiplier"]


def test_a_plan_needs_a_number() -> None:
    assert Method(sync_every=7).given_sync_every == 7
    with pytest.raises(ValueError, match=r"method.sync_growth must be 0 here, .* got 1.0"):
        _ = Method(sync_growth=1.0).given_sync_every


def test_lone_workers_say_nothing_about_syncs() -> None:
    run = slow_run(
        workers_per_trainer=1,
        num_trainers=2,
        guards=BatchGuards(initial=4),
        merge=MergeSmallest(every=1, first_round=3),
    )
    reports = list(run.rounds(5))
    assert [report.sync_every for report in reports] == [12, 12, 12, 12, 6]
    assert len(reports[2].merges) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"options": [limited("multiplier")]},
            "auto.chooses must not have multiplier without batch.rule norm-test",
        ),
        ({"options": [limited("eta")]}, "auto.chooses must not have eta without batch.rule norm"),
        (
            {"sync_growth": 1.0, "learning_rate": LearningRate(total_tokens=100)},
            "method.sync_growth must be 0 where auto.chooses has sync_every",
        ),
        ({"workers_per_trainer": 1}, "auto.chooses must not have sync_every where no trainer ever"),
        (
            {
                "streaming": Streaming(fragments=2, tau=3),
                "options": [limited("sync_every", sync_every_maximum=7)],
            },
            "auto.sync_every_maximum must be >= 8, the fewest inner steps of a round with",
        ),
    ],
)
def test_what_cannot_be_chosen(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        slow_run(**changes)
