"""The momentum of inner optimizers becomes the workers' mean every few rounds."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adloco import AdLoCo, BatchGuards
from adloco.algorithms.inner.muon import InnerMuon
from adloco.distributed.codecs.int2 import Int2
from adloco.distributed.codecs.int4 import Int4
from adloco.distributed.launch.launcher import place
from adloco.distributed.testing import run_on_ranks
from adloco.rules.sync_schedule import Streaming
from tests.problems import (
    TWO_WORKERS_PLACED,
    BlockLM,
    adamw,
    make_run,
    next_token,
    outer_sgd,
    params_of,
    sgd,
    tokens,
)


def momentum(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)]


def state_of(run: AdLoCo, worker: int, key: str) -> Tensor:
    states = [
        state[key]
        for optimizer in run.workers[worker].optimizers
        for state in optimizer.state.values()
        if key in state
    ]
    return torch.cat([tensor.flatten().clone() for tensor in states])


@pytest.mark.parametrize(
    ("inner", "key"), [(momentum, "momentum_buffer"), (adamw(0.01), "exp_avg")]
)
@pytest.mark.parametrize("streaming", [Streaming(), Streaming(tau=1)])
def test_it_is_the_weighted_mean_in_every_second_round(
    inner: Any, key: str, streaming: Streaming
) -> None:
    """Five samples make shares of 3 and 2. The first round is the same with and without."""
    settings: dict[str, Any] = {
        "inner": inner,
        "outer": outer_sgd(0.7, 0.9, True),
        "guards": BatchGuards(initial=5),
        "streaming": streaming,
    }
    run, plain = make_run(sync_momentum_every=2, **settings), make_run(**settings)
    for each in (run, plain):
        each.round()
    assert all(state_of(run, i, key).equal(state_of(plain, i, key)) for i in (0, 1))
    for each in (run, plain):
        each.round()
    own = [state_of(plain, worker, key) for worker in (0, 1)]
    assert not torch.allclose(*own)
    for worker in (0, 1):
        torch.testing.assert_close(state_of(run, worker, key), 0.6 * own[0] + 0.4 * own[1])
    assert params_of(run).equal(params_of(plain)), "parameters follow in the next round"
    run.round()
    plain.round()
    assert not params_of(run).equal(params_of(plain))


@pytest.mark.parametrize(
    ("inner", "wire", "per_worker"),
    [
        # Three weights and a bias.
        (momentum, None, 16),
        (adamw(0.01), Int4(block=4), 16),
        # A block for each tensor: two bytes of scale and four codes.
        (momentum, Int4(block=4), 2 * Int4(block=4).block_bytes),
        (momentum, Int2(), 2 * Int4().block_bytes),
    ],
)
def test_bytes_count(inner: Any, wire: Any, per_worker: int) -> None:
    found = []
    for every in (0, 1):
        run = make_run(inner=inner, wire=wire, sync_momentum_every=every)
        found += [report.bytes_communicated for report in run.rounds(1)]
    assert found[1] - found[0] == per_worker


def test_it_goes_on_from_a_checkpoint_within_a_round() -> None:
    whole, stopped, resumed = (make_run(inner=momentum, sync_momentum_every=2) for _ in range(3))
    list(whole.rounds(4))
    stopped.round()
    stopped.stop()
    assert stopped.round() is None
    resumed.load_state_dict(copy.deepcopy(stopped.state_dict()))
    list(resumed.rounds(3))
    assert params_of(resumed).equal(params_of(whole))


def test_who_may_not() -> None:
    with pytest.raises(ValueError, match="sync_momentum_every must be >= 0, got -1"):
        make_run(sync_momentum_every=-1)
    with pytest.raises(ValueError, match="needs an inner optimizer with a momentum > 0 .* got SGD"):
        make_run(sync_momentum_every=1, inner=sgd(0.1))
    run = make_run(sync_momentum_every=1, inner=momentum)
    with pytest.raises(ValueError, match="must be 0 here, where a sync is taken to send param"):
        _ = run.method.given_sync_every


def placed_run(shards: int, replicas: int) -> list[float]:
    """Matrices by Muon and the rest by AdamW, in an uncompressed run of two workers."""
    run = make_run(
        build_model=BlockLM,
        loss_fn=next_token,
        data=tokens(96, 2),
        inner=InnerMuon(lr=0.01),
        sync_momentum_every=1,
        placement=place(2, torch.device("cpu"), 1, shards, replicas),
    )
    list(run.rounds(3))
    whole = run.placement.gather_shards(list(run.trainers[0].outer.global_params))
    return torch.cat([tensor.detach().flatten() for tensor in whole]).tolist()


@pytest.mark.parametrize(("ranks", "shards", "replicas"), TWO_WORKERS_PLACED)
def test_all_placements_have_the_same(ranks: int, shards: int, replicas: int) -> None:
    expected = placed_run(1, 1)
    for found in run_on_ranks(placed_run, ranks, shards, replicas):
        assert found == pytest.approx(expected, rel=1e-6)
