"""Outer steps of models in bf16 and fp16: they move, and small steps are not lost to rounding."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from adloco import (
    AdLoCo,
    Bf16,
    DiLoCo,
    Feedback,
    InnerAdamW,
    InnerMuon,
    Int1,
    Int2,
    Int4,
    Int8,
    OuterOptimizer,
    Streaming,
    place,
)
from adloco.algorithms.model_state import Replica
from adloco.distributed.comm.comm import Comm
from adloco.distributed.comm.sum_islands import Islands
from adloco.distributed.dtensor import gather_shards
from adloco.distributed.testing import run_on_ranks
from adloco.distributed.traffic import Traffic
from adloco.rules.sync_schedule import SyncEvent
from tests.problems import cases, make_run, outer_sync, regression, squared_error, sync_all

HALF = [torch.bfloat16, torch.float16]
NESTEROV = OuterOptimizer(lr=0.7, options={"momentum": 0.9, "nesterov": True})


@pytest.mark.parametrize("dtype", [*HALF, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop"])
def test_an_outer_step_moves_every_element_in_every_type(name: str, dtype: torch.dtype) -> None:
    """The step matches one in float64, for sizes around the blocks of vectorised kernels."""
    # Large enough that eps of Adam does not round to zero in float16, and steps are not rounded
    # away.
    start = torch.linspace(1.0, 2.0, 67, dtype=torch.float64)
    worker = start - 0.5
    options = {"momentum": 0.9, "nesterov": True} if name == "SGD" else {"eps": 1e-4}
    factory = OuterOptimizer(optimizer=name, lr=0.5, options=options)
    # Old releases of torch have no fused Adagrad for GPUs.
    fused = bool(factory([torch.zeros(1)]).defaults.get("fused"))
    assert fused == (name in ("SGD", "Adam", "AdamW"))
    exact = outer_sync([start], factory)
    mine = outer_sync([start.to(dtype)], factory)
    for outer, own in ((exact, worker), (mine, worker.to(dtype))):
        sync_all(outer, [[own.clone()]], [1.0], Comm(Islands(workers=[1], traffic=Traffic())))
    tolerance = 2e-2 if dtype in HALF else 1e-6
    torch.testing.assert_close(
        mine.global_params[0].detach().double(),
        exact.global_params[0].detach(),
        rtol=tolerance,
        atol=tolerance,
    )
    assert mine.global_params[0].dtype == torch.promote_types(dtype, torch.float32)


def test_small_outer_steps_add_up_in_float32() -> None:
    # 1 - 2^-8 and 1 are neighbours in bf16. Each worker moves by 2^-8, which an outer rate of 1/16
    # makes 2^-12: 16 rounds make 2^-8. In bf16 each of them would round back to 1.
    outer = outer_sync(
        [torch.ones(40, dtype=torch.bfloat16)], OuterOptimizer(lr=1 / 16, options={})
    )
    for _ in range(16):
        start = outer.global_params[0].detach().bfloat16()
        sync_all(outer, [[start - 2**-8]], [1.0], Comm(Islands(workers=[1], traffic=Traffic())))
    assert bool((outer.global_params[0].detach() < 1 - 0.9 * 2**-8).all())


@pytest.mark.parametrize("wire", [None, Int8()], ids=["plain", "int8"])
def test_a_worker_that_has_not_moved_moves_nothing(wire: Any) -> None:
    """Digits that only the float32 global parameters have do not count as a pseudo-gradient."""
    outer = outer_sync(
        [torch.zeros(50, dtype=torch.bfloat16)], OuterOptimizer(lr=1.0, options={}), wire=wire
    )
    with torch.no_grad():
        outer.global_params[0].copy_(torch.linspace(1, 2, 50) + 1e-4)
    before = outer.global_params[0].detach().clone()
    workers = [[before.bfloat16()], [before.bfloat16()]]
    sync_all(outer, workers, [0.5, 0.5], Comm(Islands(workers=[2], traffic=Traffic())))
    assert outer.global_params[0].detach().equal(before)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("wire", [Bf16(), Int8(), Int4(), Int2(), Int1()], ids=str)
def test_feedback_loses_nothing_to_rounding(wire: Any, workers: int, dtype: torch.dtype) -> None:
    """With a factor of 1 and the plain mean as outer step, the global parameters and what workers
    have not sent add up to all their progress.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(700, generator=generator).to(dtype)
    feedback = Feedback(feedback="params", feedback_decay=1.0)
    outer = outer_sync([start], None, wire=wire, feedback=feedback)
    replicas = [
        Replica(names=["a"], params=[start.clone()], buffers=[], residuals=[torch.zeros(700)])
        for _ in range(workers)
    ]
    progress = torch.zeros(700, dtype=torch.float64)
    shares = [1 / workers] * workers
    for _ in range(25):
        for replica in replicas:
            before = replica.params[0].double()
            replica.params[0].add_((0.02 * torch.randn(700, generator=generator)).to(dtype))
            progress += (replica.params[0].double() - before) / workers
        event = SyncEvent(step=0, kind="sync", fragment=0)
        outer.sync(event, replicas, shares, Comm(Islands(workers=[workers], traffic=Traffic())))
    end = outer.global_params[0].detach().double()
    unsent = sum(
        end.to(dtype).double() - replica.params[0].double() + replica.residuals[0].double()
        for replica in replicas
    )
    torch.testing.assert_close(end - unsent / workers, start + progress, rtol=0, atol=2e-6)


