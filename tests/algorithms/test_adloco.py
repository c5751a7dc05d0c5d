"""The run as a user sees it: reports, counters, schedules, stopping, errors."""

import copy
import functools
import itertools
import json
import math
import shutil
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from adloco import (
    AdLoCo,
    BatchGuards,
    Execution,
    InnerMuon,
    LearningRate,
    MergeSmallest,
    Merging,
    Method,
    NonFiniteLossError,
    NormTest,
    OneProcess,
    OuterOptimizer,
    Problem,
    SwitchMode,
    Syncing,
    TensorSource,
)
from adloco.algorithms.building import is_compiled
from adloco.algorithms.make_reports import report_sync
from adloco.algorithms.trainer_distance import BUCKETS
from adloco.algorithms.worker_round import WorkerRound
from adloco.distributed.comm.sync_stats import SyncStats
from adloco.distributed.launch.launcher import place
from adloco.distributed.testing import run_on_ranks
from adloco.distributed.wire.int4 import Int4
from adloco.rules.batch_rules.seesaw import Seesaw
from adloco.rules.shares import EqualShares
from adloco.rules.sync_schedule import Streaming
from tests.problems import (
    BlockLM,
    Interrupting,
    Recording,
    adamw,
    linear,
    make_run,
    next_token,
    outer_sgd,
    params_of,
    regression,
    sgd,
    squared_error,
    tokens,
)


def test_counters_by_hand() -> None:
    # Two trainers of two workers, batches of 6, H = 3: 2 x 6 x 3 samples a round. Four float32
    # parameters: a worker sends 16 bytes a sync, 25 scalars of 8 bytes (two seconds, two counts,
    # nine of the sync, nine moments, three step losses) and a sketch of its trainer. DDP: 16 bytes
    # at each inner step.
    run = make_run(
        num_trainers=2,
        guards=BatchGuards(initial=6),
        switch=SwitchMode(max_micro_batch=2, mode="always"),
    )
    reports = list(run.rounds(4))
    assert [report.samples for report in reports] == [36, 72, 108, 144]
    assert [(report.round, report.inner_steps, report.syncs) for report in reports] == [
        (1, 3, 1),
        (2, 6, 2),
        (3, 9, 3),
        (4, 12, 4),
    ]
    each = 216 + 8 * BUCKETS
    assert [report.bytes_communicated for report in reports] == [each, 2 * each, 3 * each, 4 * each]
    assert [report.bytes_ddp_equivalent for report in reports] == [48, 96, 144, 192]
    row = reports[0].trainers[1]
    assert (
        row.trainer,
        row.workers,
        row.requested_batch,
        row.worker_batch,
        row.micro_batch,
        row.accumulation_steps,
        row.trainer_batch,
    ) == (
        1,
        2,
        6,
        3,
        2,
        2,
        6,
    )
    assert (row.grad_variance, row.grad_norm_sq, row.noise_scale) == (None, None, None)
    steps = reports[1].steps
    assert [(step.trainer, step.worker, step.inner_step) for step in steps[:4]] == [
        (0, 0, 4),
        (0, 0, 5),
        (0, 0, 6),
        (0, 1, 4),
    ]
    losses = [step.loss for step in steps if step.trainer == 1]
    assert reports[1].trainers[1].train_loss == pytest.approx(sum(losses) / 6)


def test_syncs_by_hand() -> None:
    # Two trainers of two workers, 16 bytes of parameters each. Each worker has sent 8 bytes,
    # half of them: a ratio of 2. The slowest transfer took 0.5 seconds; the fastest fragment went
    # at 19 bytes per second.
    run = make_run(num_trainers=2, guards=BatchGuards(initial=6))
    (report,) = run.rounds(1)
    assert (
        report.sync.bytes,
        report.sync.compression_ratio,
        report.sync.peak_bytes_per_second,
    ) == (16, 1, None)
    done = {
        worker: WorkerRound(
            sync=SyncStats(
                num_bytes=8.0,
                exposed_seconds=0.25 * worker,
                hidden_seconds=0.1,
                transfer_seconds=0.125 * (worker + 1),
                peak_bytes_per_second=16.0 + worker,
            )
        )
        for worker in range(4)
    }
    sync = report_sync(done, report.trainers, model_bytes=16)
    assert (sync.bytes, sync.compression_ratio, sync.exposed_seconds, sync.hidden_seconds) == (
        8,
        2,
        0.75,
        0.1,
    )
    assert (sync.transfer_seconds, sync.peak_bytes_per_second) == (0.5, 19)


def test_what_travels_while_training_continues_is_counted_with_its_round() -> None:
    # Weights and bias are a block each, of 4 + 2 bytes. Transfers count in a thread of their own,
    # one trainer after another, at any time.
    run = make_run(
        num_trainers=2, wire=Int4(block=4), streaming=Streaming(tau=1), outer=outer_sgd(0.7)
    )
    for report in run.rounds(20):
        assert (report.sync.bytes, report.sync.compression_ratio) == (12, 16 / 12)
    assert report.bytes_communicated == 20 * (12 + (22 + 3 + BUCKETS) * 8)


