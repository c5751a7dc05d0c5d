"""Numbers that are not finite: what a worker leaves out, from where it starts again, and what stops
the run; against a loop of one's own.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adloco import (
    AdLoCo,
    BatchGuards,
    NonFiniteLossError,
    NormTest,
    TensorSource,
)
from adloco.algorithms.model_state import Replica
from adloco.algorithms.optimizer_state import optimizer_tensors
from adloco.distributed.dtensor import gather_shards
from adloco.distributed.launch.launcher import place
from adloco.distributed.testing import run_on_ranks
from adloco.distributed.wire.int2 import Int2
from tests.problems import (
    TWO_WORKERS_PLACED,
    adamw,
    linear,
    make_run,
    outer_sgd,
    params_of,
    regression,
    squared_error,
)

SPOILT = 7
"""Position in the stream of worker 1 whose target is not a number: the second step of three."""


def spoilt(dtype: torch.dtype = torch.float32) -> TensorSource:
    """The regression problem with two streams, one sample of which has the target NaN."""
    source = regression(2, dtype=dtype)
    targets = source.tensors[1]
    numbered = TensorSource(torch.arange(len(targets)), num_streams=2)
    targets[numbered.read(1, SPOILT, 1)] = math.nan
    return source


def momentum(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)]


def spoilt_run(**changes: Any) -> AdLoCo:
    """Three steps a round of two workers with four samples each."""
    told: dict[str, Any] = {
        "data": spoilt(),
        "inner": momentum,
        "guards": BatchGuards(initial=8),
        "sync_every": 3,
    }
    return make_run(**told | changes)


def trained(worker: int, steps: list[int], fresh_at: int = -1) -> Tensor:
    """Flat parameters of a worker that takes these steps of a round, with momentum; at one of them
    it starts again.
    """
    model, data = linear(), spoilt()
    (optimizer,) = momentum(model)
    for step in steps:
        if step == fresh_at:
            model.load_state_dict(linear().state_dict())
            optimizer.state.clear()
        optimizer.zero_grad()
        squared_error(model, data.read(worker, 4 * step, 4)).backward()
        optimizer.step()
    return torch.cat([tensor.detach().flatten() for tensor in model.parameters()])


def reading_late(**changes: Any) -> AdLoCo:
    """A run that reads the numbers of a step one step later, as on a GPU."""
    run = make_run(**changes)
    for worker in run.workers.values():
        worker.reads_late = True
    return run


def test_numbers_that_are_read_a_step_late_change_nothing() -> None:
    limits: dict[str, Any] = {"max_grad_norm": 0.5, "inner": momentum, "batch": NormTest()}
    late, plain = reading_late(**limits), make_run(**limits)
    for first, second in zip(late.rounds(3), plain.rounds(3), strict=True):
        assert first.train_loss == second.train_loss
    torch.testing.assert_close(params_of(late), params_of(plain), rtol=0, atol=0)


def test_the_step_that_was_not_finite_is_named_before_what_it_broke() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if not all(bool(each.isfinite().all()) for each in model.parameters()):
            raise RuntimeError("it contains nan")
        return squared_error(model, batch)

    late = reading_late(
        data=spoilt(), inner=momentum, guards=BatchGuards(initial=8), sync_every=3, loss_fn=loss
    )
    with pytest.raises(NonFiniteLossError, match="loss is nan in .*worker 1.*inner step 2"):
        late.round()


def test_a_step_that_is_not_finite_is_named_though_it_is_read_late() -> None:
    """The last step of the round too, which is read before the sync."""
    for steps in (3, 2):
        late = reading_late(
            data=spoilt(), inner=momentum, guards=BatchGuards(initial=8), sync_every=steps
        )
        with pytest.raises(NonFiniteLossError, match="loss is nan in .*worker 1.*inner step 2"):
            late.round()


@pytest.mark.parametrize(
    ("choice", "second", "counted"),
    [
        ("skip", lambda: trained(1, [0, 2]), (1, 0)),
        # It stands at the start of the round when the third step begins.
        ("restore", lambda: trained(1, [0, 2], fresh_at=2), (0, 1)),
    ],
)
def test_a_step_that_is_not_finite_is_left_out(
    choice: Any, second: Callable[[], Tensor], counted: tuple[int, int]
) -> None:
    run = spoilt_run(on_nonfinite=choice)
    report = run.round()
    assert report is not None
    assert params_of(run) == pytest.approx(
        ((trained(0, [0, 1, 2]) + second()) / 2).numpy(), rel=1e-5
    )
    assert [(row.skipped_steps, row.restarts) for row in report.workers] == [(0, 0), counted]
    assert report.samples == 24, "its samples count as read"
    assert run.workers[1].position == 12
    losses = {step.inner_step: step.loss for step in report.steps if step.worker == 1}
    assert math.isnan(losses[2])
    others = [step.loss for step in report.steps if step.worker == 0]
    mean = (sum(others) / 3 + (losses[1] + losses[3]) / 2) / 2
    assert report.train_loss == pytest.approx(mean), "the mean of the losses that are finite"


@pytest.mark.parametrize("choice", ["skip", "restore"])
def test_a_loss_without_the_worker_that_has_none(choice: Any) -> None:
    """In a round of one step a worker can be left without a finite one."""
    run = spoilt_run(on_nonfinite=choice, sync_every=1)
    _, report = run.rounds(2)
    losses = {step.worker: step.loss for step in report.steps}
    assert math.isnan(losses[1])
    assert report.train_loss == report.trainers[0].train_loss == losses[0]


@pytest.mark.parametrize("choice", ["skip", "restore"])
def test_a_round_without_a_finite_step_stops_the_run(choice: str) -> None:
    """Else a run whose global parameters are bad would end as if nothing had happened."""
    run = spoilt_run(
        on_nonfinite=choice, loss_fn=lambda model, batch: squared_error(model, batch) * math.nan
    )
    with pytest.raises(NonFiniteLossError, match="no step of the round was finite until trainer 0"):
        run.round()


def test_the_run_stops_unless_it_is_told_otherwise() -> None:
    run = spoilt_run()
    before = params_of(run)
    with pytest.raises(
        NonFiniteLossError, match="loss is nan in trainer 0, worker 1, inner step 2"
    ):
        run.round()
    assert params_of(run).equal(before)


def overflowing(model: nn.Module, batch: Any) -> Tensor:
    """The loss is finite where the target is NaN, and its gradient is not."""
    inputs, targets = batch
    loss = squared_error(model, (inputs, torch.nan_to_num(targets)))
    if not bool(targets.isnan().any()):
        return loss
    weight = next(iter(model.parameters()))
    return loss + 1e30 * (1e30 * (weight.sum() - weight.sum().detach()))


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_is_left_out(limit: float) -> None:
    run = spoilt_run(loss_fn=overflowing, on_nonfinite="skip", max_grad_norm=limit)
    report = run.round()
    assert report is not None
    assert [row.skipped_steps for row in report.workers] == [0, 1]
    assert all(math.isfinite(step.loss) for step in report.steps)
    assert bool(params_of(run).isfinite().all())


def test_a_test_step_that_is_left_out_has_no_statistics() -> None:
    """The estimate is that of the other worker alone."""

    def first_step(choice: Any, **changes: Any) -> Any:
        run = spoilt_run(
            batch=NormTest(), test_step="first", on_nonfinite=choice, sync_every=1, **changes
        )
        run.workers[1].position = 4
        run.round()
        return run.trainers[0].controller.estimate

    alone = make_run(
        data=spoilt(),
        workers_per_trainer=1,
        batch=NormTest(),
        guards=BatchGuards(initial=4),
        sync_every=1,
    )
    alone.round()
    found, expected = first_step("skip"), alone.trainers[0].controller.estimate
    assert expected is not None
    assert found.grad_variance == pytest.approx(expected.grad_variance)
    assert found.plugin_norm_sq == pytest.approx(expected.plugin_norm_sq)


@pytest.mark.parametrize("choice", ["skip", "restore"])
def test_running_statistics_stay_finite(choice: Any) -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))

    data = spoilt()
    data.tensors[0][data.tensors[1].isnan()] = math.nan  # The inputs too.
    run = spoilt_run(build_model=build, data=data, on_nonfinite=choice)
    run.round()
    assert all(bool(tensor.isfinite().all()) for tensor in run.trainers[0].outer.buffers)
    assert [
        run.workers[worker].round.restarts + run.workers[worker].round.skipped_steps
        for worker in (0, 1)
    ] == [0, 1]


def huge(model: nn.Module, batch: Any) -> Tensor:
    """The gradient of worker 1's last step is finite, and its square is not."""
    inputs, targets = batch
    weight = next(iter(model.parameters()))
    loss = squared_error(model, (inputs, torch.nan_to_num(targets)))
    steep = 1e25 * (weight.sum() - weight.sum().detach())
    return loss + steep if bool(targets.isnan().any()) else loss


