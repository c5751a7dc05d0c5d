"""The outer step against NumPy, and golden trajectories that can be done by hand."""

import copy
import io
import math
import pickle
import time
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import load, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from adloco import (
    AdLoCo,
    DiLoCo,
    Feedback,
    Int1,
    Int2,
    Int4,
    Int8,
    NonFiniteLossError,
    OneProcess,
    OuterOptimizer,
    Streaming,
    place,
)
from adloco.algorithms.muon_step import Muon
from adloco.algorithms.optimizer_state import forget, load_optimizer
from adloco.distributed.comm.comm import Comm
from adloco.distributed.comm.sum_islands import Islands
from adloco.distributed.testing import run_on_ranks
from adloco.distributed.traffic import Traffic
from tests.problems import (
    linear,
    make_run,
    outer_sgd,
    outer_sync,
    params_of,
    regression,
    sgd,
    squared_error,
    sync_all,
)


def nesterov(
    point: np.ndarray, gradients: list[np.ndarray], lr: float, momentum: float
) -> np.ndarray:
    """torch.optim.SGD's Nesterov form: v = mu v + g (v = g at first), x = x - lr (g + mu v)."""
    velocity = None
    for gradient in gradients:
        velocity = gradient if velocity is None else momentum * velocity + gradient
        point = point - lr * (gradient + momentum * velocity)
    return point


def test_outer_step_equals_numpy() -> None:
    rng = np.random.default_rng(0)
    start = rng.normal(size=(4, 3))
    outer = outer_sync([torch.tensor(start)], outer_sgd(0.7, 0.9, nesterov=True))
    comm, weights = Comm(Islands(workers=[3], traffic=Traffic())), np.array([5.0, 1.0, 2.0])
    point, history = start, []
    for _ in range(4):
        workers = [point + rng.normal(size=point.shape) for _ in weights]
        history.append(
            sum(w * (point - x) for w, x in zip(weights, workers, strict=True)) / weights.sum()
        )
        sync_all(
            outer,
            [[torch.tensor(worker)] for worker in workers],
            list(weights / weights.sum()),
            comm,
        )
        point = nesterov(start, history, 0.7, 0.9)
        np.testing.assert_allclose(outer.global_params[0].detach().numpy(), point, rtol=1e-12)


def test_any_torch_optimizer_outside() -> None:
    start = torch.tensor([1.0, -1.0], dtype=torch.float64)
    outer = outer_sync([start], lambda parameters: torch.optim.Adam(parameters, lr=0.1))
    sync_all(
        outer,
        [[start + torch.tensor([-0.5, 0.25])]],
        [1],
        Comm(Islands(workers=[1], traffic=Traffic())),
    )
    # Adam's first step is lr * sign(pseudo-gradient): towards the worker.
    torch.testing.assert_close(
        outer.global_params[0].detach(),
        torch.tensor([0.9, -0.9], dtype=torch.float64),
        rtol=1e-6,
        atol=1e-6,
    )


