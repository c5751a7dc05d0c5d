"""`DiLoCo` in loops of one's own whose workers are on several ranks, or have ids of their own."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from adloco import DiLoCo, NonFiniteLossError, OuterOptimizer, Streaming, place
from adloco.distributed.dtensor import gather_shards
from adloco.distributed.testing import run_on_ranks
from tests.problems import BlockLM, linear, next_token, tokens


def of_named_workers() -> tuple[list[float], str]:
    """Workers 0 and 2, which move by their ids; worker 1 was dropped."""
    model, placement = linear(), place([0, 2])
    diloco = DiLoCo(model, outer=None, sync_every=1, placement=placement)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    (worker,) = placement.local([0, 2])
    for parameter in model.parameters():
        parameter.data.add_(float(worker))
    diloco.step()
    moved = [now.detach() - was for now, was in zip(model.parameters(), before, strict=True)]
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    with pytest.raises(NonFiniteLossError) as named:
        diloco.step()
    return torch.cat([each.flatten() for each in moved]).tolist(), str(named.value)


def test_workers_keep_their_ids_where_others_were_dropped() -> None:
    for worker, (moved, named) in zip((0, 2), run_on_ranks(of_named_workers, 2), strict=True):
        assert moved == pytest.approx([1.0] * 4)
        assert f"worker {worker}, inner step 2" in named


def diverged(folder: str, loads: bool) -> list[float]:
    """Parameters of this rank's worker after a round; worker 1 is dropped then."""
    ids, model = [0, 2] if loads else [0, 1, 2], linear()
    placement = place(ids)
    (worker,) = placement.local(ids)
    streaming = Streaming(tau=1)  # The worker's own steps since then stay a part of it.
    diloco = DiLoCo(model, sync_every=2, streaming=streaming, placement=placement)
    if loads:
        diloco.load_state_dict(torch.load(f"{folder}/{worker}", weights_only=True))
    else:
        for _ in range(2):
            for parameter in model.parameters():
                parameter.data.add_(worker + 1.0)
            diloco.step()
        torch.save(diloco.state_dict(), f"{folder}/{worker}")
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def test_workers_that_are_left_keep_what_they_have_not_sent(tmp_path: Path) -> None:
    saved = run_on_ranks(diverged, 3, str(tmp_path), False)
    assert len({own[0] for own in saved}) == 3
    assert run_on_ranks(diverged, 2, str(tmp_path), True) == [saved[0], saved[2]]


def counted(folder: str, size: int) -> float:
    """A round of two steps, of which each worker moves by its own number from 1.

    size: Ranks of a worker; one alone loads what the first one had after a step.
    """
    worker, position = divmod(dist.get_rank(), size)
    model = linear()
    placement = place(2, replica_size=size)
    diloco = DiLoCo(model, outer=None, sync_every=2, placement=placement)
    if size == 1:
        diloco.load_state_dict(torch.load(f"{folder}/{worker}", weights_only=True))
    for step in range(2 - size, 2):  # One rank takes the second step.
        for parameter in model.parameters():
            parameter.data.add_(worker + 1.0)
        diloco.step([[[1, 9], [5, 5]][worker][position] if step == 0 else 10 / size])
        state = diloco.state_dict()
        if step == position == 0:
            torch.save(copy.deepcopy(state), f"{folder}/{worker}")
    return float((model.weight - linear().weight).detach().mean())  # type: ignore[operator]


def test_samples_of_all_ranks_of_a_worker_are_in_its_state(tmp_path: Path) -> None:
    """By hand: each worker sees 20, and they move by 2 and 4."""
    assert run_on_ranks(counted, 4, str(tmp_path), 2) == pytest.approx([3.0] * 4)
    assert run_on_ranks(counted, 2, str(tmp_path), 1) == pytest.approx([3.0] * 2)