def test_schedule_runs_on_tokens() -> None:
    # 16 samples of 10 tokens per inner step: 160 tokens. Warm-up over 0.4 of 1600 tokens: the 4th
    # step ends at the peak; constant then.
    run = make_run(
        inner=lambda model: [
            torch.optim.SGD(
                [{"params": [model.weight], "lr": 0.2}, {"params": [model.bias], "lr": 0.4}]
            )
        ],
        learning_rate=LearningRate(
            shape="constant",
            warmup_fraction=0.4,
            total_tokens=1600,
            coupling="sqrt",
            reference_batch=4,
        ),
        tokens_per_sample=10,
        guards=BatchGuards(initial=16),
        sync_every=2,
    )
    # Batch 16 over reference 4, square root: twice the optimizer's own rate; each group keeps its
    # own.
    rates = [report.trainers[0].learning_rate for report in run.rounds(3)]
    assert rates == pytest.approx([0.2 * 2 * 0.5, 0.2 * 2, 0.2 * 2])
    assert [group["lr"] for group in run.workers[0].optimizers[0].param_groups] == pytest.approx(
        [0.4, 0.8]
    )


FALLING = LearningRate(
    shape="wsd", total_tokens=80, warmup_fraction=0.0, final_fraction=0.25, decay_fraction=0.5
)


def test_rounds_become_longer_as_the_rate_falls() -> None:
    run = make_run(
        sync_every=4, sync_growth=1.0, learning_rate=FALLING, guards=BatchGuards(initial=2)
    )
    reports = list(run.rounds(9))
    # A step has 2 of the 80 tokens. The rate falls from token 40, where the sixth round begins:
    # there H is 4 / 1; at 48 it is 4 / (0.25 + 0.75 x 32/40) = 4.71; at 58 4 / (0.25 + 0.75 x
    # 22/40) = 6.04; at 70 4 / (0.25 + 0.75 x 10/40) = 9.14.
    assert [report.sync_every for report in reports] == [4, 4, 4, 4, 4, 4, 5, 6, 9]
    assert [report.inner_steps for report in reports] == [4, 8, 12, 16, 20, 24, 29, 35, 44]


@pytest.mark.parametrize(
    "learning_rate",
    [None, replace(FALLING, shape="constant"), replace(FALLING, final_fraction=0.0)],
    ids=["none", "constant", "to zero"],
)
def test_rounds_grow_only_with_a_rate_that_falls_but_not_to_zero(
    learning_rate: LearningRate | None,
) -> None:
    with pytest.raises(ValueError, match="method.sync_growth needs a learning rate that falls"):
        make_run(sync_growth=1.0, learning_rate=learning_rate)


def test_one_rule_sets_the_length_of_rounds() -> None:
    for growth in (-1.0, 1e38):
        with pytest.raises(ValueError, match=r"sync_growth must be in \[0, 100\], got"):
            Method(sync_growth=growth)


def test_seesaw_by_hand() -> None:
    """A rate that falls linearly to 0 at 640 tokens, two steps a round, 10 tokens a sample. After
    160 tokens 0.75 of the rate is left: 8 / 0.75 = 11 samples. After 220 more 0.40625: 20 samples.
    """

    def schedule(coupling: Any, reference: int = 8, shape: Any = "wsd") -> LearningRate:
        return LearningRate(
            shape=shape,
            warmup_fraction=0,
            decay_fraction=1,
            final_fraction=0,
            total_tokens=640,
            coupling=coupling,
            reference_batch=reference,
        )

    settings: dict[str, Any] = {
        "inner": sgd(0.1),
        "tokens_per_sample": 10,
        "batch": Seesaw(),
        "sync_every": 2,
    }
    run = make_run(
        **settings, learning_rate=schedule("sqrt"), guards=BatchGuards(initial=8, maximum=64)
    )
    reports = [report.trainers[0] for report in run.rounds(2)]
    assert [report.trainer_batch for report in reports] == [8, 11]
    # At the end of a round: what the schedule leaves, times the root of the batch over 8.
    assert [report.learning_rate for report in reports] == pytest.approx(
        [0.1 * 0.75, 0.1 * 0.40625 * (11 / 8) ** 0.5]
    )
    assert run.state.trainers[0].requested_batch == 20
    wrong = [(schedule("none"), 8), (schedule("sqrt"), 4), (schedule("sqrt", reference=1), 1)]
    for learning_rate, initial in (*wrong, (schedule("sqrt", shape="constant"), 8)):
        with pytest.raises(ValueError, match="batch.rule seesaw needs a learning"):
            make_run(
                **settings,
                learning_rate=learning_rate,
                guards=BatchGuards(initial=initial, maximum=64),
            )


def test_inner_state_persists_across_rounds() -> None:
    run = make_run(inner=adamw(0.01))
    list(run.rounds(4))
    steps = [
        state["step"]
        for optimizer in run.workers[0].optimizers
        for state in optimizer.state.values()
    ]
    assert {float(step) for step in steps} == {12.0}