class Slope(nn.Module):
    """Loss x: a gradient of 1 everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(1, dtype=torch.float64))


def test_golden_trajectory_of_a_constant_gradient() -> None:
    # Gradient 1, inner SGD 0.25, H = 4: every round a worker moves from x to x - 1, so the
    # pseudo-gradient is 1. Outer SGD 0.5 with Nesterov momentum 0.5: v = 1, 1.5, 1.75; steps 0.5 (1
    # + 0.5 v) = 0.75, 0.875, 0.9375.
    run = make_run(
        build_model=Slope,
        loss_fn=lambda model, batch: model.x.sum(),
        inner=sgd(0.25),
        outer=outer_sgd(0.5, 0.5, nesterov=True),
        sync_every=4,
    )
    seen = [float(params_of(run)) for _ in run.rounds(3)]
    assert seen == [-0.75, -1.625, -2.5625]


def test_drop_in_equals_the_run() -> None:
    run = make_run(outer=outer_sgd(0.7, 0.9, nesterov=True))
    list(run.rounds(4))

    data, models = regression(2), [linear(), linear()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    diloco = DiLoCo(models, outer=outer_sgd(0.7, 0.9, nesterov=True), sync_every=3)
    synced = []
    for step in range(12):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            squared_error(model, data.read(worker, 4 * step, 4)).backward()
            optimizer.step()
        synced.append(diloco.step())
    assert [step for step, now in enumerate(synced) if now] == [2, 5, 8, 11]
    for model in models:
        assert torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).equal(
            params_of(run)
        )
    # Four float32 from the first worker to the others at the start, then from each of two workers
    # at each of four syncs.
    assert diloco.placement.total_bytes() == (4 * 4 + 2 * 4 * 4 * 4, 4 * 4 + 2 * 4 * 4 * 4, 0)


def test_drop_in_weights_by_samples_and_averages_buffers() -> None:
    models = [nn.BatchNorm1d(2), nn.BatchNorm1d(2)]
    diloco = DiLoCo(nn.ModuleList(models), outer=None, sync_every=1)
    for model, value in zip(models, (1.0, 5.0), strict=True):
        nn.init.constant_(model.weight, value)
        model.running_mean.fill_(value)  # type: ignore[union-attr]
    diloco.step(samples=[3, 1])
    for model in models:
        assert model.weight.tolist() == [2.0, 2.0]
        assert model.running_mean.tolist() == [2.0, 2.0]  # type: ignore[union-attr]


def test_drop_in_resumes_from_its_state() -> None:
    def loop(diloco: DiLoCo, model: nn.Module, first: int, last: int) -> None:
        optimizer, data = torch.optim.SGD(model.parameters(), lr=0.05), regression(1)
        for step in range(first, last):
            optimizer.zero_grad()
            squared_error(model, data.read(0, 4 * step, 4)).backward()
            optimizer.step()
            diloco.step(samples=[4])

    whole, first, second = linear(), linear(), linear()
    loop(DiLoCo(whole, outer=outer_sgd(0.7, 0.9, True), sync_every=3), whole, 0, 11)
    before = DiLoCo(first, outer=outer_sgd(0.7, 0.9, True), sync_every=3)
    loop(before, first, 0, 5)
    after = DiLoCo(second, outer=outer_sgd(0.7, 0.9, True), sync_every=3)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    second.load_state_dict(first.state_dict())
    loop(after, second, 5, 11)
    assert all(a.equal(b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("models_first", [True, False])
@pytest.mark.parametrize(
    ("stop", "settings"),
    [
        (5, {}),
        (6, {}),
        (6, {"streaming": Streaming(fragments=2)}),
        (6, {"wire": Int1()}),
    ],
    ids=str,
)
def test_drop_in_resumes_whatever_is_loaded_first(
    stop: int, settings: dict[str, Any], models_first: bool
) -> None:
    """To make a DiLoCo sets all replicas to the first one's values, which a resume undoes."""

    def build() -> list[nn.Module]:
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(2, momentum=None)  # Its mean is over all batches, which it counts.
        first = nn.Sequential(nn.Linear(3, 2), norm, nn.Linear(2, 1))
        return [first, copy.deepcopy(first)]

    def make(models: list[nn.Module]) -> DiLoCo:
        return DiLoCo(models, outer=outer_sgd(0.7, 0.9, True), sync_every=3, **settings)

    def loop(diloco: DiLoCo, first: int, last: int) -> None:
        data = regression(2)
        for step in range(first, last):
            for worker, model in enumerate(diloco.models):
                batch = data.read(worker, 4 * step, 4)
                # The second one sees two batches, so that its count of them is another.
                for _ in range(1 + worker):
                    loss = squared_error(model, batch)
                gradients = torch.autograd.grad(loss, list(model.parameters()))
                with torch.no_grad():
                    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                        parameter -= 0.05 * gradient
            diloco.step()

    whole = make(build())
    loop(whole, 0, stop)
    saved = copy.deepcopy((whole.state_dict(), [model.state_dict() for model in whole.models]))
    loop(whole, stop, 11)
    models = build()
    if models_first:
        for model, state in zip(models, saved[1], strict=True):
            model.load_state_dict(state)
    resumed = make(models)
    resumed.load_state_dict(saved[0])
    loop(resumed, stop, 11)
    for one, other in zip(whole.models, models, strict=True):
        for name, tensor in one.state_dict().items():
            assert tensor.equal(other.state_dict()[name]), name


@pytest.mark.parametrize(
    ("kind", "options"),
    [("SGD", {}), ("SGD", {"momentum": 0.9, "nesterov": True}), ("AdamW", {})],
    ids=str,
)
def test_parameters_in_any_order_of_memory(kind: str, options: dict[str, Any]) -> None:
    """Fused optimizers walk through memory, so global parameters, means and states must lie there
    alike: by torch's own loop over row-major parameters.
    """

    def models(*, row_major: bool) -> list[nn.ParameterList]:
        torch.manual_seed(1)
        values = [torch.randn(5, 7).t(), torch.randn(26)[::2], torch.randn(6, 8)[:, :3]]
        values.append(torch.randn(3, 4, 5, 5).to(memory_format=torch.channels_last))
        if row_major:
            values = [value.contiguous() for value in values]
        return [
            nn.ParameterList([value.clone() if i else value for value in values]) for i in (0, 1)
        ]

    strided, plain = models(row_major=False), models(row_major=True)
    outer = OuterOptimizer(optimizer=kind, lr=0.1, options=options)
    by_loop = OuterOptimizer(optimizer=kind, lr=0.1, options={**options, "fused": False})
    diloco = DiLoCo(strided, outer=outer, sync_every=1)
    expected = DiLoCo(plain, outer=by_loop, sync_every=1)
    for _ in range(3):
        for one, other in zip(strided, plain, strict=True):
            for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
                moved = torch.randn(mine.shape)
                mine.data.add_(moved)
                theirs.data.add_(moved)
        diloco.step()
        expected.step()
    for mine, theirs in zip(strided[1].parameters(), plain[1].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_refusal() -> None:
    with pytest.raises(ValueError, match="models must have at least one model, got none"):
        DiLoCo([], outer=None, sync_every=1)
    with pytest.raises(
        ValueError, match="samples must have one number for each of 2 models, got 1"
    ):
        DiLoCo([linear(), linear()], outer=None, sync_every=1).step(samples=[4])
    with pytest.raises(ValueError, match="samples must not be 0 on every worker"):
        DiLoCo([linear(), linear()], outer=None, sync_every=1).step(samples=[0, 0])
    for samples in ([float("inf"), 1], [-1, 3], [float("nan"), 1]):
        with pytest.raises(ValueError, match="samples must be numbers of samples, >= 0 and finite"):
            DiLoCo([linear(), linear()], outer=None, sync_every=1).step(samples=samples)
    counted = DiLoCo([linear(), linear()], outer=None, sync_every=2)
    counted.step()
    with pytest.raises(ValueError, match="at every step or never, .* inner step 2 has some"):
        counted.step(samples=[4, 4])
    with pytest.raises(ValueError, match="models of two workers have a trainable parameter in com"):
        DiLoCo([linear()] * 2, outer=None, sync_every=1)
    words = torch.randn(5, 2)
    embeddings = [nn.Embedding.from_pretrained(words, freeze=False) for _ in range(2)]
    with pytest.raises(ValueError, match="or two in one memory, so they could not train apart"):
        DiLoCo(embeddings, outer=None, sync_every=1)
    with_empty = [linear(), linear()]
    for model in with_empty:
        model.register_parameter("empty", nn.Parameter(torch.empty(0)))
    DiLoCo(with_empty, outer=None, sync_every=1)
    wrong: list[Any] = [0, 2.5, "5"]
    for every in wrong:
        with pytest.raises(
            ValueError, match=f"sync_every must be a whole number >= 1, got {every!r}"
        ):
            DiLoCo(linear(), outer=None, sync_every=every)
    with pytest.raises(ValueError, match="models must be modules, got <class '.*Parameter'>"):
        DiLoCo([*linear().parameters()], outer=None, sync_every=1)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="^a model has no values in weight, bias: build it outside"
    ):
        DiLoCo([linear(), linear().to("meta")], outer=None, sync_every=1)
    with pytest.raises(ValueError, match="models must have parameters that require gradients"):
        DiLoCo(linear().requires_grad_(False), outer=None, sync_every=1)
    with pytest.raises(ValueError, match=r"got 0.5; write outer=adloco.OuterOptimizer\(lr=0.5\)"):
        DiLoCo(linear(), outer=0.5, sync_every=1)  # type: ignore[arg-type]
    for wire in ("int4", Int4):
        with pytest.raises(
            ValueError, match=r"^wire must be a wire format or None, got .*(?i:int4)"
        ):
            DiLoCo(linear(), sync_every=1, wire=wire)  # type: ignore[arg-type]


