"""Tensors of several data types in one reduction: half-precision weights and float32 norms, which
are added up in float32 alike, and must not share the memory of their buckets.
"""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

from adloco import DiLoCo, InnerAdamW, Int4, MergeFates, MergeSmallest, OuterMemory
from adloco.distributed.comm.comm import Comm
from adloco.distributed.comm.sum_islands import Islands
from adloco.distributed.launch.launcher import place
from adloco.distributed.testing import run_on_ranks
from adloco.distributed.traffic import Traffic
from tests.distributed.comm.test_compressed import FORMATS
from tests.problems import cases, make_run, outer_sgd, round_with_ends

TYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float64)


class TwoTypes(nn.Module):
    """A bf16 layer, a float32 norm whose parameters come first, and a buffer of each type."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm = nn.LayerNorm(3)
        self.wide = nn.Linear(3, 40).to(torch.bfloat16)
        self.head = nn.Linear(40, 1)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("rounds_seen", torch.zeros(2, dtype=torch.bfloat16))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.wide(self.norm(inputs).to(self.wide.weight.dtype)))
        if self.training:
            self.seen += inputs.detach().mean()
            self.rounds_seen += 1
        result: Tensor = self.head(hidden.float())
        return result


def mixed(worker: int) -> list[Tensor]:
    """Tensors of four types, whose values are the worker's number plus their own."""
    return [
        torch.full((5 + index,), 10.0 * index + worker).to(TYPES[index % 4]) for index in range(8)
    ]


def test_means_of_several_types() -> None:
    means = Comm(Islands(workers=[2], traffic=Traffic())).mean([mixed(1), mixed(3)], [0.5, 0.5])
    assert [mean.tolist() for mean in means] == [[10.0 * k + 2] * (5 + k) for k in range(8)]


def means_on_ranks() -> list[list[float]]:
    placement = place(4, torch.device("cpu"), 1)
    here = placement.local(range(4))
    means = placement.comm(range(4)).mean([mixed(worker) for worker in here], [0.25] * len(here))
    # A whole tensor and a smaller sharded one.
    mesh = init_device_mesh("cpu", (placement.num_ranks,))
    given = [torch.ones(9), distribute_tensor(torch.zeros(4), mesh, [Shard(0)])]
    means.append(Comm(Islands(workers=[1], traffic=Traffic())).mean([given], [1.0])[0])
    return [mean.tolist() for mean in means]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_means_of_several_types_on_ranks(ranks: int) -> None:
    expected = [*([10.0 * k + 1.5] * (5 + k) for k in range(8)), [1.0] * 9]
    assert run_on_ranks(means_on_ranks, ranks) == [expected] * ranks


SENT = (*TYPES, torch.float8_e4m3fn, torch.bool, torch.int16, torch.uint16, torch.complex64)


def sent_to_ranks(workers: int, replicas: int) -> list[list[complex]]:
    placement = place(workers, torch.device("cpu"), replica_size=replicas)
    (here,) = placement.local(range(workers))
    tensors = [torch.tensor([0, here == 0, 1]).to(dtype) for dtype in SENT]
    received = placement.comm(range(workers)).broadcast(tensors, 0, range(1, workers))
    assert [tensor.dtype for tensor in received] == [*SENT]
    return [tensor.to(torch.complex64).tolist() for tensor in received]


@pytest.mark.parametrize(
    ("workers", "replicas"), cases({"workers": (2, 1), "DDP": (2, 2)}, ["DDP"])
)
def test_a_worker_s_tensors_of_any_type_reach_others(workers: int, replicas: int) -> None:
    """Those of frozen weights in 8 bits, for instance, which gloo does not know."""
    expected = [[0, 1, 1]] * len(SENT)
    ranks = workers * replicas
    assert run_on_ranks(sent_to_ranks, ranks, workers, replicas) == [expected] * ranks


def parts_on_ranks(diloco: bool) -> list[list[float]]:
    placement = place(2, torch.device("cpu"))
    (here,) = placement.local(range(2))
    own = torch.full((3,), here + 1.0)
    model = nn.Linear(2, 1)
    model.quantised = nn.Parameter(TwoTensor(own, 10 * own), requires_grad=False)
    if diloco:
        DiLoCo(model, sync_every=1, placement=placement)
    else:
        placement.broadcast_model(model)
    weight: Any = model.quantised
    return [weight.a.tolist(), weight.b.tolist()]


