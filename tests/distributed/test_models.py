"""Models that are built, shaped or fail in unusual ways: alike on every placement, or refused with
a sentence.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.multiprocessing import ProcessRaisedException
from torch.nn.parallel import DistributedDataParallel

from adloco import BatchGuards, place
from adloco.distributed.dtensor import (
    _host_mesh,
    first_element,
    forget_meshes,
    gather_shards,
    local,
)
from adloco.distributed.parallel.engine import IslandGroup
from adloco.distributed.parallel.whole_model import WholeModel
from adloco.distributed.testing import run_on_ranks
from adloco.distributed.traffic import Traffic
from tests.distributed.test_islands import run_here
from tests.problems import BlockLM, next_token, outer_sgd, sgd, tokens


class Looped(BlockLM):
    """One block that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.blocks[0]


class Borrowed(BlockLM):
    """A block whose weight also serves outside."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(5, 5).double()
        self.last.weight = self.blocks[0].weight

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.last(self.embedding(ids)).sum(-1, keepdim=True)


class Nested(BlockLM):
    """Blocks in stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([self.blocks, nn.ModuleList([nn.Linear(5, 5).double()])])
        del self.blocks

    @property
    def flat(self) -> Iterator[nn.Module]:
        return (block for stage in self.stages for block in stage)  # type: ignore[attr-defined]

    def forward(self, ids: Tensor) -> Tensor:
        state = self.embedding(ids)
        for block in self.flat:
            state = state + torch.tanh(block(state))
        logits: Tensor = self.head(state)
        return logits


class Drawn(BlockLM):
    """A model with other initial weights on each rank."""

    def __init__(self) -> None:
        super().__init__()
        if dist.is_initialized() and dist.get_rank() > 0:
            for parameter in self.parameters():
                nn.init.normal_(parameter)


def trained(
    kind: Callable[[], nn.Module], shards: int, replicas: int, workers: int
) -> list[Tensor]:
    run = run_here(
        shards,
        replicas,
        build_model=kind,
        workers_per_trainer=workers,
        inner=sgd(0.1),
        outer=outer_sgd(0.7, 0.9),
        guards=BatchGuards(initial=8),
    )
    list(run.rounds(2))
    return [
        parameter.detach().clone()
        for parameter in gather_shards(next(iter(run.workers.values())).replica.params)
    ]


@pytest.mark.parametrize("kind", [Looped, Borrowed, Nested, Drawn])
def test_models_train_alike_under_shards(kind: Callable[[], nn.Module]) -> None:
    for mine, theirs in zip(
        trained(kind, 1, 1, 1), run_on_ranks(trained, 2, kind, 2, 1, 1)[0], strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("replicas", "workers"), [(1, 2), (2, 1)])
def test_every_rank_starts_from_the_first_one_s_model(replicas: int, workers: int) -> None:
    alone = trained(Drawn, 1, 1, workers)
    for theirs in run_on_ranks(trained, 2, Drawn, 1, replicas, workers):
        for mine, other in zip(alone, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-9)


