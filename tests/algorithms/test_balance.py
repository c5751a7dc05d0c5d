"""Shares that follow measured speed: real sleeps stand for a slow machine."""

import time
from typing import Any

import pytest
import torch

from adloco import BatchGuards, OneProcess, SpeedShares, SwitchMode, TensorSource
from adloco.distributed.launch.launcher import place
from adloco.distributed.testing import run_on_ranks
from tests.problems import make_run, outer_sgd, params_of, regression


class Throttled:
    """A source that takes seconds for each sample of one stream."""

    def __init__(self, source: TensorSource, slow: int, seconds: float) -> None:
        self.source, self.num_streams = source, source.num_streams
        self.slow, self.seconds = slow, seconds

    def read(self, stream: int, position: int, count: int) -> Any:
        time.sleep(count * (self.seconds if stream == self.slow else self.seconds / 3))
        return self.source.read(stream, position, count)


def shares_over_time(workers: int) -> list[list[tuple[int, float, float]]]:
    """(batch, busy, wait) of each worker, round by round; worker 0 is three times slower than the others, and from round 5 on worker 1 is."""
    source = Throttled(regression(workers, samples=4000), slow=0, seconds=0.01)
    run = make_run(
        workers_per_trainer=workers, data=source, shares=SpeedShares(smoothing=0.3), guards=BatchGuards(initial=24), sync_every=3,
        switch=SwitchMode(max_micro_batch=24, mode="always"), placement=place(workers, torch.device("cpu"), workers),
    )  # fmt: skip
    rows = []
    for index in range(10):
        source.slow = 0 if index < 5 else 1
        report = run.round()
        assert report is not None
        assert sum(worker.worker_batch for worker in report.workers) == 24
        rows.append([(worker.worker_batch, worker.busy_seconds, worker.wait_seconds) for worker in report.workers])
    return rows


@pytest.mark.parametrize("ranks", [1, 2])
def test_shares_follow_the_slow_worker(ranks: int) -> None:
    rows = run_on_ranks(shares_over_time, 2, 2)[0] if ranks == 2 else shares_over_time(2)
    batches = [[batch for batch, _, _ in row] for row in rows]
    assert batches[0] == [12, 12], "nothing is known before the first round"
    # 3 : 1 in speed is 6 and 18 samples; real clocks are allowed to be off by a little, and on a busy machine in a round or two by much.
    assert min(abs(row[0] - 6) for row in batches[2:5]) <= 2
    assert min(abs(row[1] - 6) for row in batches[7:10]) <= 2
    waited = [max(wait for _, _, wait in row) for row in rows]
    assert min(waited[2:5]) < waited[0] / 2
    assert min(waited[7:10]) < waited[5] / 2


def test_waiting_for_a_turn_counts() -> None:
    """Two workers in one thread: each waits while the other is busy, and the round is as long as both."""
    source = Throttled(regression(2), slow=0, seconds=0.004)
    source.slow = -1
    run = make_run(data=source, sync_every=2, placement=OneProcess(threads=1))
    run.round()
    report = run.round()
    assert report is not None
    first, second = report.workers
    for worker, other in ((first, second), (second, first)):
        assert worker.wait_seconds == pytest.approx(other.busy_seconds, rel=0.3, abs=0.01)


def test_pseudo_gradients_are_averaged_by_samples() -> None:
    """Shares of 6 and 2 by given speeds: one inner step and the plain mean is one step on all eight samples."""
    run = make_run(sync_every=1, outer=outer_sgd(1.0), shares=SpeedShares(), guards=BatchGuards(initial=8), placement=OneProcess(threads=1))
    run.speeds = {0: 30.0, 1: 10.0}
    data, before = regression(2), run.model(0)
    parts = [data.read(0, 0, 6), data.read(1, 0, 2)]
    inputs, targets = (torch.cat([part[index] for part in parts]) for index in (0, 1))
    loss = ((before(inputs)[:, 0] - targets) ** 2).mean()
    gradients = torch.autograd.grad(loss, list(before.parameters()))
    expected = torch.cat([(p - 0.05 * g).flatten() for p, g in zip(before.parameters(), gradients, strict=True)]).detach()
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
def test_a_fast_worker_takes_no_more_than_fits_where_the_switch_clips(requested: int, batches: list[int]) -> None:
    guards = BatchGuards(initial=requested)
    run = make_run(shares=SpeedShares(), guards=guards, switch=SwitchMode(max_micro_batch=8))
    run.speeds = {0: 30.0, 1: 10.0}
    report = run.round()
    assert report is not None
    (row,) = report.trainers
    assert [worker.worker_batch for worker in report.workers] == batches
    assert (row.trainer_batch, row.accumulation_steps) == (sum(batches), 4 if requested > 32 else 1)


def test_speeds_are_part_of_the_state() -> None:
    run = make_run(shares=SpeedShares())
    run.round()
    assert set(run.speeds) == {0, 1}
    other = make_run(shares=SpeedShares())
    other.load_state_dict(run.state_dict())
    assert other.speeds == run.speeds