def test_stop_and_go_on_is_the_same_run() -> None:
    def fresh(**changes: Any) -> AdLoCo:
        return make_run(
            num_trainers=2,
            inner=adamw(0.01),
            outer=outer_sgd(0.7, 0.9, True),
            batch=NormTest(),
            guards=BatchGuards(initial=8, maximum=30),
            **changes,
        )

    data = Interrupting(regression(4))
    whole, stopped = fresh(), fresh(data=data)
    expected = list(whole.rounds(4))
    list(stopped.rounds(1))
    data.before(5, stopped.stop)
    assert list(stopped.rounds(3)) == []
    assert stopped.state.in_round
    for use in (
        lambda: stopped.evaluate(lambda model, part, parts: (0.0, 1.0)),
        lambda: stopped.model(0),
        stopped.load_global,
    ):
        with pytest.raises(ValueError, match="a round is in progress"):
            use()
    state = copy.deepcopy(stopped.state_dict())
    workers = state["run"]["workers"].values()
    assert {len(worker["round"]["losses"]) for worker in workers} != {3}

    resumed = fresh()
    resumed.load_state_dict(state)
    for run in (resumed, stopped):  # A stop ends one round, not those after it.
        assert list(run.rounds(3)) == expected[1:]
        assert params_of(run).equal(params_of(whole))
    with pytest.raises(ValueError, match=r"there is no trainer 2; living ones are \[0, 1\]"):
        whole.model(2)


def test_a_last_step_of_fewer_samples_by_hand() -> None:
    """The loss is the mean of weight x input, so a step moves the weight by the mean input. Two
    workers of four samples share the last step's five: 3 and 2. The rate falls with the samples.
    """
    data = Recording(regression(2))
    run = make_run(
        data=data,
        build_model=lambda: nn.Linear(3, 1, bias=False),
        loss_fn=lambda model, batch: model(batch[0]).mean(),
        inner=sgd(0.1),
        learning_rate=LearningRate(
            shape="wsd", total_tokens=21, warmup_fraction=0, final_fraction=0, decay_fraction=1
        ),
    )
    begun = params_of(run)
    report = run.round(final_samples=5)
    assert report is not None
    assert [(step.worker, step.samples) for step in report.steps] == [
        *[(0, 4), (0, 4), (0, 3)],
        *[(1, 4), (1, 4), (1, 2)],
    ]
    assert (report.samples, [run.workers[each].position for each in (0, 1)]) == (21, [11, 10])
    rates = [0.1 * (21 - seen) / 21 for seen in (8, 16, 21)]
    moved = [
        sum(rate * inputs.mean(0) for rate, inputs in zip(rates, data.samples[each], strict=True))
        for each in (0, 1)
    ]
    expected = begun - (11 * moved[0] + 10 * moved[1]) / 21
    torch.testing.assert_close(params_of(run), expected)
    losses = [step.loss * step.samples for step in report.steps]
    assert report.train_loss == pytest.approx(sum(losses) / 21)
    # A step that the budget alone makes smaller is no request that was clipped.
    (alone,) = (last := run.round(1, final_samples=5)).trainers
    assert (last.samples, alone.requested_batch, alone.trainer_batch) == (26, 8, 8)


def test_a_round_with_a_smaller_last_step_resumes_bit_for_bit() -> None:
    def fresh(**changes: Any) -> AdLoCo:
        return make_run(
            num_trainers=2,
            inner=adamw(0.01),
            batch=NormTest(),
            guards=BatchGuards(initial=8, maximum=30),
            **changes,
        )

    data = Interrupting(regression(4))
    whole, stopped = fresh(), fresh(data=data)
    expected = whole.round(3, final_samples=9)
    data.before(1, stopped.stop)
    assert stopped.round(3, final_samples=9) is None
    resumed = fresh()
    resumed.load_state_dict(copy.deepcopy(stopped.state_dict()))
    assert resumed.round() == expected
    assert params_of(resumed).equal(params_of(whole))
    assert (whole.state.samples, whole.state.final_samples) == (2 * 16 + 9, 0)