def test_the_mean_of_half_precision_tensors_is_taken_in_float32() -> None:
    # In bf16, 1 + 2^-9 is 1, four times over.
    entries = [
        [torch.tensor([1.0], dtype=torch.bfloat16)],
        *[[torch.tensor([2.0**-7], dtype=torch.bfloat16)]] * 4,
    ]
    (mean,) = Comm(Islands(workers=[5], traffic=Traffic())).mean(
        entries, [1.0, 0.25, 0.25, 0.25, 0.25]
    )
    assert mean.dtype == torch.float32
    assert mean.tolist() == [1 + 2**-7]


def half_linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 1)).bfloat16()


def train_in_bf16(
    shards: int = 1, replicas: int = 1, workers: int = 2, streaming: bool = False
) -> dict[str, Any]:
    """Global parameters and the losses of ten rounds of a model in bf16."""
    run = make_run(
        build_model=half_linear,
        loss_fn=lambda model, batch: squared_error(
            lambda x: model(x).float(), (batch[0].bfloat16(), batch[1])
        ),
        inner=lambda model: [
            torch.optim.SGD(model.parameters(), lr=0.05, fused=False, foreach=False)
        ],
        outer=NESTEROV,
        data=regression(workers),
        workers_per_trainer=workers,
        sync_every=4,
        streaming=Streaming(fragments=2, tau=1, alpha=0.0) if streaming else Streaming(),
        placement=place(workers, "cpu", 1, shards, replicas),
    )
    losses = [report.train_loss for report in run.rounds(10)]
    whole = gather_shards(list(run.trainers[0].outer.global_params))
    return {"losses": losses, "params": torch.cat([tensor.detach().flatten() for tensor in whole])}


def stepped(sharded: bool) -> list[Tensor]:
    """A bf16 matrix, and what rounding took off it, after seven small steps."""
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(7, 5, generator=generator).bfloat16() for _ in range(8))
    mesh = init_device_mesh("cpu", (2,)) if sharded else None

    def placed(tensor: Tensor) -> Tensor:
        return distribute_tensor(tensor, mesh, [Shard(0)]) if mesh else tensor

    parameter = nn.Parameter(placed(start))
    optimizer = InnerAdamW(lr=1e-3).build([parameter])
    for gradient in gradients:
        parameter.grad = placed(gradient)
        optimizer.step()
    return gather_shards([parameter.detach(), optimizer.state[parameter]["lost"]])


def test_shards_take_the_same_steps() -> None:
    whole = stepped(False)
    assert bool(whole[1].any())
    for rank in run_on_ranks(stepped, 2, True):
        assert all(mine.equal(one) for mine, one in zip(rank, whole, strict=True))