def of_fractions(saves: bool) -> list[float]:
    """Parameters after a round whose samples are fractions, with a save and a load in it or not."""
    model, rank = linear(), dist.get_rank()
    diloco = DiLoCo(model, outer=None, sync_every=4, placement=place(2, replica_size=2))
    for step in range(4):
        for parameter in model.parameters():
            parameter.data.add_(rank // 2 + 1.0)
        diloco.step([[0.1, 0.7, 0.3][(rank + step) % 3] / (step + 1)])
        if saves and step == 1:
            diloco.load_state_dict(copy.deepcopy(diloco.state_dict()))
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def test_samples_that_are_no_whole_numbers_keep_their_bits() -> None:
    assert run_on_ranks(of_fractions, 4, True) == run_on_ranks(of_fractions, 4, False)


def moved_on(folder: str, before: str, moves: list[float]) -> float:
    """A round on islands of two shards, of which each worker moves by its own number.

    before: Files of the state, by shard; "" for a new loop.
    """
    workers, rank = dist.get_world_size() // 2, dist.get_rank()
    mesh = init_device_mesh("cpu", (workers, 2), mesh_dim_names=("worker", "inner"))["inner"]
    model = fully_shard(linear(), mesh=mesh)
    outer = OuterOptimizer(lr=1.0, options={"momentum": 0.5})
    placement = place(workers, shard_size=2)
    diloco = DiLoCo(model, outer=outer, sync_every=1, placement=placement)
    if before:
        diloco.load_state_dict(torch.load(f"{folder}/{before}-{rank % 2}", weights_only=True))
    for parameter in model.parameters():
        parameter.data.add_(moves[rank // 2])
    diloco.step()
    if rank >= dist.get_world_size() - 2:  # The last island is the one that will be left.
        torch.save(diloco.state_dict(), f"{folder}/{workers}-{rank % 2}")
    (weight, _) = gather_shards([parameter.detach() for parameter in model.parameters()])
    return float((weight - linear().weight).detach().mean())  # type: ignore[operator]


def test_an_island_of_shards_is_lost_and_returns(tmp_path: Path) -> None:
    """By hand: the mean moves by 1.5, 2 and 1, on each of which half of the last step follows.

    A saved shard has the mesh of its ranks, and there are others each time.
    """
    folder = str(tmp_path)
    assert run_on_ranks(moved_on, 4, folder, "", [1.0, 2.0]) == pytest.approx([1.5] * 4)
    left = run_on_ranks(moved_on, 2, folder, "2", [2.0])
    assert left == pytest.approx([1.5 + 2.75] * 2)
    assert run_on_ranks(moved_on, 4, folder, "1", [0.5, 1.5]) == pytest.approx([6.625] * 4)


def shards_for_replicas() -> str:
    model = fully_shard(linear())
    with pytest.raises(ValueError) as refused:
        DiLoCo(model, sync_every=1, placement=place(1, replica_size=2))
    return str(refused.value)


def test_shards_of_a_lone_worker_are_no_replicas() -> None:
    """Its ranks would compare unlike shards at the first sync, which ends them if one is longer."""
    for refused in run_on_ranks(shards_for_replicas, 2):
        assert refused.startswith("ranks 0 and 1 must have the same part of weight, but have shard")
        assert "give place() the shard_size of your mesh" in refused


def evaluated(asked: bool) -> tuple[list[float], list[float]]:
    """Sums of the parameters after five steps, and of those after the third one once again.

    asked: Passes without a backward pass around all calls of DiLoCo; before `optimizer.step()` they
        would make the next step, by torch itself, begin where this one did.
    """
    model, data = BlockLM().float(), tokens(200, 2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for part in (*model.blocks, model):
        fully_shard(part, mp_policy=policy, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def ask() -> None:
        if asked:
            with torch.no_grad():
                model(torch.zeros(1, 4, dtype=torch.long))

    def train(steps: range) -> list[float]:
        for step in steps:
            next_token(model, data.read(dist.get_rank(), 4 * step, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
            ask()
            diloco.step()
            ask()
        return [float(each.sum()) for each in gather_shards([*model.state_dict().values()])]

    ask()
    diloco = DiLoCo(model, sync_every=2, placement=place(1, shard_size=2))
    ask()
    train(range(3))
    state = copy.deepcopy(diloco.state_dict())
    ask()
    first = train(range(3, 5))
    ask()
    diloco.load_state_dict(state)
    return first, train(range(3, 5))


def test_a_loop_may_evaluate_between_steps_although_shards_are_gathered_then() -> None:
    """FSDP2 leaves them gathered, in the type that it computes in, which a state once saved."""
    (plain, again), _ = run_on_ranks(evaluated, 2, False)
    assert plain == again
    assert run_on_ranks(evaluated, 2, True) == [(plain, plain)] * 2