@pytest.mark.parametrize("threads", [1, 2])
def test_non_finite_loss_names_the_place_and_keeps_the_parameters(threads: int) -> None:
    def explode(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = squared_error(model, batch)
        return (
            loss * float("nan") if run.state.inner_steps >= 3 and torch.is_grad_enabled() else loss
        )

    run = make_run(num_trainers=2, loss_fn=explode, placement=OneProcess(threads=threads))
    run.round()
    before = params_of(run, 1)
    with pytest.raises(
        NonFiniteLossError,
        match=r"loss is nan in trainer \d, worker \d, inner step 4; lower the learning rate",
    ):
        run.round()
    assert params_of(run, 1).equal(before)
    assert all(
        bool(torch.isfinite(parameter).all())
        for worker in run.workers.values()
        for parameter in worker.replica.params
    )


def test_parameters_that_overflow_do_not_reach_the_others() -> None:
    """The gradient of the last inner step overflows while its loss is finite."""

    def overflow(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = squared_error(model, batch)
        return (
            loss + 1e30 * (model.weight.sum() * 1e30 - (model.weight.sum() * 1e30).detach())
            if run.workers[1].inner_step == 2
            else loss
        )

    run = make_run(loss_fn=overflow)
    before = params_of(run)
    with pytest.raises(
        NonFiniteLossError,
        match=r"parameter weight is not finite in trainer 0, worker \d, inner step 3",
    ):
        run.round()
    assert params_of(run).equal(before)


def test_a_step_that_failed_half_way_leaves_no_gradients() -> None:
    """A read fails in the middle of an accumulated step; repeating the round gives the same result
    as a round without a failure.
    """
    settings: dict[str, Any] = {
        "switch": SwitchMode(max_micro_batch=2, mode="always"),
        "batch": NormTest(),
        "inner": adamw(0.01),
    }
    data = Interrupting(regression(2))
    smooth, disturbed = make_run(**settings), make_run(**settings, data=data)
    expected = list(smooth.rounds(3))

    def fail() -> None:
        raise OSError("a disk blinked")

    data.before(2, fail)
    with pytest.raises(OSError, match="a disk blinked"):
        disturbed.round()
    assert list(disturbed.rounds(3)) == expected
    assert params_of(disturbed).equal(params_of(smooth))


def test_two_runs_on_one_placement_count_apart() -> None:
    placement = OneProcess()
    first, second = (list(make_run(placement=placement).rounds(2))[-1] for _ in range(2))
    assert first.bytes_communicated == second.bytes_communicated > 0


def test_loaded_state_is_not_shared() -> None:
    first, second = (
        make_run(inner=adamw(0.01), outer=outer_sgd(0.7, 0.9)),
        make_run(inner=adamw(0.01), outer=outer_sgd(0.7, 0.9)),
    )
    list(first.rounds(2))
    second.load_state_dict(first.state_dict())
    list(second.rounds(2))
    expected = make_run(inner=adamw(0.01), outer=outer_sgd(0.7, 0.9))
    list(expected.rounds(3))
    first.round()
    assert params_of(first).equal(params_of(expected))


def test_a_failing_worker_fails_the_run() -> None:
    def fail(model: nn.Module, batch: Any) -> torch.Tensor:
        raise RuntimeError("no such thing")

    with pytest.raises(RuntimeError, match="no such thing"):
        make_run(loss_fn=fail, placement=OneProcess(threads=2)).round()


def test_evaluate_shares_the_work() -> None:
    run = make_run(num_trainers=2, workers_per_trainer=3)
    run.round()
    seen = []

    def count(model: nn.Module, part: int, parts: int) -> tuple[float, float]:
        seen.append((part, parts))
        return float(model.bias.detach()) + part, part + 1

    values = run.evaluate(count)
    assert sorted(seen) == [(part, 3) for part in (0, 0, 1, 1, 2, 2)]
    for trainer in (0, 1):
        bias = float(params_of(run, trainer)[-1])
        assert values[trainer] == pytest.approx([(3 * bias + 3) / 6])
        assert torch.cat(
            [parameter.detach().flatten() for parameter in run.model(trainer).parameters()]
        ).equal(params_of(run, trainer))


def test_every_trainer_starts_from_the_same_parameters() -> None:
    """Models that are built one by one would differ, and an average of models from different
    starting points is meaningless.
    """
    run = make_run(build_model=lambda: nn.Linear(3, 1), num_trainers=3)
    for trainer in (1, 2):
        assert params_of(run, trainer).equal(params_of(run, 0))


@pytest.mark.parametrize("hook", [True, False])
def test_hooks_and_attributes_of_parameters_are_those_of_every_worker(hook: bool) -> None:
    """One weight stays: by a hook that masks its gradient, or by a rate that `inner` reads."""
    stays = torch.tensor([[0.0, 1.0, 1.0]])

    def build() -> nn.Module:
        model = linear()
        if hook:
            model.weight.register_hook(lambda gradient: gradient * stays)  # type: ignore[operator]
        model.weight.scale = stays  # type: ignore[union-attr]
        return model

    def inner(model: Any) -> list[torch.optim.Optimizer]:
        if not hook:
            model.weight.register_hook(lambda gradient: gradient * model.weight.scale)
        return sgd(0.05)(model)

    run = make_run(build_model=build, inner=inner, workers_per_trainer=3)
    assert run.round() is not None
    for worker in run.workers.values():
        weight: Any = worker.model.weight
        moved = weight.ne(linear().weight)
        assert moved.tolist() == [[False, True, True]]


def listed(model: Any) -> None:
    model.functions = [(lambda values, own=model[0]: own(values))]
    model.register_forward_hook(lambda module, given, out: module.functions[0](*given))


@pytest.mark.parametrize(
    "add",
    [
        lambda model: setattr(model, "forward", lambda values: model[0](values)),
        lambda model: setattr(model, "forward", functools.partial(lambda v: model[0](v))),
        lambda model: model.register_forward_hook(lambda module, given, out: model[0](*given)),
        listed,
    ],
    ids=["function", "partial", "hook", "in a list"],
)
def test_functions_of_a_model_act_on_its_own_copy(add: Any) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(linear())
        add(model)
        return model

    with pytest.raises(
        ValueError, match="models of two workers have a trainable parameter in common"
    ):
        make_run(build_model=functools.cache(build))
    sizes = itertools.count(1)
    with pytest.raises(ValueError, match="models and settings must be the same for all workers"):
        make_run(build_model=lambda: nn.Linear(3, next(sizes)))
    run, plain = (make_run(build_model=each) for each in (build, lambda: nn.Sequential(linear())))
    for each in (run, plain):
        each.round()
    assert params_of(run).equal(params_of(plain))


def test_workers_whose_parameters_are_one_are_refused() -> None:
    """They would train it in turns, as one worker with their samples does."""
    shared = nn.Linear(3, 3)

    def of_one_tensor() -> nn.Module:
        model = linear()
        model.weight = nn.Parameter(shared.weight[:1].detach())
        return model

    for build in (of_one_tensor, lambda: nn.Sequential(shared, linear())):
        with pytest.raises(ValueError, match="of two workers have a trainable parameter in common"):
            make_run(build_model=build)
    shared.requires_grad_(False)
    run = make_run(build_model=lambda: nn.Sequential(shared, linear()))
    assert run.round() is not None


def locked() -> nn.Module:
    model = nn.Sequential(linear())
    model.lock = threading.Lock()  # type: ignore[assignment]
    return model


def scripted() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        return torch.jit.script(nn.Sequential(linear()))  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("build", [locked, scripted])
def test_models_that_deepcopy_cannot_copy_are_trained_by_several_workers(
    build: Callable[[], nn.Module],
) -> None:
    run, plain = (make_run(build_model=each) for each in (build, lambda: nn.Sequential(linear())))
    for each in (run, plain):
        each.round()
    assert params_of(run).tolist() == pytest.approx(params_of(plain).tolist(), abs=1e-6)


def test_frozen_parameters_stay_and_send_nothing() -> None:
    def build() -> nn.Module:
        model = linear()
        model.bias.requires_grad_(False)
        return model

    run = make_run(
        build_model=build, inner=lambda model: [torch.optim.SGD([model.weight], lr=0.05)]
    )
    report = run.round()
    assert report is not None
    assert run.num_parameters == 3
    assert report.bytes_communicated == 12 + 200
    assert all(worker.model.bias.equal(linear().bias) for worker in run.workers.values())  # type: ignore[union-attr, operator]


def test_parameters_that_are_unfrozen_later_are_refused_because_nothing_would_train_them() -> None:
    def build() -> nn.Module:
        model = linear()
        model.bias.requires_grad_(False)
        return model

    run = make_run(
        build_model=build, inner=lambda model: [torch.optim.SGD([model.weight], lr=0.05)]
    )
    run.round()
    run.workers[0].model.bias.requires_grad_()  # type: ignore[union-attr, operator]
    with pytest.raises(ValueError, match="1 parameters of worker 0 require gradients now and did"):
        run.round()


def test_a_state_from_before_the_steps_of_a_round_were_in_it_is_loaded() -> None:
    run, again = make_run(), make_run()
    run.round()
    state = run.state_dict()
    del state["run"]["sync_every"]
    again.load_state_dict(state)
    assert again.round() == run.round()


def test_parameters_that_are_frozen_later_stay_where_they_are_and_are_saved() -> None:
    run, again = make_run(), make_run()
    run.round()
    for worker in run.workers.values():
        worker.model.bias.requires_grad_(False)  # type: ignore[union-attr, operator]
    bias: Any = run.model(0).bias
    before = bias.clone()
    run.round()
    again.load_state_dict(run.state_dict())
    assert bias.equal(before) and bias.equal(again.model(0).bias)


def test_float_buffers_are_averaged_like_parameters() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(3), nn.Linear(3, 1)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.linear(self.norm(inputs))

    run = make_run(build_model=Norm, inner=adamw(0.01))
    run.round()
    means = [worker.model.norm.running_mean for worker in run.workers.values()]  # type: ignore[union-attr]
    assert means[0].equal(means[1])
    assert means[0].abs().sum() > 0


@pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU"
)
def test_compile_gives_the_same_numbers() -> None:
    plain, compiled = (
        make_run(batch=NormTest()),
        make_run(batch=NormTest(), compile=True),
    )
    for first, second in zip(plain.rounds(2), compiled.rounds(2), strict=True):
        assert first.train_loss == pytest.approx(second.train_loss, rel=1e-5)
        assert first.trainers[0].grad_variance == pytest.approx(
            second.trainers[0].grad_variance, rel=1e-4
        )


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks there while it compiles.
def test_repeated_blocks_are_compiled_as_one_graph_for_all_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not for an evaluation. No two call it at once: dynamo refuses that while one compiles."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5).double()

        def forward(self, state: torch.Tensor) -> torch.Tensor:
            return self.linear(state)

    def build() -> nn.Module:
        model = BlockLM()
        model.blocks = nn.ModuleList([Block(), Block()])
        return model

    graphs: list[Any] = []
    called = threading.Lock()

    def backend(graph: Any, inputs: Any) -> Any:
        def alone(*given: Any) -> Any:
            assert called.acquire(blocking=False)
            time.sleep(1e-3)
            called.release()
            return graph.forward(*given)

        graphs.append(graph)
        return alone

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    language = {"build_model": build, "loss_fn": next_token, "data": tokens(500, 2)}
    plain, compiled = (
        make_run(**language, compile=compile, placement=OneProcess(threads=2))
        for compile in (False, True)
    )
    for first, second in zip(plain.rounds(2), compiled.rounds(2), strict=True):
        assert first.train_loss == pytest.approx(second.train_loss, rel=1e-12)
    assert len(graphs) == 1
    model = compiled.workers[0].model.eval()
    ids = tokens(500, 2).read(0, 0, 3)
    model(ids)
    assert len(graphs) == 1
    copied = copy.deepcopy(model.train())  # As a second run does with a model that it is given.
    copied(ids).sum().backward()
    gradients = [[each.grad for each in of.parameters()] for of in (model, copied)]
    assert set(map(type, gradients[0])) == {type(None)}
    assert all(each is not None for each in gradients[1])


@pytest.mark.parametrize(
    ("layers", "message"), [([0], "gives 1.weight 0 times"), ([0, 1, 1], "gives 1.weight 2 times")]
)
def test_inner_optimizers_that_leave_out_or_repeat_a_parameter(
    layers: list[int], message: str
) -> None:
    def inner(model: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(model[layer].parameters(), lr=0.1) for layer in layers]

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))

    with pytest.raises(ValueError, match=f"inner must give each trainable parameter .*{message}"):
        make_run(build_model=build, inner=inner)
    with pytest.raises(ValueError, match=r"outer must give .* gives 1.bias 0 times"):
        make_run(build_model=build, outer=lambda parameters: torch.optim.SGD(parameters[:3], lr=1))


