"""A loss far above those before is named, on every placement and across a stop; nothing else
changes.
"""

import copy
from typing import Any

import pytest
import torch

from adloco import AdLoCo, RoundReport, TensorSource
from adloco.distributed.launch.launcher import place
from adloco.distributed.testing import run_on_ranks
from adloco.lab.spikes.losses import FEWEST
from adloco.lab.spikes.option import Spikes
from adloco.lab.spikes.stage import NO_SPIKE
from tests.problems import (
    TWO_WORKERS_PLACED,
    adamw,
    linear,
    make_run,
    outer_sgd,
    params_of,
    regression,
    squared_error,
)

H = 5
CALM = FEWEST // H
"""Rounds without a spike at the start."""
FOUND = [(0, None)] * CALM + [(1, CALM * H + 2), (0, None)]


def spiky(dtype: torch.dtype = torch.float32) -> TensorSource:
    """The regression problem, one sample of which is far off: worker 1's, in round CALM + 1."""
    source = regression(2, samples=4000, dtype=dtype)
    targets = source.tensors[1]
    numbered = TensorSource(torch.arange(len(targets)), num_streams=2)
    targets[numbered.read(1, CALM * H * 4 + 6, 1)] = 300.0
    return source


def spiky_run(**changes: Any) -> AdLoCo:
    told: dict[str, Any] = {
        "data": spiky(),
        "inner": adamw(0.01),
        "outer": outer_sgd(0.7, 0.9),
        "sync_every": H,
        "options": [Spikes()],
    }
    return make_run(**told | changes)


def seen(report: RoundReport) -> tuple[int, int | None]:
    (trainer,) = report.trainers
    found = NO_SPIKE | trainer.more  # Without the stage, nothing is said.
    return found["spikes"], found["spike_step"]


@pytest.mark.parametrize("limit", [6.0, 0.0])
def test_a_spike_is_named_and_changes_nothing(limit: float) -> None:
    run, other = spiky_run(options=[Spikes(spike_deviations=limit)]), spiky_run(options=[])
    reports = [seen(report) for report in run.rounds(CALM + 2)]
    assert reports == (FOUND if limit else [(0, None)] * (CALM + 2))
    list(other.rounds(CALM + 2))
    assert params_of(run).equal(params_of(other))


def placed(shards: int, replicas: int) -> list[Any]:
    """What is seen on this placement, stopped in the round of the spike and resumed."""
    run = spiky_run(
        build_model=lambda: linear().double(),
        loss_fn=squared_error,
        data=spiky(torch.float64),
        placement=place(2, torch.device("cpu"), 1, shards, replicas),
    )
    reports = [seen(report) for report in run.rounds(CALM)]
    run.stop()
    assert run.round() is None
    run.load_state_dict(run.placement.agree(copy.deepcopy(run.state_dict())))
    return reports + [seen(report) for report in run.rounds(2)]


@pytest.mark.parametrize(("ranks", "shards", "replicas"), TWO_WORKERS_PLACED)
def test_all_placements_name_the_same(ranks: int, shards: int, replicas: int) -> None:
    assert placed(1, 1) == FOUND
    assert run_on_ranks(placed, ranks, shards, replicas) == [FOUND] * ranks
