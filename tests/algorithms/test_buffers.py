"""Buffers of models: which are averaged, what stays as it is, and with what all begin."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import update_bn

from adloco import AdLoCo, BatchGuards, DiLoCo, MergeSmallest, place
from adloco.algorithms.model_state import state_buffers
from adloco.distributed.messages import broadcast_state
from adloco.distributed.testing import run_on_ranks
from tests.problems import Interrupting, cases, linear, make_run, regression


@pytest.mark.parametrize("begin", [float("inf"), torch.finfo(torch.float32).max, 1e9, 1.0])
def test_a_mean_does_not_depend_on_what_was_before(begin: float) -> None:
    """As of a running minimum, which begins at infinity."""
    models = [linear(), linear()]
    for model in models:
        model.register_buffer("low", torch.full((2,), begin))
    diloco = DiLoCo(models, outer=None, sync_every=1)
    for model, value in zip(models, (1e-9, 3e-9), strict=True):
        model.low.fill_(value)  # type: ignore[union-attr, operator]
    diloco.step()
    assert models[0].low.tolist() == pytest.approx([2e-9, 2e-9])  # type: ignore[union-attr, operator]


class Centred(nn.Module):
    """Keeps a mean of what it has seen, in a buffer that each pass replaces or writes into."""

    def __init__(self, *, replaces: bool) -> None:
        super().__init__()
        self.layer, self.replaces = nn.Linear(2, 1), replaces
        self.center: Tensor
        self.register_buffer("center", torch.zeros(2))

    def forward(self, values: Tensor) -> Tensor:
        if self.training:
            mean = 0.5 * self.center + 0.5 * values.mean(0)
            if self.replaces:
                self.center = mean
            else:
                self.center.copy_(mean)
        result: Tensor = self.layer(values - self.center)
        return result


class Taught(nn.Module):
    """Has a teacher that each pass moves a tenth of the way towards the weights."""

    def __init__(self, *, in_buffer: bool) -> None:
        super().__init__()
        self.layer = linear()
        begin: Tensor = self.layer.weight.detach().clone()  # type: ignore[union-attr, operator]
        if in_buffer:
            self.register_buffer("teacher", begin)
        else:
            self.teacher = nn.Parameter(begin, requires_grad=False)

    def forward(self, values: Tensor) -> Tensor:
        if self.training:
            self.teacher.data.lerp_(self.layer.weight.detach(), 0.1)  # type: ignore[arg-type]
        result: Tensor = self.layer(values) + 0.1 * values @ self.teacher.T
        return result


def test_what_training_changes_is_saved_in_a_buffer_and_refused_in_a_frozen_parameter() -> None:
    def build() -> nn.Module:
        return Taught(in_buffer=True)

    run, resumed = make_run(build_model=build), make_run(build_model=build)
    run.round()
    resumed.load_state_dict(run.state_dict())
    run.round()
    resumed.round()
    state, again = (each.model(0).state_dict() for each in (run, resumed))
    assert all(state[name].equal(again[name]) for name in state)
    assert not state["teacher"].equal(build().state_dict()["teacher"])
    with pytest.raises(ValueError, match="frozen parameters of worker 0 have changed in training"):
        make_run(build_model=lambda: Taught(in_buffer=False)).round()


@pytest.mark.parametrize("replaces", [False, True])
def test_buffers_that_a_pass_replaces_are_averaged_and_saved(replaces: bool) -> None:
    """By hand: means of 0.5 and 1.5 after a pass over ones and threes."""
    models = [Centred(replaces=replaces), Centred(replaces=replaces)]
    diloco = DiLoCo(models, outer=None, sync_every=1)
    for model, value in zip(models, (1.0, 3.0), strict=True):
        model(torch.full((4, 2), value))
    diloco.step()
    assert [model.center.tolist() for model in models] == [[1.0, 1.0], [1.0, 1.0]]
    saved = {key: value for key, value in diloco.state_dict().items() if key == "outer"}
    assert saved["outer"]["buffers"][0].tolist() == [1.0, 1.0]


def test_buffers_that_change_their_shape_are_refused() -> None:
    """As those of observers in quantisation-aware training do in their first pass."""
    models = [linear(), linear()]
    for model in models:
        model.register_buffer("low", torch.zeros(1))
    diloco = DiLoCo(models, outer=None, sync_every=1)
    models[1].low = torch.zeros(4)
    with pytest.raises(ValueError, match=r"one of shape \(1,\) has \(4,\) now; if the first pass"):
        diloco.step()


def test_a_wrapper_hides_no_buffers() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wrapped = nn.Sequential(plain[0], checkpoint_wrapper(plain[1]))
    for floating, number in ((True, 2), (False, 1)):
        buffers = [state_buffers(model, floating=floating) for model in (plain, wrapped)]
        assert [[*map(id, each)] for each in buffers] == 2 * [[*map(id, buffers[0])]]
        assert len(buffers[0]) == number
    plain[1].register_buffer("cache", torch.zeros(2), persistent=False)
    plain[0].register_buffer("shared", plain[1].running_mean)  # type: ignore[arg-type]
    assert len(state_buffers(wrapped, floating=True)) == 2


CONSTANT = (
    lambda: torch.full((2,), torch.finfo(torch.float32).min),
    lambda: torch.full((2,), -60000.0, dtype=torch.float16),
    lambda: torch.arange(1000.0),
    lambda: torch.full((3, 3), float("-inf")).triu(1),
)
"""Masks, whole numbers, and others that no worker changes."""


def test_equal_values_stay_as_they_are_in_a_merge() -> None:
    def build() -> nn.Module:
        model = linear()
        for number, make in enumerate(CONSTANT):
            model.register_buffer(f"constant{number}", make())
        return model

    run = make_run(
        build_model=build, num_trainers=3, policy=MergeSmallest(count=3, every=1, first_round=1)
    )
    report = run.round()
    assert report is not None and report.merges
    for buffer, make in zip(run.model(0).buffers(), CONSTANT, strict=True):
        assert torch.equal(buffer, make())


@pytest.mark.parametrize("workers", [3, 10])
@pytest.mark.parametrize("make", CONSTANT)
def test_equal_values_stay_as_they_are(make: Callable[[], Tensor], workers: int) -> None:
    models = [linear() for _ in range(workers)]
    for model in models:
        model.register_buffer("constant", make())
    diloco = DiLoCo(models, outer=None, sync_every=1)
    for _ in range(2):
        diloco.step()
    for model in models:
        assert torch.equal(model.constant, make())  # type: ignore[arg-type]


def averaged_by_two_replicas() -> list[list[float]]:
    placement = place(1, replica_size=2)
    buffers = [make() for make in CONSTANT] + [torch.tensor([float(placement.rank)])]
    placement.engine(linear()).average(buffers)
    return [buffer.tolist() for buffer in buffers]


def test_replicas_average_what_differs_alone() -> None:
    expected = [make().tolist() for make in CONSTANT] + [[0.5]]
    assert run_on_ranks(averaged_by_two_replicas, 2) == [expected, expected]


def random_features(seed: int) -> nn.Module:
    model, generator = linear(), torch.Generator().manual_seed(seed)
    features = torch.randn(3, generator=generator)
    model.register_buffer("features", features, persistent=False)
    # One value for all, in which nothing can be written.
    model.register_buffer("repeated", torch.zeros(1).expand(5), persistent=False)
    return model


def features_of_ranks() -> list[list[float]]:
    placement = place(2)
    alone, both = random_features(placement.rank), random_features(placement.rank)
    DiLoCo(alone, sync_every=1, placement=placement)
    placement.broadcast_model(both)
    return [alone.features.tolist(), both.features.tolist()]  # type: ignore[union-attr, operator]


def test_all_begin_with_the_buffers_of_the_first_those_outside_of_the_state_too() -> None:
    models = [random_features(seed) for seed in range(3)]
    DiLoCo(models, sync_every=1)
    first = random_features(0).features
    for model in models:
        assert torch.equal(model.features, first)  # type: ignore[arg-type]
    assert run_on_ranks(features_of_ranks, 2) == 2 * [2 * [first.tolist()]]  # type: ignore[union-attr, operator]


def test_statistics_that_were_taken_again_after_a_sync_are_in_a_state() -> None:
    """`update_bn` sets them to those of its batches: means of 1 and 3, one for each worker."""

    def begin() -> tuple[list[nn.Module], DiLoCo]:
        models: list[nn.Module] = [nn.BatchNorm1d(2), nn.BatchNorm1d(2)]
        return models, DiLoCo(models, outer=None, sync_every=1)

    models, diloco = begin()
    diloco.step()
    for model, value in zip(models, (1.0, 3.0), strict=True):
        update_bn([torch.full((4, 2), value)], model)
    resumed, again = begin()
    for model, before in zip(resumed, models, strict=True):
        model.load_state_dict(before.state_dict())
    again.load_state_dict(diloco.state_dict())
    assert [model.running_mean.tolist() for model in resumed] == [[1, 1], [3, 3]]  # type: ignore[union-attr, operator]


def stopped_within_a_round(shards: int, replicas: int) -> list[list[float]]:
    """Running means after a round of five steps, with and without a stop and a resume in it."""

    def make() -> tuple[AdLoCo, Interrupting]:
        source = Interrupting(regression(1))
        run = make_run(
            build_model=lambda: nn.Sequential(nn.BatchNorm1d(3), linear()),
            data=source,
            workers_per_trainer=1,
            sync_every=5,
            guards=BatchGuards(initial=16),
            placement=place(1, "cpu", 1, shards, replicas),
        )
        return run, source

    (undisturbed, _), (stopped, source), (resumed, _) = make(), make(), make()
    undisturbed.round()
    source.before(3, stopped.stop)
    assert stopped.round() is None
    state = broadcast_state(stopped.state_dict(), 0)
    resumed.load_state_dict(state)
    for run in (stopped, resumed):
        assert run.round() is not None
    return [
        [value for buffer in run.workers[0].replica.buffers for value in buffer.tolist()]
        for run in (undisturbed, stopped, resumed)
    ]


@pytest.mark.parametrize(
    ("shards", "replicas"), cases({"DDP": (1, 2), "FSDP2": (2, 1)}, default=("FSDP2",))
)
def test_a_stop_within_a_round_changes_no_bit_of_running_statistics(
    shards: int, replicas: int
) -> None:
    """Each rank of a worker has them of its own samples."""
    one, other = run_on_ranks(stopped_within_a_round, 2, shards, replicas)
    undisturbed, stopped, resumed = one
    assert stopped == undisturbed
    assert resumed == undisturbed
    assert other == one
    assert any(undisturbed)
