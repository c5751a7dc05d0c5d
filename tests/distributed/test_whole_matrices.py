"""Muon on an island: the same steps however its matrices are spread, hand-counted bytes, and
checkpoints that go from one placement to another.
"""

import math
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from adloco import AdLoCo, BatchGuards, InnerAdamW, InnerMuon, SwitchMode
from adloco.algorithms import muon_step
from adloco.distributed.dtensor import gather_shards, local
from adloco.distributed.launch.launcher import place
from adloco.distributed.parallel import whole_matrices
from adloco.distributed.parallel.whole_matrices import MatrixOwners, balanced, cost
from adloco.distributed.testing import run_on_ranks
from adloco.distributed.traffic import Traffic
from tests.problems import BlockLM, cases, make_run, next_token, tokens

WIDTH, INNER, LAYERS, STEPS = 5, 9, 3, 50
PLACES = {"DDP": (1, 2), "DDP of 3": (1, 3), "FSDP2": (2, 1), "FSDP2 of 4": (4, 1), "HSDP": (2, 2)}
"""Shards and replicas. Rows of 5 on 4 shards: 2, 2, 1 and none."""


class MixedLM(BlockLM):
    """A language model with matrices of three shapes, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__(width=WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()
            )
            for _ in range(LAYERS)
        )
        self.double()


def run_here(shards: int, replicas: int, dtype: torch.dtype, inner: InnerMuon) -> AdLoCo:
    return make_run(
        build_model=lambda: MixedLM().to(dtype),
        loss_fn=next_token,
        data=tokens(2000, 1),
        workers_per_trainer=1,
        outer=None,
        inner=inner,
        sync_every=STEPS // 2,
        guards=BatchGuards(initial=12),
        switch=SwitchMode(max_micro_batch=12),
        placement=place(1, torch.device("cpu"), 1, shards, replicas),
    )


def trained(
    shards: int, replicas: int, dtype: torch.dtype, inner: Any, native: bool = False
) -> tuple[list[Tensor], float]:
    """Parameters after 50 steps, and bytes inside the island.

    native: True for a device that has instructions for bf16.
    """
    with (
        # Two matrices a stack at most: so an owner has several turns.
        patch.object(whole_matrices, "STACK_ELEMENTS", 2 * WIDTH * INNER),
        patch.object(muon_step, "native_bf16", lambda device: native),
    ):
        run = run_here(shards, replicas, dtype, inner)
        list(run.rounds(2))
    whole = gather_shards(list(run.workers[0].replica.params))
    return [parameter.detach().clone() for parameter in whole], run.placement.total_bytes().inside


def arms(shards: int, replicas: int) -> dict[str, tuple[list[Tensor], float]]:
    split = InnerMuon(lr=0.02, split={"0.weight": [4, 5]})
    return {
        "float32": trained(shards, replicas, torch.float32, InnerMuon(lr=0.02)),
        "bf16": trained(shards, replicas, torch.float32, InnerMuon(lr=0.02), native=True),
        "split": trained(shards, replicas, torch.float64, split),
        "AdamW": trained(shards, replicas, torch.float32, InnerAdamW(lr=0.02)),
        "short": trained(shards, replicas, torch.bfloat16, InnerMuon(lr=0.02), native=True),
    }


@pytest.mark.parametrize(("shards", "replicas"), cases(PLACES, default=("DDP",)))
def test_fifty_steps_and_their_bytes(shards: int, replicas: int) -> None:
    """The parameters are those of one process, also with blocks that cross the borders of shards.
    Beside the bytes of AdamW, shards go to their owner and back, and then to the other replicas.
    """
    one = arms(1, 1)
    ranks = run_on_ranks(arms, shards * replicas, shards, replicas)
    for name, tolerance in (("float32", 1e-5), ("split", 1e-12), ("AdamW", 1e-5)):
        for rank in ranks:
            for mine, theirs in zip(one[name][0], rank[name][0], strict=True):
                torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    for rank in ranks:
        for mine, theirs in zip(ranks[0]["short"][0], rank["short"][0], strict=True):
            assert mine.equal(theirs)
    values = values_that_cross(shards, replicas)
    bytes_inside = {name: inside for name, (_, inside) in ranks[0].items()}
    assert bytes_inside["float32"] - bytes_inside["AdamW"] == 4 * STEPS * values
    assert bytes_inside["bf16"] - bytes_inside["AdamW"] == 2 * STEPS * values


def in_own_loop(of: tuple[int, ...]) -> list[Tensor]:
    """Parameters after three steps in a loop of one's own, sharded over a mesh of this shape."""
    model, ids = MixedLM(), tokens(40, 1).read(0, 0, 4)
    if of:
        names = ("replica", "shard")[-len(of) :]
        fully_shard(model, mesh=init_device_mesh("cpu", of, mesh_dim_names=names))
    optimizers = InnerMuon(lr=0.02)(model)
    for _ in range(3):
        next_token(model, ids).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return gather_shards([*model.parameters()])  # type: ignore[no-any-return]