def test_infinite_optimizer_state_is_seen_before_it_is_sent_or_saved() -> None:
    run = spoilt_run(loss_fn=huge, inner=adamw(0.01))
    place = r"exp_avg_sq of parameter weight is not finite in trainer 0, worker 1, inner step 3"
    with pytest.raises(NonFiniteLossError, match=f"optimizer state {place}; lower the learning"):
        run.round()
    run = spoilt_run(loss_fn=huge, inner=adamw(0.01), on_nonfinite="restore")
    report = run.round()
    assert report is not None
    assert [row.restarts for row in report.workers] == [0, 1]
    assert not any(tensor.any() for tensor in optimizer_tensors(run.workers[1].optimizers[0]))
    own = [tensor.detach().flatten() for tensor in run.workers[0].replica.params]
    assert params_of(run).equal(torch.cat(own)), "all of them were synced"


def test_infinite_outer_state_is_seen() -> None:
    run = spoilt_run(data=regression(2), outer=outer_sgd(0.7, 0.9))
    run.round()
    run.state.require_finite(run.placement)
    run.trainers[0].outer.momentum()[1].fill_(math.inf)
    with pytest.raises(
        NonFiniteLossError,
        match="optimizer state momentum_buffer of parameter bias is not finite in the global "
        "parameters of trainer 0",
    ):
        run.state.require_finite(run.placement)