def test_autocast_to_float16_is_refused() -> None:
    with pytest.raises(ValueError, match=r"autocast must be None or torch.bfloat16, .* float16"):
        Execution(autocast=torch.float16)


def test_autocast_trains_in_bf16() -> None:
    seen = set()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.add(model(batch[0]).dtype)
        return squared_error(model, batch)

    run = make_run(loss_fn=loss, autocast=torch.bfloat16)
    first, last = run.round(), list(run.rounds(8))[-1]
    assert seen == {torch.bfloat16}
    assert first is not None
    assert last.train_loss < first.train_loss
    assert all(parameter.dtype == torch.float32 for parameter in run.workers[0].replica.params)


def test_muon_trains_and_resumes() -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    first = make_run(build_model=build, inner=InnerMuon(lr=0.02))
    list(first.rounds(2))
    second = make_run(build_model=build, inner=InnerMuon(lr=0.02))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    losses = [[report.train_loss for report in run.rounds(3)] for run in (first, second)]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]


def states_of_two_rounds() -> str:
    run = make_run(placement=place(2))
    states = [copy.deepcopy(run.placement.agree(run.state_dict()))]
    run.round()
    states.append(copy.deepcopy(run.placement.agree(run.state_dict())))
    with pytest.raises(ValueError, match="load the same one on all ranks") as refused:
        run.load_state_dict(states[run.placement.rank])
    run.round()  # Nothing was written.
    return str(refused.value)