@pytest.mark.parametrize("diloco", [True, False])
def test_the_parts_of_a_frozen_weight_are_those_of_the_first_worker(diloco: bool) -> None:
    """Such as the integers and the scales of a quantised one, which is one tensor to torch."""
    assert run_on_ranks(parts_on_ranks, 2, diloco) == [[[1.0] * 3, [10.0] * 3]] * 2


@pytest.mark.parametrize("name", FORMATS)
def test_each_type_is_sent_as_if_it_were_alone(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    workers = [
        [torch.randn(300 + index, generator=generator).to(TYPES[index % 2]) for index in range(4)]
        for _ in range(3)
    ]
    wire, _ = FORMATS[name]
    weights = [0.5, 0.3, 0.2]
    together = Comm(Islands(workers=[3], traffic=Traffic())).mean(workers, weights, wire)
    for kind in (0, 1):
        alone = Comm(Islands(workers=[3], traffic=Traffic())).mean(
            [own[kind::2] for own in workers], weights, wire
        )
        for mine, other in zip(together[kind::2], alone, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)


def run_of(**changes: Any) -> Any:
    return make_run(**{"build_model": TwoTypes, "inner": InnerAdamW(lr=0.02)} | changes)


def test_an_outer_step_by_hand() -> None:
    """x - 0.5 (x - mean of the workers), each parameter in float32."""
    run = run_of(outer=outer_sgd(0.5))
    before = [each.detach().clone() for each in run.trainers[0].outer.global_params]
    _, ends = round_with_ends(run)
    sizes = [each.numel() for each in before]
    for start, now, one, two in zip(
        before,
        run.trainers[0].outer.global_params,
        *(torch.split(end, sizes) for end in ends),
        strict=True,
    ):
        mean = (one.double() + two.double()).view_as(start) / 2
        expected = start - 0.5 * (start - mean.float())
        torch.testing.assert_close(now, expected, rtol=0, atol=1e-6)
        assert (now - start).abs().max() > 0
    assert run.trainers[0].outer.buffers[1].tolist() == [3.0, 3.0]


def losses(build: Any = TwoTypes, inner_state: str = "mean") -> list[float]:
    fates = MergeFates(inner_state=inner_state)  # type: ignore[arg-type]
    run = run_of(
        build_model=build,
        num_trainers=2,
        outer=outer_sgd(0.7, 0.6, True),
        merge=MergeSmallest(every=1, first_round=2),
        fates=fates,
    )
    return [report.train_loss for report in run.rounds(6)]


@pytest.mark.parametrize("inner_state", ["keep", "mean", "reset"])
def test_a_merge_leaves_the_course_of_the_loss(inner_state: str) -> None:
    """A bf16 layer loses about what the same model loses in float32, before and after a merge."""
    single = losses(lambda: TwoTypes().float(), inner_state)
    assert losses(TwoTypes, inner_state) == pytest.approx(single, rel=0.05)


def merging_run(changes: Mapping[str, Any], **more: Any) -> Any:
    told = {"num_trainers": 2, "outer": outer_sgd(0.7, 0.6, True)}
    return run_of(**told | {"merge": MergeSmallest(every=1, first_round=2)} | changes | more)


def params_on_ranks(changes: Mapping[str, Any]) -> list[list[float]]:
    run = merging_run(changes, placement=place(4, torch.device("cpu"), 1))
    list(run.rounds(3))
    (trainer,) = run.trainers.values()
    return [each.detach().flatten().tolist() for each in trainer.outer.global_params]


@pytest.mark.parametrize(
    ("changes",),
    cases(
        {
            "fp32": ({},),
            **{
                name: ({"wire": wire, "feedback": feedback},)
                for name, (wire, feedback) in FORMATS.items()
            },
            "survivor": ({"fates": MergeFates(parameters="survivor", outer_momentum="survivor")},),
            "mean": ({"fates": MergeFates(inner_state="mean"), "wire": Int4()},),
            "on host": ({"memory": OuterMemory(on_host=True), "wire": Int4()},),
        },
        default=("int1", "mean"),
    ),
)
def test_the_same_on_two_ranks(changes: dict[str, Any]) -> None:
    """Every format with its feedback, every merge fate, and every place of the global parameters:
    the bits of one process, and the losses of a float32 model.
    """
    run, single = merging_run(changes), merging_run(changes, build_model=lambda: TwoTypes().float())
    found, expected = ([row.train_loss for row in each.rounds(3)] for each in (run, single))
    assert found == pytest.approx(expected, rel=0.05)
    (trainer,) = run.trainers.values()
    params = [each.flatten().tolist() for each in trainer.outer.global_params]
    first, _ = run_on_ranks(params_on_ranks, 2, changes)
    assert first == params