def test_parameters_that_would_never_be_synced_are_refused() -> None:
    def unfreeze(model: nn.Module) -> None:
        model.bias.requires_grad_()  # type: ignore[union-attr, operator]

    def freeze(model: nn.Module) -> None:
        model.weight.requires_grad_(False)  # type: ignore[union-attr, operator]

    def replace(model: nn.Module) -> None:
        model.load_state_dict(linear().state_dict(), assign=True)

    for change in (unfreeze, freeze, replace):
        models = [linear(), linear()]
        for model in models:
            model.bias.requires_grad_(False)  # type: ignore[union-attr, operator]
        diloco = DiLoCo(models, outer=None, sync_every=1)
        state = diloco.state_dict()
        change(models[1])
        others = partial(pytest.raises, ValueError, match="parameters of worker 1 are others than")
        with others():
            diloco.step()
        with others():
            diloco.load_global()
        with others():
            diloco.load_state_dict(state)


def test_a_state_of_other_workers_is_refused_where_replicas_differ() -> None:
    """At the end of a round without residuals all ranks may take that of the first."""
    diloco = DiLoCo([linear(), linear()], outer=None, sync_every=2)
    diloco.step()
    apart = diloco.state_dict()
    diloco.step()
    equal = diloco.state_dict()
    for state in (apart, equal):
        state["workers"] = [4, 5]
    diloco.load_state_dict(equal)
    with pytest.raises(ValueError, match=r"of workers \[4, 5\], and here are \[0, 1\]"):
        diloco.load_state_dict(apart)
    alone = DiLoCo(linear(), outer=None, sync_every=2)  # A rank that has fewer workers.
    alone.load_state_dict(equal)
    assert [alone.step(), alone.step()] == [False, True]


def test_a_state_of_another_model_is_refused_although_its_tensors_could_be_repeated() -> None:
    """torch would take momentum of one row for 16, whose next step reads beyond its memory."""
    saved = DiLoCo(nn.Linear(8, 1), sync_every=1)
    saved.step()
    wider = DiLoCo(nn.Linear(8, 16), sync_every=1)
    before = [parameter.detach().clone() for parameter in wider.models[0].parameters()]
    with pytest.raises(ValueError, match="that of a model with other trainable parameters or"):
        wider.load_state_dict(saved.state_dict())
    wider.step()
    for own, was in zip(wider.models[0].parameters(), before, strict=True):
        torch.testing.assert_close(own, was)


def test_a_state_that_was_not_copied_changes_nothing() -> None:
    models = [linear(), linear()]
    diloco = DiLoCo(models, outer=outer_sgd(0.7), sync_every=2)
    for model, value in zip(models, (1.0, 5.0), strict=True):
        nn.init.constant_(model.weight, value)  # type: ignore[arg-type]
    diloco.step()
    diloco.load_state_dict(diloco.state_dict())
    assert [model.weight[0, 0].item() for model in models] == [1.0, 5.0]  # type: ignore[index, operator]


def without_a_placement() -> tuple[list[str], int]:
    found = []
    for build in (
        lambda: DiLoCo(linear(), sync_every=1),
        lambda: make_run(placement=None),
    ):
        with pytest.raises(ValueError, match="this process is one of several ranks") as caught:
            build()
        found.append(str(caught.value))
    with pytest.raises(ValueError, match="one model for each of the 1 workers here, got 2"):
        DiLoCo([linear(), linear()], sync_every=1, placement=place(2))
    return found, DiLoCo(linear(), sync_every=1, placement=place(2)).num_workers


def of_other_workers() -> None:
    with pytest.raises(ValueError, match=r", 2, 3\], but \[0, 1\] train here; give place\(2\)$"):
        make_run(placement=place(4))
    with pytest.raises(ValueError, match=r"but \[0, 2\] train here; give place\(\[0, 2\]\)$"):
        make_run(workers_per_trainer=3, dropped=(1,), placement=place(2))