def test_parameters_whose_sums_could_overflow_count_as_infinite() -> None:
    """Their norm counts, and the first one with more than its share of it is named."""
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(8e36)
        model.bias.fill_(5e36)
    Replica.of(model).require_finite("here")
    for infinite in (9e36, math.nan):
        with torch.no_grad():
            model.weight.fill_(5e36)
            model.bias.fill_(infinite)
        with pytest.raises(NonFiniteLossError, match="parameter bias is not finite in here; lower"):
            Replica.of(model).require_finite("here")


def left_out(shards: int, replicas: int) -> list[tuple[list[Any], list[float]]]:
    """Counts of two rounds, and the global parameters after them, by `on_nonfinite`."""
    found = []
    for choice in ("skip", "restore"):
        run = spoilt_run(
            build_model=lambda: linear().double(),
            data=spoilt(torch.float64),
            on_nonfinite=choice,
            placement=place(2, torch.device("cpu"), 1, shards, replicas),
        )
        reports = list(run.rounds(2))
        counts = [(row.skipped_steps, row.restarts) for report in reports for row in report.workers]
        params = gather_shards(list(run.trainers[0].outer.global_params))
        found.append((counts, torch.cat([one.detach().flatten() for one in params]).tolist()))
    return found


@pytest.mark.parametrize(("ranks", "shards", "replicas"), TWO_WORKERS_PLACED)
def test_all_placements_leave_out_the_same(ranks: int, shards: int, replicas: int) -> None:
    """Only one rank of an island reads the sample that is not a number."""
    expected = left_out(1, 1)
    assert [counts[1] for counts, _ in expected] == [(1, 0), (0, 1)]
    for result in run_on_ranks(left_out, ranks, shards, replicas):
        for (counts, params), (own_counts, own) in zip(expected, result, strict=True):
            assert own_counts == counts
            assert own == pytest.approx(params, rel=1e-9)


def test_a_worker_that_starts_again_forgets_its_residuals() -> None:
    worker = make_run(wire=Int2()).workers[0]
    for residual in worker.replica.residuals:
        residual.fill_(1.0)
    worker.forget()
    assert worker.replica.residuals
    assert not any(residual.any() for residual in worker.replica.residuals)