@pytest.mark.parametrize("inner", [InnerAdamW(lr=1e-3), InnerMuon(lr=1e-3)], ids=["adamw", "muon"])
@pytest.mark.parametrize("wire", [None, Int1(block=16)], ids=str)
def test_what_rounding_took_off_is_resumed(inner: Any, wire: Any) -> None:
    """Stopped within a round, to the last bit; with a lossy format residuals have what it took."""

    def fresh() -> AdLoCo:
        return make_run(
            build_model=half_linear,
            loss_fn=lambda model, batch: squared_error(
                lambda x: model(x).float(), (batch[0].bfloat16(), batch[1])
            ),
            inner=inner,
            outer=NESTEROV,
            data=regression(2),
            sync_every=7,
            wire=wire,
        )

    whole, stopped = fresh(), fresh()
    list(whole.rounds(4))
    list(stopped.rounds(1))
    stopped.stop()
    assert stopped.round() is None
    resumed = fresh()
    resumed.load_state_dict(copy.deepcopy(stopped.state_dict()))
    list(resumed.rounds(3))
    models = whole.workers[0].model, resumed.workers[0].model
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert one.equal(other)
    state = resumed.workers[0].optimizers[0].state
    assert any(bool(each["lost"].any()) for each in state.values())


def test_what_rounding_left_is_dropped_with_what_was_not_sent() -> None:
    """Replicas that have the global parameters, and have not moved since, move nothing."""
    models = [half_linear() for _ in range(2)]
    plain = OuterOptimizer(lr=1.0, options={})
    diloco = DiLoCo(models, outer=plain, sync_every=1, wire=Int1(block=16))
    generator = torch.Generator().manual_seed(0)
    for parameter in nn.ModuleList(models).parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator).bfloat16()
    diloco.step()
    diloco.load_global()
    before = copy.deepcopy(diloco.state_dict()["outer"]["params"])
    diloco.step()
    for now, was in zip(diloco.state_dict()["outer"]["params"], before, strict=True):
        assert now.equal(was)


def test_bf16_replicas_are_not_mixed() -> None:
    """Steps below a spacing would be rounded away by each mix, of a part of the model, too."""
    model = nn.Sequential(half_linear(), nn.Linear(1, 1))
    with pytest.raises(ValueError, match="streaming.alpha 0.5 mixes parameters of two bytes"):
        DiLoCo([model], sync_every=4, streaming=Streaming(fragments=2, tau=1))


@pytest.mark.parametrize("streaming", [False, True], ids=["plain", "streaming"])
def test_a_bf16_model_learns(streaming: bool) -> None:
    trained = train_in_bf16(streaming=streaming)
    assert trained["params"].dtype == torch.float32
    assert trained["losses"][-1] < 0.3 * trained["losses"][0]


@pytest.mark.parametrize(
    ("ranks", "shards", "replicas"),
    cases(
        {
            "two ranks": (2, 1, 1),
            "shards": (2, 2, 1),
            "replicas": (2, 1, 2),
            "islands of shards": (4, 2, 1),
            "islands of replicas": (4, 1, 2),
            "HSDP": (4, 2, 2),
        },
        default=("two ranks", "shards"),
    ),
)
def test_a_bf16_model_learns_the_same_on_every_placement(
    ranks: int, shards: int, replicas: int
) -> None:
    expected = train_in_bf16()
    for placed in run_on_ranks(train_in_bf16, ranks, shards, replicas):
        # Gradients of bf16 models are added up in bf16, in an order that depends on the placement.
        torch.testing.assert_close(placed["params"], expected["params"], rtol=0.05, atol=0.05)
        assert placed["losses"] == pytest.approx(expected["losses"], rel=0.1)


class Mixed(nn.Module):
    """A frozen parameter, a running mean and a count, beside one that is trained."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.full((2,), value))
        self.frozen = nn.Parameter(torch.full((3,), value), requires_grad=False)
        self.register_buffer("mean", torch.full((2,), value))
        self.register_buffer("count", torch.tensor(int(value)))


def everything(model: nn.Module) -> list[Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


def test_replicas_of_a_loop_begin_alike_frozen_parameters_and_counts_too() -> None:
    models = [Mixed(1.0), Mixed(2.0), Mixed(3.0)]
    DiLoCo(models, outer=None, sync_every=1)
    for model in models[1:]:
        assert all(
            a.equal(b) for a, b in zip(everything(model), everything(models[0]), strict=True)
        )


def alike_on_ranks() -> list[Tensor]:
    placement = place(3)
    models = [Mixed(float(worker + 1)) for worker in placement.local(range(3))]
    DiLoCo(models, outer=None, sync_every=1, placement=placement)
    return [tensor for model in models for tensor in everything(model)]


def test_replicas_on_ranks_begin_alike() -> None:
    start = everything(Mixed(1.0))
    for held in run_on_ranks(alike_on_ranks, 2):
        for index, tensor in enumerate(held):
            assert tensor.equal(start[index % len(start)])