@pytest.mark.parametrize("of", [(2,), (2, 2)])
def test_a_model_that_others_have_sharded(of: tuple[int, ...]) -> None:
    for rank in run_on_ranks(in_own_loop, math.prod(of), of):
        for mine, theirs in zip(in_own_loop(()), rank, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def values_that_cross(shards: int, replicas: int) -> int:
    """Values that all ranks send in a step of Muon."""
    matrices = [
        parameter
        for name, parameter in MixedLM().named_parameters()
        if parameter.ndim == 2 and name != "embedding.weight"
    ]
    values = 0
    for owner, indices in enumerate(balanced([cost(each) for each in matrices], shards * replicas)):
        for rows, columns in (matrices[index].shape for index in indices):
            most = math.ceil(rows / shards)
            own = min(most, max(0, rows - owner % shards * most))
            values += 2 * (rows - own) * columns + (replicas - 1) * rows * columns
    return values


def moved(shards: int, replicas: int, state: dict[str, Any] | None) -> dict[str, Any]:
    """The state after 25 steps, from that of a run elsewhere."""
    run = run_here(shards, replicas, torch.float64, InnerMuon(lr=0.02))
    if state is not None:
        run.load_state_dict(state)
    list(run.rounds(1))
    return run.state_dict()


@pytest.mark.parametrize(("shards", "replicas"), cases(PLACES, default=("FSDP2",)))
def test_a_checkpoint_goes_from_one_placement_to_another(shards: int, replicas: int) -> None:
    here = moved(1, 1, moved(1, 1, None))
    there, *_ = run_on_ranks(moved, shards * replicas, shards, replicas, moved(1, 1, None))
    back = moved(1, 1, run_on_ranks(moved, shards * replicas, shards, replicas, None)[0])
    for state in (there, back):
        torch.testing.assert_close(state["worker-0"], here["worker-0"], rtol=1e-12, atol=1e-12)


class Doubled:
    """Work that doubles matrices, and knows the stacks in which it was asked to."""

    dtype = torch.float32

    def __init__(self, matrices: list[Tensor]) -> None:
        self.matrices = matrices
        self.stacks: list[tuple[int, ...]] = []

    def given(self, indices: Sequence[int]) -> list[Tensor]:
        return [local(self.matrices[index]) for index in indices]

    def compute(self, stack: Tensor) -> Tensor:
        self.stacks.append(tuple(stack.shape))
        return 2 * stack

    def take(self, indices: Sequence[int], results: Sequence[Tensor]) -> None:
        for index, result in zip(indices, results, strict=True):
            local(self.matrices[index]).copy_(result)


def test_stacks_have_one_shape_and_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two matrices of six elements fit in twelve; one of sixteen does not, and is on its own."""
    monkeypatch.setattr(whole_matrices, "STACK_ELEMENTS", 12)
    shapes = [(2, 3), (4, 4), (2, 3), (2, 3)]
    work = Doubled([torch.full(shape, 1.0 + index) for index, shape in enumerate(shapes)])
    MatrixOwners(Traffic()).do(work)
    assert work.stacks == [(2, 2, 3), (1, 2, 3), (1, 4, 4)]
    assert [float(matrix.mean()) for matrix in work.matrices] == [2.0, 4.0, 6.0, 8.0]


def one_matrix_of_two_ranks(sharded: bool) -> tuple[list[float], list[tuple[int, ...]]]:
    matrix = torch.arange(6.0).view(3, 2)
    if sharded:
        matrix = distribute_tensor(matrix, init_device_mesh("cpu", (2,)), [Shard(0)])
    work, group = Doubled([matrix]), dist.group.WORLD
    MatrixOwners(Traffic(), *((None, group) if sharded else (group, None))).do(work)
    return gather_shards([matrix])[0].flatten().tolist(), work.stacks


@pytest.mark.parametrize("sharded", [False, True], ids=["replicas", "shards"])
def test_a_rank_that_owns_nothing_gets_the_result(sharded: bool) -> None:
    doubled = [2.0 * value for value in range(6)]
    found = run_on_ranks(one_matrix_of_two_ranks, 2, sharded)
    assert found == [(doubled, [(1, 3, 2)]), (doubled, [])]


def test_owners_have_about_equal_work() -> None:
    # Of 3 x 5: its square of 3 x 3 has 3 * 3 * 5 products, that one's 27, and the last 3 * 3 * 5.
    assert cost(torch.empty(3, 5)) == cost(torch.empty(5, 3)) == 45 + 27 + 45
    assert balanced([1, 5, 1, 3, 1, 1], 2) == [[1, 4], [0, 2, 3, 5]]
    assert balanced([1, 1], 3) == [[0], [1], []]
    assert balanced([], 2) == [[], []]