def running_means() -> tuple[float, float]:
    """A mean over batches: as it is copied to a replica, and after two passes of the replica's."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    model = nn.BatchNorm1d(1, momentum=0.5)
    assert model.running_mean is not None
    model.running_mean.fill_(rank)
    island = IslandGroup(init_device_mesh("cpu", (2, 1)), group, Traffic())
    forward = WholeModel(model, torch.device("cpu"), island, compile=False, fill=None).forward
    copied = model.running_mean.item()
    for _ in range(2):
        forward(torch.full((2, 1), 4.0 * rank))
    return copied, model.running_mean.item()


def test_replicas_keep_their_own_buffers() -> None:
    """A copy before each forward pass would end with (0 + 4) / 2 on the second one."""
    assert run_on_ranks(running_means, 2) == [(0.0, 0.0), (0.0, 3.0)]


class Scalar(BlockLM):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))


class Mixed(BlockLM):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].float()


class Hooked(BlockLM):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda gradient: 2 * gradient)


class Transposed(BlockLM):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].weight = nn.Parameter(self.blocks[0].weight.detach().t())


class Bounded(BlockLM):
    def __init__(self) -> None:
        super().__init__()
        self.embedding.max_norm = 1.0


def wider_by_rank() -> nn.Module:
    return BlockLM(width=5 + dist.get_rank())


def wrapped() -> nn.Module:
    return DistributedDataParallel(BlockLM())


def normed() -> nn.Module:
    return nn.Sequential(BlockLM(), nn.SyncBatchNorm(7))


def sharded() -> nn.Module:
    return fully_shard(BlockLM(), mesh=init_device_mesh("cpu", (2,)))


def refused(kind: Callable[[], nn.Module], shards: int) -> str:
    try:
        run_here(shards, 1, build_model=kind, workers_per_trainer=2 // shards)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "shards", "message"),
    [
        (
            Scalar,
            2,
            (
                "parameters without dimensions such as scale cannot be sharded; give them the "
                "shape (1,), or use placement.shard_size 1"
            ),
        ),
        (
            Mixed,
            2,
            (
                "shards need parameters of one data type, got float32 and float64; convert the "
                "model, or use placement.shard_size 1"
            ),
        ),
        (
            Hooked,
            2,
            "shards would leave out the hooks of parameter embedding.weight; use placement",
        ),
        (Transposed, 2, "parameter blocks.0.weight is not contiguous, as shards must be; make it"),
        (Bounded, 2, "an embedding with max_norm changes its rows in forward passes, on each rank"),
        (
            wider_by_rank,
            1,
            (
                "models and settings must be the same for all workers, but where worker 0 has "
                "embedding.weight: (7, 5) of torch.float64, trainable, worker 1 has "
                "embedding.weight: (7, 6)"
            ),
        ),
        (
            wrapped,
            1,
            "a model is in DistributedDataParallel over 2 ranks; leave that out",
        ),
        (normed, 1, "a model has SyncBatchNorm over 2 ranks, which exchanges statistics of"),
        (
            sharded,
            2,
            "a model is in shards over 2 ranks; leave that out, and give place() the",
        ),
    ],
)
def test_models_that_are_refused(kind: Callable[[], nn.Module], shards: int, message: str) -> None:
    for said in run_on_ranks(refused, 2, kind, shards):
        assert message in said


def in_engine() -> str:
    try:
        place(1, replica_size=2).engine(wrapped())
    except ValueError as error:
        return str(error)
    return ""


def test_an_engine_refuses_a_model_in_ddp() -> None:
    """It would measure gradients that are averaged already."""
    for said in run_on_ranks(in_engine, 2):
        assert "a model is in DistributedDataParallel over 2 ranks; leave that out" in said


class Failing:
    """A loss that fails at the third call on the second rank."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: Any, ids: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3 and dist.get_rank() == 1:
            raise KeyError("third call")
        return next_token(model, ids)


def failing(shards: int, replicas: int) -> None:
    run_here(
        shards, replicas, workers_per_trainer=2, loss_fn=Failing(), guards=BatchGuards(initial=16)
    ).round()


@pytest.mark.parametrize(("shards", "replicas"), [(2, 1), (1, 2)], ids=["shards", "replicas"])
def test_a_failure_on_an_island_with_two_workers_hangs_nobody(shards: int, replicas: int) -> None:
    """The failing rank starts no other worker: its reductions would be mixed up with those for
    which the first rank still waits.
    """
    with pytest.raises(
        ProcessRaisedException, match=r"(?s)Process 1 .*third call|Process 0 .*[Cc]onnection"
    ):
        run_on_ranks(failing, 2, shards, replicas, timeout_seconds=30.0)


def evaluated_after_loading(shards: int) -> tuple[float, float]:
    """A loss at the start, and the loss once the state of the start is loaded again, with an
    evaluation just before.
    """
    run = run_here(shards, 1, inner=sgd(0.5), guards=BatchGuards(initial=8))
    ids = tokens(2000, 1).read(0, 0, 64)

    def share(model: nn.Module, part: int, parts: int) -> tuple[float, float]:
        return float(next_token(model, ids)), 1.0

    saved = run.placement.agree(run.state_dict())
    before = run.evaluate(share)[0][0]
    run.round()
    moved = run.evaluate(share)[0][0]
    assert abs(moved - before) > 1e-3
    run.load_state_dict(saved)
    return before, run.evaluate(share)[0][0]


def test_shards_gathered_for_an_evaluation_are_not_used_again() -> None:
    for before, after in run_on_ranks(evaluated_after_loading, 2, 2):
        assert after == pytest.approx(before, rel=1e-12)


def on_a_host_mesh(shards: int, replicas: int) -> None:
    names = ("replica", "shard") if replicas > 1 else ("shard",)
    mesh = init_device_mesh("cpu", (replicas, shards)[-len(names) :], mesh_dim_names=names)
    placements = [Replicate(), Shard(0)][-len(names) :]
    whole = torch.arange(15.0).reshape(5, 3)
    like = distribute_tensor(whole, mesh, placements)
    again = DTensor.from_local(
        local(like).clone(),
        _host_mesh(like.device_mesh),
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    assert torch.equal(again.full_tensor(), whole)
    assert first_element(again) == first_element(like)
    left = weakref.ref(again.device_mesh)
    del again
    forget_meshes()
    gc.collect()
    assert left() is None, "it holds the connections of its ranks"


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_mesh_for_tensors_in_host_memory_has_the_same_ranks(replicas: int) -> None:
    """Where parameters are on GPUs, outer state may be on a mesh of its own, which CPUs do not
    need."""
    run_on_ranks(on_a_host_mesh, 2 * replicas, 2, replicas)
