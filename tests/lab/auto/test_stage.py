"""A run that chooses H, on clocks that move only with samples that are read and syncs."""

import copy
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
    RoundReport,
)
from adloco.distributed.launch.launcher import place
from adloco.distributed.testing import run_on_ranks
from adloco.lab.auto.option import Auto
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


def slow_run(sync_seconds: float = 12.0, **changes: Any) -> AdLoCo:
    """Two workers at once, four samples of a second each: a step takes four seconds."""
    clock = ClockOfThread()
    settings: dict[str, Any] = {
        "sync_every": 12,
        "data": Timed(regression(2), clock),
        "guards": BatchGuards(initial=8),
        "outer": outer_that_takes(sync_seconds, clock),
        "options": [Auto(sync_interval=True, every=1, sync_cost=0.5)],
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
    # The first round does not count; then H falls by a factor of two at most.
    assert lengths(reports) == [(12, 12), (12, 12), (6, 6), (3, 3), (3, 3)]
    assert [len(report.changes) for report in reports] == [0, 1, 1, 0, 0]
    (change,) = reports[1].changes
    assert (change.setting, change.before, change.after) == ("sync_every", 12, 6)
    assert change.reason == "syncs take 20% of the time, and 50% is best"  # 12 / (12 x 4 + 12)


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
        data=Timed(regression(2), clock, slow=0),
        clock=clock,
        outer=outer_that_takes(12.0 * (1 + dist.get_rank()), clock),
        placement=place(2, torch.device("cpu"), 1),
    )
    return [(report.sync_every, report.changes) for report in run.rounds(5)]


def test_two_ranks_choose_the_same() -> None:
    one, other = run_on_ranks(choices_on_ranks, 2)
    assert one == other
    assert len({sync_every for sync_every, _ in one}) > 1


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
            {"sync_growth": 1.0, "learning_rate": LearningRate(total_tokens=100)},
            "method.sync_growth must be 0 with auto.sync_interval",
        ),
        ({"workers_per_trainer": 1}, "auto.sync_interval must be false where no trainer ever"),
    ],
)
def test_what_cannot_be_chosen(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        slow_run(**changes)