def test_ranks_that_load_states_of_two_rounds_are_refused() -> None:
    """Workers would train from global parameters of two rounds, and on samples of both."""
    for refused in run_on_ranks(states_of_two_rounds, 2):
        assert "saved after rounds [0, 1]" in refused


def test_a_state_that_is_refused_leaves_no_mixture_to_train() -> None:
    first, second = make_run(), make_run(inner=InnerMuon(lr=0.02))
    list(first.rounds(2))
    state = copy.deepcopy(first.state_dict())
    incomplete = {name: part for name, part in state.items() if name != "worker-1"}
    with pytest.raises(ValueError, match="not complete, it has no 'worker-1'; save state_dict"):
        second.load_state_dict(incomplete)
    second.round()  # Nothing was written yet.
    with pytest.raises(ValueError, match="of 1 inner optimizers for each worker, and here are 2"):
        second.load_state_dict(state)
    for use in (second.round, second.state_dict, second.load_global, lambda: second.trainers):
        with pytest.raises(ValueError, match="has failed, which leaves a mixture of two runs"):
            use()
    third = make_run(inner=InnerMuon(lr=0.02))
    third.round()
    second.load_state_dict(third.state_dict())
    assert second.round() == third.round()
    assert params_of(second).equal(params_of(third))


def test_reports_are_plain_values() -> None:
    from dataclasses import asdict

    run = make_run(num_trainers=2, batch=NormTest(), merge=MergeSmallest(every=1, first_round=1))
    report = run.round()
    assert report is not None
    json.dumps(asdict(report))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sync_every": 0}, "sync_every must be >= 1, got 0"),
        ({"sync_every": "5"}, "^sync_every must be a number, got '5'$"),
        ({"num_trainers": 0}, "num_trainers must be >= 1, got 0"),
        ({"workers_per_trainer": 0}, "workers_per_trainer must be >= 1, got 0"),
        ({"data": regression(1)}, "data needs num_streams >= 2 .*, got 1"),
        ({"max_grad_norm": -1.0}, "max_grad_norm must be >= 0"),
        ({"test_groups": 1}, "groups must be >= 2"),
        (
            {"learning_rate": LearningRate()},
            "learning_rate.total_tokens must be > 0 for this shape",
        ),
        (
            {"batch": NormTest(), "switch": SwitchMode(max_micro_batch=1)},
            "switch.max_micro_batch must be >= 2 for this batch rule",
        ),
        (
            {"batch": SimpleNamespace(fewest_groups=5, measurement="", requested=max)},
            "test.groups must be >= 5 for this batch rule, got 4",
        ),
        ({"build_model": nn.Identity}, "without trainable parameters"),
        ({"build_model": lambda: None}, "must return a new model, and returned NoneType"),
        ({"build_model": nn.Linear(1, 1)}, "^build_model must be a function .*, got Linear; "),
        ({"data": [torch.ones(2)]}, "^data must have num_streams and read.*, got list$"),
        (
            {"batch": "norm-test"},
            "^rule must be of type BatchRule, such as ConstantBatch.*'norm-test'$",
        ),
        ({"batch": NormTest}, "^rule must be of type BatchRule, .* got <class '.*NormTest'>$"),
        ({"switch": 8}, "^switch must be of type SwitchMode, such as SwitchMode.*, got 8$"),
        ({"inner": lambda model: None}, "^inner must give each trainable parameter .* 0 times$"),
        ({"sync_every": 2.5}, "^sync_every must be a whole number, got 2.5$"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    changes = {"data": regression(2)} | changes
    with pytest.raises(ValueError, match=message):
        make_run(**changes)


def test_micro_batches_of_one_sample_can_be_compared_if_all_accumulate() -> None:
    report = make_run(batch=NormTest(), switch=SwitchMode(max_micro_batch=1, mode="always")).round()
    assert report is not None and report.trainers[0].measured_grad_variance is not None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Merging(policy=None),
            "^policy must be of type MergePolicy, .*, or be left out, got None$",
        ),
        (
            lambda: Merging(policy=MergeSmallest),
            "^policy must be of type MergePolicy, .* got <class",
        ),
        (
            lambda: Syncing(outer=None, streaming=4),
            "^streaming must be of type Streaming, .*, got 4$",
        ),
        (
            lambda: Syncing(outer=None, weights="equal"),
            "^weights must be of type SyncWeights, .*'equal'$",
        ),
        (
            lambda: Execution(on_nonfinite="Stop"),
            "^on_nonfinite must be stop, skip or restore, got",
        ),
        (
            lambda: Problem(
                build_model=linear, loss_fn=squared_error, data=regression(1), tokens_per_sample=-5
            ),
            "^tokens_per_sample must be >= 1, got -5$",
        ),
    ],
)
def test_sections_of_a_wrong_type_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("section", ["batching", "merging", "syncing", "execution", "placement"])
def test_a_rule_in_the_place_of_its_section_is_refused(section: str) -> None:
    problem = Problem(build_model=linear, loss_fn=squared_error, data=regression(1))
    sections: dict[str, Any] = {"syncing": Syncing(outer=None), section: NormTest()}
    needed = rf"^AdLoCo needs {section.title()}\(...\), got <class '.*NormTest'>$"
    with pytest.raises(ValueError, match=needed):
        AdLoCo(problem, Method(), inner=print, **sections)


