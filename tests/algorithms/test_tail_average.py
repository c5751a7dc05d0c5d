"""The mean of global parameters over the last rounds: what it is, and what merges do to it."""

import copy
from typing import Any

import numpy as np
import pytest
import torch

from adloco import AdLoCo, MergeFates
from adloco.algorithms.merging import apply_merge
from adloco.distributed.launch.launcher import place
from adloco.distributed.testing import run_on_ranks
from adloco.rules.merge import Merge
from adloco.rules.sync_schedule import Streaming
from tests.problems import (
    TWO_WORKERS_PLACED,
    BlockLM,
    adamw,
    make_run,
    next_token,
    outer_sgd,
    params_of,
    tokens,
)


def average_of(run: AdLoCo, trainer: int = 0) -> Any:
    tensors = run.trainers[trainer].average.tensors
    return torch.cat([tensor.flatten() for tensor in tensors]).numpy()


@pytest.mark.parametrize("changes", [{}, {"streaming": Streaming(tau=1)}])
def test_it_is_the_mean_of_the_rounds_and_training_does_not_read_it(changes: Any) -> None:
    run, plain = (make_run(outer=outer_sgd(0.7, 0.9, True), **changes) for _ in range(2))
    seen = []
    for round in range(5):
        run.round()
        plain.round()
        run.average_round(tail=round >= 2)
        seen.append(params_of(run, 0).numpy().copy())
    expected = np.mean(np.array(seen[2:], dtype=np.float64), axis=0)
    np.testing.assert_allclose(average_of(run), expected, rtol=1e-6)
    assert run.trainers[0].average.rounds == 3
    assert params_of(run, 0).equal(params_of(plain, 0))

    def first_weight(model: Any, part: int, parts: int) -> list[float]:
        return [float(model.weight.detach()[0, 0]), 1.0]

    assert run.evaluate(first_weight)[0] == [pytest.approx(expected[0], rel=1e-6)]
    assert run.evaluate(first_weight, averaged=False)[0] == [pytest.approx(seen[-1][0])]
    run.average_round(tail=False)
    assert run.evaluate(first_weight) == run.evaluate(first_weight, averaged=False)


def test_it_goes_on_from_a_checkpoint() -> None:
    run, again = make_run(), make_run()
    for _ in range(2):
        run.round()
        run.average_round(tail=True)
    again.load_state_dict(copy.deepcopy(run.state_dict()))
    for each in (run, again):
        each.round()
        each.average_round(tail=True)
    assert np.array_equal(average_of(again), average_of(run))


def test_a_merge_begins_the_survivors_anew_and_moved_workers_get_their_trainers() -> None:
    """Trainer 2 requests most per worker, so it gets a worker of the absorbed trainer 0."""
    run = make_run(num_trainers=3, inner=adamw(0.01))
    run.round()
    run.average_round(tail=True)
    for trainer, request in ((0, 10), (1, 30), (2, 60)):
        run.trainers[trainer].controller.requested_batch = request
    kept = average_of(run, 2).copy()
    merge = Merge(survivor=1, absorbed=(0,), weights={0: 0.25, 1: 0.75})
    run.state.trainers = apply_merge(merge, run.trainers, run.workers, MergeFates(), run.placement)
    assert len(run.trainers[2].worker_ids) > 2
    assert [run.trainers[trainer].average.rounds for trainer in (1, 2)] == [0, 1]
    assert np.array_equal(average_of(run, 2), kept)
    run.average_round(tail=True)
    assert np.array_equal(average_of(run, 1), params_of(run, 1).numpy())


def averaged_run(shards: int, replicas: int) -> list[float]:
    """The average of a run that is saved and goes on, whole."""
    run = make_run(
        build_model=BlockLM,
        loss_fn=next_token,
        data=tokens(48, 2),
        inner=adamw(0.01),
        placement=place(2, torch.device("cpu"), 1, shards, replicas),
    )
    for round in range(4):
        run.round()
        run.average_round(tail=round > 0)
        if round == 2:
            run.load_state_dict(run.placement.agree(copy.deepcopy(run.state_dict())))
    whole = run.placement.gather_shards(list(run.trainers[0].average.tensors))
    return torch.cat([tensor.flatten() for tensor in whole]).tolist()


@pytest.mark.parametrize(("ranks", "shards", "replicas"), TWO_WORKERS_PLACED)
def test_all_placements_have_the_same(ranks: int, shards: int, replicas: int) -> None:
    expected = averaged_run(1, 1)
    for found in run_on_ranks(averaged_run, ranks, shards, replicas):
        assert found == pytest.approx(expected, rel=1e-9)
