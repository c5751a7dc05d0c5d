"""Shares that follow measured speed, on clocks that move only when a sample is read."""

from typing import Any

import pytest
import torch

from adloco import AdLoCo, BatchGuards, OneProcess, SpeedShares, SwitchMode
from adloco.distributed.launch.launcher import place
from adloco.distributed.testing import run_on_ranks
from tests.problems import (
    Clock,
    ClockOfThread,
    Interrupting,
    Timed,
    make_run,
    outer_sgd,
    params_of,
    regression,
)


def shares_over_time(workers: int) -> list[list[tuple[int, float, float]]]:
    """(batch, busy, wait) of each worker by round; worker 0 is slow in the first five rounds, and
    worker 1 in the others.
    """
    clock = ClockOfThread()
    source = Timed(regression(workers, samples=4000), clock)
    run = make_run(
        workers_per_trainer=workers,
        data=source,
        shares=SpeedShares(),
        guards=BatchGuards(initial=24),
        sync_every=3,
        switch=SwitchMode(max_micro_batch=24, mode="always"),
        placement=place(workers, torch.device("cpu"), workers),
        clock=clock,
    )
    rows = []
    for index in range(11):
        source.slow = 0 if index < 5 else 1
        report = run.round()
        assert report is not None
        rows.append(
            [
                (worker.worker_batch, worker.busy_seconds, worker.wait_seconds)
                for worker in report.workers
            ]
        )
    return rows


@pytest.mark.parametrize("ranks", [1, 2])
def test_shares_follow_the_slow_worker(ranks: int) -> None:
    rows = run_on_ranks(shares_over_time, 2, 2)[0] if ranks == 2 else shares_over_time(2)
    batches = [tuple(batch for batch, _, _ in row) for row in rows]
    # Nothing is known before the first round; then the speeds are 1/3 and 1 sample a second.
    # After the sixth round they are 1/2 x 1/3 + 1/2 x 1 = 2/3 and 1/2 x 1 + 1/2 x 1/3 = 2/3: 12 and
    # 12. After the next 5/6 and 3/6: 15 and 9; then 11/12 and 5/12: 16.5 and 7.5; 23/24 and 9/24:
    # 17.25 and 6.75; 47/48 and 17/48: 17.6 and 6.4.
    assert batches[:8] == [(12, 12), *[(6, 18)] * 5, (12, 12), (15, 9)]
    assert batches[8] in ((16, 8), (17, 7))
    assert batches[9:] == [(17, 7), (18, 6)]
    # Three inner steps. In the sixth round the worker with 18 samples has become the slow one.
    assert rows[0] == [(12, 108, 0), (12, 36, 72)]
    assert rows[1] == [(6, 54, 0), (18, 54, 0)]
    assert rows[5] == [(6, 18, 144), (18, 162, 0)]
    assert rows[10] == [(18, 54, 0), (6, 54, 0)]


def test_waiting_for_a_turn_counts() -> None:
    """Two workers in one thread: each waits while the other is busy, and the round is as long as
    both.
    """
    clock = Clock()
    source = Timed(regression(2), clock, slow=0)
    guards = BatchGuards(initial=8)
    placement = OneProcess(threads=1)
    run = make_run(data=source, sync_every=2, placement=placement, guards=guards, clock=clock)
    report = run.round()
    assert report is not None
    # Two steps of four samples: 24 and 8 seconds.
    times = [(worker.busy_seconds, worker.wait_seconds) for worker in report.workers]
    assert times == [(24, 8), (8, 24)]


def test_pseudo_gradients_are_averaged_by_samples() -> None:
    """Shares of 6 and 2 by given speeds: one inner step and the plain mean is one step on all eight
    samples.
    """
    run = make_run(
        sync_every=1,
        outer=outer_sgd(1.0),
        shares=SpeedShares(),
        guards=BatchGuards(initial=8),
        placement=OneProcess(threads=1),
    )
    run.state.speeds = {0: 30.0, 1: 10.0}
    data, before = regression(2), run.model(0)
    parts = [data.read(0, 0, 6), data.read(1, 0, 2)]
    inputs, targets = (torch.cat([part[index] for part in parts]) for index in (0, 1))
    loss = ((before(inputs)[:, 0] - targets) ** 2).mean()
    gradients = torch.autograd.grad(loss, list(before.parameters()))
    expected = torch.cat(
        [(p - 0.05 * g).flatten() for p, g in zip(before.parameters(), gradients, strict=True)]
    ).detach()
    report = run.round()
    assert report is not None
    assert [worker.worker_batch for worker in report.workers] == [6, 2]
    torch.testing.assert_close(params_of(run), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("requested", "batches"),
    [
        (12, [8, 4]),  # In 3 : 1 it would be 9 and 3, of which 8 fit.
        (16, [8, 8]),
        (32, [8, 8]),  # Clipped at what fits.
        (36, [27, 9]),  # More than twice what fits: accumulated, and any share will do.
    ],
)
def test_a_fast_worker_takes_no_more_than_fits_where_the_switch_clips(
    requested: int, batches: list[int]
) -> None:
    guards = BatchGuards(initial=requested)
    run = make_run(shares=SpeedShares(), guards=guards, switch=SwitchMode(max_micro_batch=8))
    run.state.speeds = {0: 30.0, 1: 10.0}
    report = run.round()
    assert report is not None
    (row,) = report.trainers
    assert [worker.worker_batch for worker in report.workers] == batches
    assert (row.trainer_batch, row.accumulation_steps) == (sum(batches), 4 if requested > 32 else 1)


def test_speeds_are_part_of_the_state() -> None:
    run = make_run(shares=SpeedShares())
    run.round()
    assert set(run.state.speeds) == {0, 1}
    other = make_run(shares=SpeedShares())
    other.load_state_dict(run.state_dict())
    assert other.state.speeds == run.state.speeds


def test_seconds_before_a_stop_count_in_the_round_that_is_resumed() -> None:
    """Those of one worker are all before it. Both wait as long as in a run that was not stopped."""

    def begun() -> tuple[AdLoCo, Interrupting]:
        clock = Clock()
        source = Interrupting(Timed(regression(2), clock))
        guards, placement = BatchGuards(initial=8), OneProcess(threads=1)
        told: dict[str, Any] = {"guards": guards, "placement": placement, "clock": clock}
        return make_run(data=source, sync_every=10, shares=SpeedShares(), **told), source

    whole, _ = begun()
    stopped, source = begun()
    source.before(15, stopped.stop)
    assert stopped.round() is None
    resumed, _ = begun()
    resumed.load_state_dict(stopped.state_dict())
    reports = [run.round() for run in (whole, resumed)]
    for report in reports:
        assert report is not None
        times = [(worker.busy_seconds, worker.wait_seconds) for worker in report.workers]
        assert times == [(40, 40), (40, 40)]
    assert resumed.state.speeds == whole.state.speeds == {0: 0.5, 1: 0.5}


def test_the_wait_before_a_stop_counts_as_exposed() -> None:
    class Ticking(Clock):
        def __call__(self) -> float:
            self.now += 1
            return self.now

    source = Interrupting(regression(2))
    run = make_run(data=source, clock=Ticking())
    source.before(2, run.stop)
    assert run.round() is None
    assert [worker.round.sync.exposed_seconds for worker in run.workers.values()] == [1, 1]
