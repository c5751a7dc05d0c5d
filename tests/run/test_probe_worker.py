"""Samples per second of an island, on a clock that moves only when the loss is computed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from adloco.algorithms import cuda_graphs, worker
from adloco.config.recipe import build_recipe, override, read_values
from adloco.distributed.testing import run_on_ranks
from adloco.run.opened import Opened
from adloco.run.probe_worker import (
    STEPS,
    ProbeWorker,
    Throughput,
    doublings,
    measure_throughput,
)
from adloco.run.start import open_recipe
from adloco.tasks.task import Task
from tests.algorithms.test_cuda_graphs import Again
from tests.conftest import small_flags


class TimedTask:
    """A task in which a pass of n samples takes 0.5 + n / 4 seconds on its own clock, and 100 s
    more if n was not seen before. Memory holds `fits` samples.
    """

    def __init__(self, task: Task, fits: int = 64) -> None:
        self.train_source, self._task, self._fits = task.train_source, task, fits
        self._seen: set[int] = set()
        self._now = 0.0

    def clock(self) -> float:
        return self._now

    def loss(self, model: Any, batch: Any) -> Tensor:
        if len(batch) > self._fits:
            raise torch.OutOfMemoryError("out of memory")
        self._now += 0.5 + len(batch) / 4 + 100 * (len(batch) not in self._seen)
        self._seen.add(len(batch))
        return self._task.loss(model, batch)


def opened_recipe(corpus: Path, folder: Path, more: dict[str, str]) -> Opened:
    words = small_flags(corpus, folder)
    flags = [*zip([word[2:] for word in words[::2]], words[1::2], strict=True), *more.items()]
    return open_recipe(build_recipe(override(read_values("single"), flags)))


def measured(
    corpus: Path, folder: Path, more: dict[str, str], sizes: Sequence[int], fits: int = 64
) -> tuple[Throughput, list[int]]:
    """The throughput, and the sizes that were announced."""
    opened = opened_recipe(corpus, folder, more)
    timed: Any = TimedTask(opened.task, fits)
    announced: list[int] = []
    found = measure_throughput(
        replace(opened, task=timed, precision=None),
        sizes,
        on_micro_batch=announced.append,
        clock=timed.clock,
    )
    return found, announced


@pytest.mark.parametrize("rule", [pytest.param("constant", marks=pytest.mark.nightly), "norm-test"])
def test_the_median_of_plain_steps_after_one_that_warms_up(
    rule: str, corpus: Path, tmp_path: Path
) -> None:
    """Steps of 2 and 6 samples take 1 and 2 s. The first plain step of each size, which takes 100 s
    more, and the one that takes the statistics of the norm test do not count.
    """
    found, announced = measured(corpus, tmp_path, {"batch.rule": rule}, [2, 6])
    assert announced == [2, 6]
    assert found.step_seconds == {
        size: pytest.approx([seconds] * STEPS) for size, seconds in ((2, 1.0), (6, 2.0))
    }
    assert found.samples_per_second == pytest.approx({2: 2.0, 6: 3.0})
    assert found.jitter == pytest.approx(0)
    assert found.of_two_passes == pytest.approx([4.0] * STEPS)
    assert found.update_seconds == pytest.approx(0, abs=1e-9), "the clock moves in passes alone"


@pytest.mark.nightly
def test_all_ranks_of_an_island_count(corpus: Path, tmp_path: Path) -> None:
    """Two replicas train on twice the samples in the same time."""
    shape = {"placement.replica_size": "2"}
    for found, _ in run_on_ranks(measured, 2, corpus, tmp_path, shape, [2, 6]):
        assert found.samples_per_second == pytest.approx({4: 4.0, 12: 6.0})


def test_a_size_that_does_not_fit(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="memory ran out with a micro-batch of 6; leave it out of"):
        measured(corpus, tmp_path, {}, [6], fits=5)


def test_graphs_of_a_size_before_hide_no_memory(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "Graph", Again)
    monkeypatch.setattr(worker, "has_graphs", lambda device: True)
    opened = opened_recipe(corpus, tmp_path, {})
    probe = ProbeWorker(opened, opened.train_source())
    made = []
    for _ in range(3):
        before = Again.captures
        probe.peak(2)
        made.append(Again.captures - before)
    assert min(made) == max(made) > 0


def test_samples_of_all_ranks_count() -> None:
    """In the median step of 2 s, 3 ranks train on 8 samples each."""
    steps = {8: [1.0, 2.0, 7.0], 2: [0.5, 0.5]}
    found = Throughput(ranks=3, step_seconds=steps, of_two_passes=[3.0, 3.6, 9.0])
    assert found.update_seconds == pytest.approx(0.4), "1.6 + 0.4 s, and 1.6 + 1.6 + 0.4 s"
    assert replace(found, of_two_passes=[4.1]).update_seconds == 0
    assert replace(found, of_two_passes=[2.5]).update_seconds == 0.45
    assert found.median_seconds == {2: 0.5, 8: 2.0}
    assert found.samples_per_second == {6: 12.0, 24: 12.0}


def test_jitter_is_that_of_normal_seconds_and_ignores_a_few_late_steps() -> None:
    """NumPy's standard deviation over its mean is the oracle."""
    seconds = np.random.default_rng(0).normal(2.0, 0.06, size=20_000)
    late = [*seconds.tolist(), *[30.0] * 20]
    expected = seconds.std() / seconds.mean()
    for steps in (seconds.tolist(), late):
        found = Throughput(
            ranks=1, step_seconds={8: steps, 1: [1.0, 5.0, 9.0]}, of_two_passes=[1.0]
        )
        assert found.jitter == pytest.approx(expected, rel=0.02)
    low, high = np.percentile([1.0, 1.1, 1.5, 2.0], [25, 75])
    four = Throughput(ranks=1, step_seconds={1: [1.1, 2.0, 1.0, 1.5]}, of_two_passes=[1.0])
    assert four.jitter == pytest.approx((high - low) / 1.349 / 1.3)


def test_doublings() -> None:
    assert [doublings(largest) for largest in (1, 2, 6, 8)] == [
        [1],
        [1, 2],
        [1, 2, 4, 6],
        [1, 2, 4, 8],
    ]
