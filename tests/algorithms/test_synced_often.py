"""Parameters that are synced several times a round (`streaming.often`)."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from adloco import AdLoCo, DiLoCo
from adloco.algorithms.optimizers import OuterOptimizer
from adloco.distributed.codecs.topk import TopK
from adloco.distributed.launch.launcher import place
from adloco.distributed.testing import run_on_ranks
from adloco.rules.sync_schedule import Streaming
from tests.problems import (
    TWO_WORKERS_PLACED,
    BlockLM,
    Interrupting,
    adamw,
    make_run,
    next_token,
    outer_sgd,
    params_of,
    tokens,
)

OFTEN = Streaming(often=2, often_layers=("embed",))


def test_two_workers_equal_numpy() -> None:
    """A bias that is synced every second step of four, and a weight at the end; the workers move by
    given amounts, and the outer step is SGD with a rate of 0.5 and a momentum of 0.5.
    """
    models = [nn.Linear(1, 1), nn.Linear(1, 1)]
    for model in models:
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
    loop = DiLoCo(
        models,
        outer=outer_sgd(0.5, 0.5),
        sync_every=4,
        streaming=Streaming(often=2, often_layers=("bias",)),
    )
    moves = np.random.default_rng(0).normal(size=(8, 2, 2))
    start, velocity, own = np.zeros(2), np.zeros(2), np.zeros((2, 2))
    for step, move in enumerate(moves, start=1):
        with torch.no_grad():
            for model, (weight, bias) in zip(models, move, strict=True):
                model.weight += weight
                model.bias += bias
        loop.step()
        own += move
        for index, due in ((0, step % 4 == 0), (1, step % 2 == 0)):
            if due:
                velocity[index] = 0.5 * velocity[index] + start[index] - own[:, index].mean()
                start[index] -= 0.5 * velocity[index]
                own[:, index] = start[index]
        for model, expected in zip(models, own, strict=True):
            found = [model.weight.item(), model.bias.item()]
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def run_of(**changes: Any) -> AdLoCo:
    settings: dict[str, Any] = {
        "build_model": BlockLM,
        "loss_fn": next_token,
        "data": tokens(200, 2),
        "inner": adamw(0.01),
        "outer": OuterOptimizer(),
        "sync_every": 4,
        "streaming": OFTEN,
    }
    return make_run(**settings | changes)


def test_bytes_of_a_round() -> None:
    """The embedding has 35 parameters in float64, which are sent once more."""
    reports = [run_of(streaming=streaming).round() for streaming in (OFTEN, Streaming())]
    sent = [report.bytes_communicated for report in reports if report]
    assert sent[0] - sent[1] == 8 * 35


@pytest.mark.parametrize("wire", [None, TopK(chunk=16), TopK(chunk=16, residual_in_params=False)])
def test_it_goes_on_from_within_a_round(wire: Any) -> None:
    whole, resumed = run_of(wire=wire), run_of(wire=wire)
    list(whole.rounds(3))
    source = Interrupting(tokens(200, 2))
    stopped = run_of(wire=wire, data=source)
    stopped.round()
    source.before(3, stopped.stop, streams=[0])
    assert stopped.round() is None
    assert stopped.state.events_done == 1, "the embedding was synced once"
    resumed.load_state_dict(copy.deepcopy(stopped.state_dict()))
    list(resumed.rounds(2))
    assert params_of(resumed).equal(params_of(whole))


def placed_run(shards: int, replicas: int) -> list[float]:
    run = run_of(placement=place(2, torch.device("cpu"), 1, shards, replicas))
    list(run.rounds(2))
    whole = run.placement.gather_shards(list(run.trainers[0].outer.global_params))
    return torch.cat([tensor.detach().flatten() for tensor in whole]).tolist()


@pytest.mark.parametrize(("ranks", "shards", "replicas"), TWO_WORKERS_PLACED)
def test_all_placements_have_the_same(ranks: int, shards: int, replicas: int) -> None:
    expected = placed_run(1, 1)
    for found in run_on_ranks(placed_run, ranks, shards, replicas):
        assert found == pytest.approx(expected, rel=1e-9)