def test_a_placement_of_other_workers_than_the_method_has_is_refused() -> None:
    run_on_ranks(of_other_workers, 2)


def test_ranks_without_a_placement_are_refused_and_one_says_how_many_workers_there_are() -> None:
    """Each rank would train alone, and no number would show it."""
    for (own_loop, rounds), workers in run_on_ranks(without_a_placement, 2):
        assert own_loop == rounds and "placement=adloco.place(number of workers)" in rounds
        assert workers == 2


def wrapped_in_ddp() -> str:
    for given in ({"placement": OneProcess()}, {"placement": place(1, replica_size=2)}):
        # One worker on both ranks, whose gradients they share.
        DiLoCo(DistributedDataParallel(linear()), sync_every=1, **given)  # type: ignore[arg-type]
    held = nn.Sequential(DistributedDataParallel(linear()))
    with pytest.raises(ValueError, match="over 2 ranks, which averages the gradients"):
        DiLoCo(held, sync_every=1, placement=place(2))
    normed = nn.Sequential(linear(), nn.SyncBatchNorm(2))
    with pytest.raises(ValueError, match="SyncBatchNorm over 2 ranks, which exchanges statistics"):
        DiLoCo(normed, sync_every=1, placement=place(2))
    DiLoCo(normed, sync_every=1, placement=place(1, replica_size=2))
    groups = [dist.new_group([rank]) for rank in (0, 1)]
    own = nn.SyncBatchNorm(2, process_group=groups[dist.get_rank()])
    DiLoCo(own, sync_every=1, placement=place(2))
    on_cpu = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
    for shard in (fully_shard, on_cpu):
        with pytest.raises(ValueError, match="over 2 ranks, which averages the gradients"):
            DiLoCo(shard(linear()), sync_every=1, placement=place(2))
    with pytest.raises(ValueError, match="over 2 ranks, which averages the gradients") as refused:
        DiLoCo(DistributedDataParallel(linear()), sync_every=1, placement=place(2))
    return str(refused.value)


def test_gradients_that_are_averaged_at_every_step_are_refused() -> None:
    (one, other) = run_on_ranks(wrapped_in_ddp, 2)
    assert one.replace("here [0]", "here [1]") == other
    assert "or with a group of one worker's ranks (here [0], not [0, 1])" in one