def test_an_outer_optimizer_that_is_not_returned_is_not_taken_for_the_mean() -> None:
    with pytest.raises(ValueError, match="^outer must give each trainable parameter .* 0 times$"):
        make_run(data=regression(2), outer=lambda parameters: None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: OuterOptimizer(optimizer="Nesterov"),
            "^optimizer must name an optimizer of torch.optim such as SGD or Adam, got 'Nesterov'",
        ),
        (
            lambda: OuterOptimizer(options={"momentumm": 0.9}),
            "^options do not fit torch.optim.SGD",
        ),
        (lambda: OuterOptimizer(options={"momentum": math.nan}), "^options must give finite steps"),
        (lambda: OuterOptimizer(options={"momentum": math.inf}), "^options must give finite steps"),
        (lambda: OuterOptimizer(optimizer="LBFGS", options={}), "it cannot be an outer optimizer"),
        (
            lambda: OuterOptimizer(optimizer="SparseAdam", options={}),
            "it cannot be an outer optimizer",
        ),
        (lambda: OuterOptimizer(lr=0), "^lr must be > 0"),
    ],
)
def test_optimizer_refusals(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


class Normed(nn.Module):
    """BatchNorm with momentum None averages over its count of batches, an integer of the state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.linear = nn.BatchNorm1d(3, momentum=None), nn.Linear(3, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(self.norm(inputs))
        return output


def normed(batch: Any) -> AdLoCo:
    guards = BatchGuards(initial=16, minimum=16, maximum=16)
    return make_run(
        build_model=Normed, batch=batch, guards=guards, switch=SwitchMode(max_micro_batch=16)
    )


def running_statistics(run: AdLoCo) -> list[list[float]]:
    return [
        buffer.flatten().tolist()
        for worker in run.workers.values()
        for buffer in worker.model.buffers()
    ]


def test_running_statistics_go_on_from_a_checkpoint() -> None:
    once, resumed = normed(NormTest()), normed(NormTest())
    once.round()
    resumed.load_state_dict(copy.deepcopy(once.state_dict()))
    once.round()
    resumed.round()
    assert running_statistics(resumed) == running_statistics(once)


def test_a_state_of_a_model_with_other_counts_is_refused() -> None:
    """A copy would repeat the one count of the state."""

    def counting(size: int) -> AdLoCo:
        def build() -> nn.Module:
            model = linear()
            model.register_buffer("counts", torch.zeros(size, dtype=torch.int64))
            return model

        return make_run(build_model=build)

    with pytest.raises(ValueError, match="the state is that of a model with other buffers; load"):
        counting(3).load_state_dict(counting(1).state_dict())


def test_a_report_is_shown_in_a_line() -> None:
    run = make_run(num_trainers=2, batch=NormTest(eta=0.8))
    (report,) = run.rounds(1)
    first, second = report.trainers
    assert repr(report) == (
        f"<round 1: {report.samples} samples, train loss {report.train_loss:.4f}, batch of each "
        f"trainer [{first.trainer_batch}, {second.trainer_batch}], 1 syncs, 0 merges>"
    )


def test_large_language_models_are_compiled_on_a_gpu_unless_told_otherwise() -> None:
    class OnGpu(OneProcess):
        device = torch.device("cuda")

        def __init__(self, ranks_per_worker: int = 1) -> None:
            self.ranks_per_worker = ranks_per_worker

    class Large(nn.Module):
        def __init__(self, size: int = 10**8, dropout: float = 0.0) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(size, device="meta"))
            self.dropout = nn.Dropout(dropout)

    usual = Problem(build_model=linear, loss_fn=next_token, data=tokens(9, 1), replayable=True)
    unknown = replace(usual, replayable=False)
    assert is_compiled("auto", Large(), usual, OnGpu())
    assert is_compiled("auto", Large(2 * 10**7), usual, OnGpu())
    assert not is_compiled("auto", Large(2 * 10**7 - 1), usual, OnGpu())
    assert not is_compiled("auto", Large(dropout=0.1), usual, OnGpu())
    assert not is_compiled("auto", Large(), unknown, OnGpu())
    assert not is_compiled("auto", Large(), usual, OnGpu(ranks_per_worker=2))
    assert not is_compiled("auto", Large(), usual, OneProcess())
    assert is_compiled(True, Large(), unknown, OneProcess())
    assert not is_compiled(False, Large(), usual, OnGpu())


@pytest.mark.parametrize("compile", [False, True])
def test_a_compiled_model_has_a_loss_of_its_own(
    compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    called = []

    def own(model: Any, batch: Any) -> torch.Tensor:
        called.append(len(batch))
        return squared_error(model, batch)

    list(make_run(compiled_loss_fn=own, compile=compile).rounds(1))
    assert bool(called) == compile


def test_a_stop_before_a_state_is_loaded_does_not_stop_what_follows() -> None:
    run = make_run()
    state = run.state_dict()
    run.stop()
    run.load_state_dict(state)
    assert run.round() is not None


def test_a_state_of_another_rank_than_the_first_is_refused() -> None:
    run = make_run()
    parts = run.state_dict()
    del parts["run"]  # Which rank 0 alone has.
    with pytest.raises(ValueError, match="save state_dict.. on rank 0, where it is complete"):
        run.load_state_dict(parts)


def test_a_state_is_continued_with_the_rates_of_the_new_run() -> None:
    """Without a schedule, too: the rate that is reported is the one that is used."""
    first = make_run(inner=adamw(1e-2), outer=outer_sgd(0.7, 0.9))
    first.round()
    second = make_run(inner=adamw(1e-4), outer=outer_sgd(0.1, 0.3))
    second.load_state_dict(first.state_dict())
    report = second.round()
    assert report is not None and report.trainers[0].learning_rate == 1e-4
    (optimizer,) = second.workers[0].optimizers
    outer = second.trainers[0].outer.optimizer
    assert outer is not None
    assert (optimizer.param_groups[0]["lr"], outer.param_groups[0]["lr"]) == (1e-4, 0.1)
    assert outer.param_groups[0]["momentum"] == 0.3


def test_a_state_of_other_trainers_or_workers_is_refused() -> None:
    """The rest of them would be lost without a word."""

    def sized(trainers: int, workers: int, **changes: Any) -> AdLoCo:
        return make_run(num_trainers=trainers, workers_per_trainer=workers, **changes)

    run = sized(2, 2)
    run.round()
    state = run.state_dict()
    for trainers, workers in ((1, 2), (1, 4), (2, 1), (2, 3)):
        with pytest.raises(
            ValueError, match=r"the state has trainers \[0, 1\] and workers \[0, 1, "
        ):
            sized(trainers, workers).load_state_dict(state)
    merging = {"merge": MergeSmallest(count=2, every=1, first_round=1)}
    merged = sized(2, 2, **merging)
    merged.round()
    again = sized(2, 2, **merging)
    again.load_state_dict(merged.state_dict())
    assert list(again.trainers) == list(merged.trainers) == [0]
    reports = [next(each.rounds(1)) for each in (again, merged)]
    assert reports[0] == reports[1]


def test_one_inner_optimizer_needs_no_list() -> None:
    run = make_run(inner=lambda model: torch.optim.SGD(model.parameters(), lr=0.05))
    assert run.round() is not None
    assert params_of(run).equal(params_of_round())


def params_of_round() -> torch.Tensor:
    run = make_run()
    run.round()
    return params_of(run)


@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, math.nan], [1.0, -1.0], [1.0]])
def test_shares_that_are_no_positive_numbers_are_refused(weights: list[float]) -> None:
    class Own(EqualShares):
        def weights(self, *told: object) -> list[float]:
            return weights

    with pytest.raises(ValueError, match=r"^placement\.balance must give a positive number .* 2"):
        make_run(shares=Own()).round()


def test_a_source_that_gives_other_samples_than_it_was_asked_for_is_refused() -> None:
    class Ends(TensorSource):
        def read(self, stream: int, position: int, count: int) -> Any:
            first, second = super().read(stream, position, count)
            return first[: 10 - position], second[: 10 - position]

    data = regression(2)
    run = make_run(data=Ends(*data.tensors, num_streams=2))
    with pytest.raises(ValueError, match=r"position=8, count=4\) must give 4 samples"):
        run.round()