def sharded_elsewhere() -> list[str]:
    """Islands are neighbours, ranks 0 and 1 and ranks 2 and 3."""
    strided = init_device_mesh("cpu", (2, 2), mesh_dim_names=("inner", "worker"))["inner"]
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    neighbours = init_device_mesh("cpu", (2, 2), mesh_dim_names=("worker", "inner"))["inner"]
    on_cpu = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
    rank, found = dist.get_rank(), []
    for model, sizes in (
        (fully_shard(linear(), mesh=strided), {"shard_size": 2}),
        (DistributedDataParallel(linear(), process_group=groups[rank % 2]), {"replica_size": 2}),
        (fully_shard(linear(), mesh=neighbours), {"replica_size": 2}),
        (on_cpu(linear(), process_group=own[rank // 2]), {"shard_size": 2}),
    ):
        placement = place(2, **sizes)  # type: ignore[arg-type]
        with pytest.raises(ValueError) as refused:
            DiLoCo(model, sync_every=1, placement=placement)
        found.append(str(refused.value))
    whole = {"process_group": own[rank // 2], "sharding_strategy": ShardingStrategy.NO_SHARD}
    replicas = place(2, replica_size=2)
    DiLoCo(on_cpu(linear(), **whole), sync_every=1, placement=replicas)  # type: ignore[arg-type]
    return found


def test_ranks_of_other_workers_are_refused() -> None:
    """Shard 0 of a weight would be averaged with shard 1, and gradients of two workers."""
    for rank, found in enumerate(run_on_ranks(sharded_elsewhere, 4)):
        here, not_here = [[0, 1], [2, 3]][rank // 2], [[0, 2], [1, 3]][rank % 2]
        for message in found[:2]:
            assert message.endswith(f"a group of one worker's ranks (here {here}, not {not_here})")
        assert found[2].startswith(
            "ranks 0 and 1 must have the same part of weight, but have shard 0 of 2 and shard 1 of"
        )
        assert found[3].startswith("a model is in FullyShardedDataParallel, whose shards cannot")


def in_tensor_parallel(wire: Int8 | None) -> list[list[float]]:
    """Worker m, of ranks 2m and 2m + 1, adds m to all parameters."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("worker", "inner"))["inner"]
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    placement = place(2, shard_size=2)
    settings = {"placement": placement, "wire": wire}
    diloco = DiLoCo(model, outer=None, sync_every=1, **settings)  # type: ignore[arg-type]
    before = [parameter.full_tensor().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(float(placement.rank // 2))
    diloco.step()
    return [
        (parameter.detach().full_tensor() - was).flatten().tolist()  # type: ignore[attr-defined]
        for parameter, was in zip(model.parameters(), before, strict=True)
    ]


@pytest.mark.parametrize("wire", [None, Int8()])
def test_models_in_tensor_parallel_are_synced(wire: Int8 | None) -> None:
    """Their shards are columns, too, and the bias of such a layer is whole."""
    for moved in run_on_ranks(in_tensor_parallel, 4, wire):
        assert [len(each) for each in moved] == [16, 4, 8, 2]
        assert np.concatenate(moved) == pytest.approx(0.5)


def on_islands_of_two() -> tuple[list[float], list[float], str]:
    """Worker m, of ranks 2m and 2m + 1, moves by m."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("worker", "inner"))["inner"]
    model, rank, two = linear(), dist.get_rank(), {"outer": None, "sync_every": 1}
    model.register_buffer("seen", torch.zeros(2))
    fully_shard(model, mesh=mesh)
    diloco = DiLoCo(model, placement=place(2, shard_size=2), **two)  # type: ignore[arg-type]
    before = model.weight.full_tensor()  # type: ignore[operator, union-attr]
    with torch.no_grad():
        model.weight.add_(float(rank // 2))  # type: ignore[operator, union-attr]
    model.seen.fill_(rank)  # type: ignore[operator, union-attr]
    diloco.step([[5, 3, 1, 3][rank]])
    moved = model.weight.full_tensor() - before  # type: ignore[operator, union-attr]
    alone = linear()
    diloco = DiLoCo(alone, placement=place(2, replica_size=2), **two)  # type: ignore[arg-type]
    alone.weight.data.add_(float(rank))  # type: ignore[operator]
    with pytest.raises(ValueError) as refused:
        diloco.step()
    return moved.flatten().tolist(), model.seen.tolist(), str(refused.value)  # type: ignore[operator, union-attr]


def test_a_worker_is_what_all_its_ranks_have_seen() -> None:
    """By hand: samples of 8 and 4, and statistics with means of 0.5 and 2.5.

    Of replicas that trained apart a sync would take a part each.
    """
    for moved, seen, refused in run_on_ranks(on_islands_of_two, 4):
        assert moved == pytest.approx([1 / 3] * len(moved))
        assert seen == pytest.approx([7 / 6] * 2)
        assert refused.startswith("ranks that serve one worker have trained it each on its own")


def warned_of(wrapped: bool) -> list[str]:
    """The model inside of DDP over all ranks, or without DDP, on data of each worker."""
    model, rank = linear(), dist.get_rank()
    runs = DistributedDataParallel(model) if wrapped else model
    diloco = DiLoCo(model, sync_every=2, placement=place(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            runs(torch.full((1, 3), rank + 1.0)).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad  # type: ignore[operator]
            model.zero_grad()
            diloco.step()
    return [str(each.message) for each in caught if each.category is UserWarning]


def test_a_wrapper_that_is_not_given_is_noticed() -> None:
    """It averages gradients at every step, so that all workers are one."""
    first, second = run_on_ranks(warned_of, 2, True)
    assert [each.split(",")[0] for each in first] == ["all workers have taken the same steps"]
    assert second == []
    assert run_on_ranks(warned_of, 2, False) == [[], []]


@dataclass(frozen=True)
class Slow(Int8):
    """Rank 0 takes a while to decode."""

    def decode(self, blocks: Tensor) -> Tensor:
        time.sleep(0.2 * (dist.get_rank() == 0))
        return super().decode(blocks)


def two_at_once() -> list[list[float]]:
    """One in flight, in two types and so in two exchanges, while the other one syncs."""
    shared = {"outer": None, "placement": place(2)}
    one, other = nn.Sequential(linear(), linear().double()), nn.Linear(20, 1)
    streaming = Streaming(tau=1, alpha=0.0)
    first = DiLoCo(one, sync_every=2, wire=Slow(), streaming=streaming, **shared)  # type: ignore[arg-type]
    second = DiLoCo(other, sync_every=1, **shared)  # type: ignore[arg-type]
    parameters = [*one.parameters(), *other.parameters()]
    before = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.add_(float(dist.get_rank()))
    first.step()
    dist.barrier()
    time.sleep(0.1 * dist.get_rank())
    second.step()
    first.step()
    return [
        (now.detach() - was).flatten().tolist() for now, was in zip(parameters, before, strict=True)
    ]


def test_two_objects_of_one_placement_do_not_mix_their_exchanges() -> None:
    """As of the two models of a GAN. Worker m moves by m."""
    for moved in run_on_ranks(two_at_once, 2):
        assert np.concatenate(moved) == pytest.approx(0.5)


def test_two_parameters_in_one_memory_are_synced_together() -> None:
    """Of two fragments the second one would be set back by the first."""
    models = [nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))) for _ in range(2)]
    for model in models:
        model[3].weight.data = model[0].weight.data  # type: ignore[union-attr, operator]
    DiLoCo(models, sync_every=3, streaming=Streaming(fragments=3))
    with pytest.raises(ValueError, match="two parameters in one memory would be synced in two"):
        DiLoCo(models, sync_every=2, streaming=Streaming(fragments=2))


@pytest.mark.parametrize(
    "kind", [np.float16, np.uint8, partial(torch.tensor, dtype=torch.bfloat16)]
)
def test_samples_may_be_numbers_of_any_kind(kind: Any) -> None:
    """By hand: 900 and 300 samples, where sums of ones in bf16 stop at 256."""
    models = [linear(), linear()]
    diloco = DiLoCo(models, outer=None, sync_every=300)
    start = models[0].weight.detach().clone()
    models[1].weight.data.add_(1.0)  # type: ignore[operator]
    for _ in range(300):
        diloco.step([kind(3), kind(1)])
    assert (models[0].weight - start).detach().numpy() == pytest.approx(0.25)
    torch.save(diloco.state_dict(), saved := io.BytesIO())
    saved.seek(0)
    torch.load(saved, weights_only=True)


def test_the_outer_optimizer_is_that_of_the_paper_unless_it_is_given() -> None:
    """By hand: a pseudo-gradient of 1, then v = 1 and a step of 0.7 (1 + 0.9 v) = 1.33."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 5.0)
    diloco = DiLoCo(model, sync_every=1)
    nn.init.constant_(model.weight, 4.0)
    diloco.step()
    assert model.weight.item() == pytest.approx(5 - 1.33)


@pytest.mark.parametrize("momentum", [None, 0.0, 0.9, 1.0, 1, -0.1, "0.9", True])
@pytest.mark.parametrize("nesterov", [None, False, True, 0])
def test_settings_of_sgd_that_are_not_tried_are_fine(momentum: object, nesterov: object) -> None:
    """A usual momentum is taken without importing torch; what is tried fails as in torch."""
    given = {"momentum": momentum, "nesterov": nesterov}
    options = {name: value for name, value in given.items() if value is not None}
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    try:
        torch.optim.SGD([weight], lr=0.7, fused=True, **options).step()  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        with pytest.raises(ValueError, match="options do not fit"):
            OuterOptimizer(options=options)
    else:
        OuterOptimizer(options=options)


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), True),
        (lambda p: torch.optim.AdamW(p, lr=0.1), True),
        (lambda p: Muon(p, lr=0.1, weight_decay=0.1, momentum=0.9), True),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), False),
        (lambda p: torch.optim.NAdam(p, lr=0.1), False),
        (lambda p: torch.optim.Rprop(p, lr=0.1), False),
    ],
    ids=["sgd", "adamw", "muon", "dampening", "nadam", "rprop"],
)
@pytest.mark.parametrize("loads", [False, True], ids=["forgets", "loads"])
def test_an_optimizer_that_forgot_goes_on_as_a_new_one(make: Any, kept: bool, loads: bool) -> None:
    """With zeros, which a merge can average, if it begins with them; also where it loads a state
    from before the first step.
    """
    weights = [nn.Parameter(torch.ones(3, 4)) for _ in range(2)]
    used, fresh = (make([weight]) for weight in weights)

    def step(optimizer: torch.optim.Optimizer, weight: Tensor, seed: int) -> None:
        weight.grad = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        optimizer.step()

    step(used, weights[0], 0)
    if loads:
        load_optimizer(used, make([nn.Parameter(torch.ones(3, 4))]).state_dict())
    else:
        forget(used)
    assert bool(used.state) == kept
    with torch.no_grad():
        weights[0].fill_(1)
    for seed in range(1, 4):
        step(used, weights[0], seed)
        step(fresh, weights[1], seed)
        assert weights[0].equal(weights[1])


def test_models_and_settings_that_differ_between_workers_are_refused() -> None:
    """They would be copied by repetition, or one parameter into another."""

    def named(*names: str) -> nn.Module:
        model = nn.Module()
        for name in names:
            model.register_parameter(name, nn.Parameter(torch.ones(2)))
        return model

    def coded(code: int) -> nn.Module:
        """The scale of its codes is no tensor of the model, as with bitsandbytes."""

        class Codes(nn.Parameter):
            pass

        model = linear()
        codes = Codes(torch.tensor([code], dtype=torch.uint8), requires_grad=False)
        model.register_parameter("codes", codes)
        return model

    DiLoCo([torch.compile(linear()), linear()], sync_every=1)  # type: ignore[list-item]
    DiLoCo([coded(3), coded(3)], sync_every=1)
    half, frozen = linear().bfloat16(), linear()
    frozen.bias.requires_grad_(False)  # type: ignore[union-attr, operator]
    for pair, differing in (
        ((nn.Linear(4, 1), nn.Linear(4, 4)), r"weight: \(1, 4\) of .* weight: \(4, 4\) of"),
        ((nn.Linear(4, 4, bias=False), nn.Linear(4, 4)), "nothing: absent, worker 1 has bias"),
        ((linear(), half), r"float32, trainable, worker 1 has weight: \(1, 3\) of torch.bfloat16"),
        ((linear(), frozen), "trainable, worker 1 has bias: .* frozen"),
        ((named("p", "q"), named("q", "p")), "0 has p: .*, worker 1 has q"),
        ((coded(3), coded(4)), r"beginning with \[3\], worker 1 .* beginning with \[4\]"),
    ):
        before = [parameter.clone() for model in pair for parameter in model.parameters()]
        with pytest.raises(ValueError, match=f"must be the same for all workers, .*{differing}"):
            DiLoCo(list(pair), sync_every=1)
        after = [parameter for model in pair for parameter in model.parameters()]
        assert all(one.equal(other) for one, other in zip(before, after, strict=True))


def with_the_state_of_the_first_rank(folder: str) -> tuple[str, str]:
    """Two workers with two ranks each; all load the state of rank 0."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("worker", "inner"))["inner"]
    sharded, copies = linear(), linear()
    fully_shard(sharded, mesh=mesh)
    refused = []
    for model, inside in ((sharded, {"shard_size": 2}), (copies, {"replica_size": 2})):
        diloco = DiLoCo(model, sync_every=2, placement=place(2, **inside))
        for step in range(3):
            diloco.step([float(dist.get_rank() + step)])
            if step == 1:  # Where replicas do not differ.
                between = _first_state(diloco, folder)
        within = _first_state(diloco, folder)
        try:
            diloco.load_state_dict(between)
            diloco.load_state_dict(within)
            refused.append("")
        except ValueError as error:
            refused.append(str(error))
    return refused[0], refused[1]


def _first_state(diloco: DiLoCo, folder: str) -> dict[str, Any]:
    state = diloco.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, f"{folder}/state")
    dist.barrier()
    loaded: dict[str, Any] = torch.load(f"{folder}/state", weights_only=True)
    dist.barrier()
    return loaded


def test_the_ranks_of_a_worker_do_not_take_the_state_of_its_first_one(tmp_path: Path) -> None:
    """Shard 0 would be put in the place of shard 1, and its samples would count twice."""
    for rank, found in enumerate(run_on_ranks(with_the_state_of_the_first_rank, 4, str(tmp_path))):
        assert found[0].startswith("a state has other shards than its rank has here; let each")
        other = f"that of another rank, of workers [0], and here are [{rank // 2}]"
        assert other in found[1] if rank else not found[1]


def copied_within_a_round() -> bool:
    model = linear()
    fully_shard(model)
    diloco = DiLoCo(model, sync_every=2, placement=place(1, shard_size=2))
    model(torch.ones(2, 3)).sum().backward()
    diloco.step()
    (saved,) = copy.deepcopy(diloco.state_dict())["replicas"]
    return all(
        one.full_tensor().equal(two.full_tensor())  # type: ignore[attr-defined]
        for one, two in zip(saved, model.parameters(), strict=True)
    )


def test_a_state_within_a_round_can_be_copied_with_shards() -> None:
    """torch cannot copy a shard with its gradient."""
    assert run_on_ranks(copied_within_a_round, 2) == [True, True]


def each_with_its_own_settings() -> tuple[str, str]:
    placement = place(2)
    given: dict[str, Any] = {"placement": placement}
    with pytest.raises(ValueError, match="must be the same for all workers") as differing:
        DiLoCo(linear(), sync_every=2 + placement.rank, **given)
    with pytest.raises(ValueError, match="worker 0 has the outer optimizer: .*lr=0.5"):
        DiLoCo(linear(), outer=OuterOptimizer(lr=(placement.rank + 1) / 2), sync_every=2, **given)
    with pytest.raises(ValueError, match="Int4, 36 .* for 64 .* Int4, 68 bytes for 128 values"):
        DiLoCo(linear(), sync_every=2, wire=Int4(block=64 << placement.rank), **given)
    feedback = Feedback(feedback_decay=(placement.rank + 1) / 2)
    with pytest.raises(ValueError, match="0 has error feedback: .*=0.5.* feedback: .*=1.0"):
        DiLoCo(linear(), sync_every=2, wire=Int1(), feedback=feedback, **given)
    DiLoCo(linear(), sync_every=2, streaming=[None, Streaming()][placement.rank], **given)
    with pytest.raises(ValueError, match="several ranks holds their connections") as copied:
        copy.deepcopy(DiLoCo(linear(), sync_every=2, **given))
    return str(differing.value), str(copied.value)


def test_ranks_with_other_settings_are_refused_and_copies_of_one() -> None:
    for differing, copied in run_on_ranks(each_with_its_own_settings, 2):
        assert "worker 0 has sync_every: 2, worker 1 has sync_every: 3" in differing
        assert copied.endswith("save its state_dict(), and load that into a new one")


def test_a_state_with_other_frozen_tensors_is_refused_before_anything_is_loaded() -> None:
    """A copy would repeat the smaller ones."""

    class Shifted(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.shift = nn.Parameter(torch.full((size,), 3.0), requires_grad=False)
            self.register_buffer("seen", torch.full((size,), size))

    for steps in (1, 2):  # Within a round, and at its end, where counts are saved alone.
        saved, other = (DiLoCo(Shifted(size), sync_every=2) for size in (1, 4))
        for _ in range(steps):
            saved.models[0].weight.data.add_(1)  # type: ignore[union-attr, operator]
            saved.step()
        with pytest.raises(ValueError, match="that of a model with other parameters or buffers"):
            other.load_state_dict(saved.state_dict())
        (model,) = other.models
        assert model.weight.tolist() == [1, 1]  # type: ignore[operator, union-attr]
        assert model.seen.tolist() == [4] * 4  # type: ignore[operator, union-attr]


def test_a_state_that_counts_samples_is_for_the_same_fragments() -> None:
    models = [nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))) for _ in range(2)]
    for samples in (None, [1, 2]):
        plain = DiLoCo(models, sync_every=4)
        streaming = DiLoCo(models, sync_every=4, streaming=Streaming(fragments=3))
        for _ in range(4):
            plain.step(samples)
        streaming.load_state_dict(plain.state_dict())  # Nothing is counted after a sync of all.
        assert [streaming.step(samples) for _ in range(4)] == [False, False, False, True]
        if samples:
            with pytest.raises(ValueError, match="had other fragments when it was saved"):
                plain.load_state_dict(streaming.state_dict())
        else:
            plain.load_state_dict(streaming.state_dict())


def moved(diloco: DiLoCo, steps: int) -> list[tuple[float, float]]:
    """Take inner steps of 1 and 3 on two workers' weights; return the weights after each."""
    found = []
    for _ in range(steps):
        for step, model in zip((1.0, 3.0), diloco.models, strict=True):
            model.weight.data.add_(step)  # type: ignore[operator, union-attr]
        diloco.step()
        first, second = (float(model.weight.detach()) for model in diloco.models)  # type: ignore[arg-type, operator]
        found.append((first, second))
    return found


def zeros(num_workers: int, *, sync_every: int, streaming: Streaming | None = None) -> DiLoCo:
    models = [nn.Linear(1, 1, bias=False) for _ in range(num_workers)]
    nn.init.zeros_(models[0].weight)
    return DiLoCo(models, outer=None, sync_every=sync_every, streaming=streaming)


def test_a_state_of_another_schedule_begins_a_round_and_loses_no_step() -> None:
    """At inner step 3 of a round of 4, a mean would arrive that nobody has sent."""
    late = Streaming(tau=2, alpha=0.0)  # Sent after step 2, and received after step 4.
    saved, other = zeros(2, sync_every=3), zeros(2, sync_every=4, streaming=late)
    assert moved(saved, 3)[-1] == (6, 6)
    other.load_state_dict(saved.state_dict())
    # The mean of (8, 12), which is sent after two steps.
    assert moved(other, 4) == [(7, 9), (8, 12), (9, 15), (10, 10)]
    moved(saved, 2)
    with pytest.raises(ValueError, match="saved within a round, with sync_every 3 and Streaming"):
        other.load_state_dict(saved.state_dict())
    assert moved(other, 1) == [(11, 13)]


def test_a_state_of_something_else_is_refused() -> None:
    diloco = zeros(1, sync_every=1)
    with pytest.raises(ValueError, match="the state is not a DiLoCo's"):
        diloco.load_state_dict(diloco.models[0].state_dict())


def states_of_two_rounds() -> str:
    models = [linear()]
    diloco = DiLoCo(models, sync_every=1, placement=place(2))
    older = copy.deepcopy(diloco.state_dict())
    diloco.step()
    newer = diloco.state_dict()
    with pytest.raises(ValueError, match="load on each rank one that was saved after") as refused:
        diloco.load_state_dict([newer, older][dist.get_rank()])
    diloco.load_state_dict(newer)
    return str(refused.value)


def test_ranks_that_load_states_of_two_rounds_are_refused() -> None:
    """As after a kill while they saved: their global parameters would stay apart from then on."""
    for refused in run_on_ranks(states_of_two_rounds, 2):
        assert "were saved after inner steps [1, 0]" in refused


@pytest.mark.parametrize(("streaming", "at"), [(None, 2), (Streaming(tau=1, alpha=0.0), 1)])
def test_a_step_that_failed_is_not_counted(streaming: Streaming | None, at: int) -> None:
    """Otherwise its sync would be left out, and with streaming the next one undo inner steps."""
    expected = moved(zeros(2, sync_every=3, streaming=streaming), 6)
    diloco = zeros(2, sync_every=3, streaming=streaming)
    assert moved(diloco, at) == expected[:at]
    (weight,) = diloco.models[1].parameters()
    before = weight.detach().clone()
    weight.data.fill_(math.nan)
    with pytest.raises(NonFiniteLossError, match=f"worker 1, inner step {at + 1}"):
        diloco.step()
    weight.data.copy_(before)
    assert moved(diloco, 6 - at) == expected[at:]


def test_a_checkpoint_of_torch_that_loses_optimizer_state_is_refused(tmp_path: Path) -> None:
    """torch.distributed.checkpoint loads what the new object's state has, which is no momentum."""

    def lone() -> DiLoCo:
        torch.manual_seed(0)
        return DiLoCo(linear(), sync_every=1)

    def run() -> AdLoCo:
        return make_run(outer=outer_sgd(0.7, 0.9, nesterov=True))

    diloco, adloco = lone(), run()
    diloco.step()
    list(adloco.rounds(1))
    for name, saved, new in (("lone", diloco, lone()), ("run", adloco, run())):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about a process group.
            save({name: saved}, checkpoint_id=tmp_path / name, no_dist=True)
            with pytest.raises(ValueError, match="the state has lost that of SGD: torch.dist"):
                load({name: new}, checkpoint_id=tmp_path / name, no_dist=True)


@pytest.mark.parametrize("tau", [0, 1])
@pytest.mark.parametrize("through", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_continues_as_the_original_does(through: Any, tau: int) -> None:
    """Also within a round, and while a fragment travels."""

    def advance(diloco: DiLoCo, steps: range) -> list[Tensor]:
        for step in steps:
            for worker, model in enumerate(diloco.models):
                for parameter in model.parameters():
                    parameter.data.add_(0.1 * (step + worker))
            diloco.step()
        return [parameter.detach() for model in diloco.models for parameter in model.parameters()]

    def make() -> DiLoCo:
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)) for _ in range(2)]
        streaming = Streaming(fragments=2, tau=tau)
        return DiLoCo(models, sync_every=4, streaming=streaming, wire=Int1())

    expected, diloco = advance(make(), range(12)), make()
    for step in range(9):
        continued = advance(through(diloco), range(step, 12))
        assert all(one.equal(two) for one, two in zip(continued, expected, strict=True)), step
        advance(diloco, range(step, step + 1))
    with pytest.raises(ValueError, match="an AdLoCo holds threads and hooks, which cannot be cop"):
        through(make_run())


def test_steps_do_not_depend_on_the_default_device() -> None:
    """As a script that sets it to a GPU has it; none of its tensors would be found here."""
    given: list[dict[str, Any]] = [{}, {"wire": Int1()}, {"wire": Int2()}, {"wire": Int4()}]
    for settings in given:
        seen = []
        for device in ("cpu", "meta"):
            models = [linear(), linear()]
            with torch.device(device):
                diloco = DiLoCo(models, sync_every=1, **settings)
                models[1].weight.data.add_(1.0)  # type: ignore[union-attr, operator]
                diloco.step([1, 2])
                diloco.load_state_dict(diloco.state_dict())
            seen.append(models[0].weight)
        assert seen[0].equal(seen[1])  # type: ignore[operator, arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_two_bytes_that_a_class_of_ones_own_hands_in_take_whole_steps(
    dtype: torch.dtype,
) -> None:
    """Torch's fused SGD changes the last 5 of 37 on a CPU."""
    parameter = nn.Parameter(torch.ones(37, dtype=dtype))
    optimizer = OuterOptimizer(lr=1.0, options={})([parameter])
    parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    assert parameter.tolist() == [0.5] * 37
