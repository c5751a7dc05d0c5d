"""A merge: weights, survivor, and the fate of parameters, outer momentum, inner state, streams and
batch; then the workers' homes.
"""

from typing import Any

import pytest
import torch

from adloco import AdLoCo, BatchGuards, MergeFates, MergeSmallest, NormTest, TensorSource
from adloco.algorithms.merging import apply_merge
from adloco.algorithms.model_state import copy_all
from adloco.algorithms.optimizer_state import optimizer_tensors
from adloco.algorithms.outer_sync import OuterSync
from adloco.distributed.launch.launcher import place
from adloco.distributed.testing import run_on_ranks
from adloco.distributed.wire.bf16 import Bf16
from adloco.distributed.wire.feedback import Feedback
from adloco.distributed.wire.int2 import Int2
from adloco.distributed.wire.int4 import Int4
from adloco.distributed.wire.int8 import Int8
from adloco.distributed.wire.wire_format import WireFormat
from adloco.rules.merge import Merge
from tests.distributed.scenarios import SlowedSGD
from tests.problems import Recording, adamw, make_run, outer_sgd, params_of, regression

WEIGHTS = {0: 0.25, 1: 0.75}


def two_trainers(**changes: Any) -> AdLoCo:
    """Trainers 0 and 1 with two workers each, two rounds old, asking for 10 and 30 samples."""
    settings: dict[str, Any] = {
        "num_trainers": 2,
        "inner": adamw(0.01),
        "outer": outer_sgd(0.7, 0.9, True),
        "guards": BatchGuards(initial=8, maximum=100),
    }
    run = make_run(**settings | changes)
    list(run.rounds(2))
    for trainer, request in ((0, 10), (1, 30)):
        run.trainers[trainer].controller.requested_batch = request
    return run


def merge(run: AdLoCo, fates: MergeFates) -> None:
    decision = Merge(survivor=1, absorbed=(0,), weights=WEIGHTS)
    run.state.trainers = apply_merge(decision, run.trainers, run.workers, fates, run.placement)


def momentum(run: AdLoCo, trainer: int) -> torch.Tensor:
    return torch.cat(
        [tensor.flatten().clone() for tensor in run.trainers[trainer].outer.momentum()]
    )


def inner_state(run: AdLoCo, worker: int) -> torch.Tensor:
    return torch.cat(
        [
            tensor.flatten().clone()
            for optimizer in run.workers[worker].optimizers
            for tensor in optimizer_tensors(optimizer)
        ]
    )


def test_the_policy_drives_the_run() -> None:
    run = two_trainers(merge=MergeSmallest(every=1, first_round=3))
    report = run.round()
    assert report is not None
    assert report.merges == (Merge(survivor=1, absorbed=(0,), weights=WEIGHTS),)
    assert [trainer.trainer for trainer in report.trainers] == [0, 1]
    assert list(run.trainers) == [1]
    assert run.trainers[1].worker_ids == [0, 1, 2, 3]
    after = run.round()
    assert after is not None
    assert [
        (trainer.trainer, trainer.workers, trainer.trainer_batch) for trainer in after.trainers
    ] == [(1, 4, 30)]


def test_many_workers_after_a_merge_train_on_more_than_the_maximum_and_report_it() -> None:
    """Two trainers of three workers, at most six samples each. The merged one has six workers, who
    take two samples each: 12 an inner step, three steps a round."""
    guards = BatchGuards(initial=6, minimum=6, maximum=6)
    run = make_run(
        num_trainers=2,
        workers_per_trainer=3,
        batch=NormTest(),
        guards=guards,
        merge=MergeSmallest(every=1, first_round=1),
    )
    first, second = run.rounds(2)
    rows = [(row.requested_batch, row.trainer_batch, row.workers) for row in first.trainers]
    assert rows == [(6, 6, 3), (6, 6, 3)]
    (row,) = second.trainers
    assert (row.requested_batch, row.trainer_batch, row.workers) == (6, 12, 6)
    assert (row.worker_batch, row.micro_batch, row.rounded_up) == (2, 2, 0)
    assert [worker.worker_batch for worker in second.workers] == [2] * 6
    assert second.samples - first.samples == 12 * 3
    assert sum(step.samples for step in second.steps) == 12 * 3


@pytest.mark.parametrize(
    ("fate", "weights"),
    [("weighted", (0.25, 0.75)), ("uniform", (0.5, 0.5)), ("survivor", (0.0, 1.0))],
)
def test_parameters(fate: Any, weights: tuple[float, float]) -> None:
    run = two_trainers()
    expected = weights[0] * params_of(run, 0) + weights[1] * params_of(run, 1)
    merge(run, MergeFates(parameters=fate))
    torch.testing.assert_close(params_of(run, 1), expected, rtol=1e-6, atol=1e-7)
    for worker in run.workers.values():  # Everyone stands at the survivor's parameters now.
        assert torch.cat(
            [parameter.detach().flatten() for parameter in worker.replica.params]
        ).equal(params_of(run, 1))


@pytest.mark.parametrize(
    ("fate", "weights"), [("weighted", (0.25, 0.75)), ("survivor", (0.0, 1.0)), ("reset", None)]
)
def test_outer_momentum(fate: Any, weights: tuple[float, float] | None) -> None:
    run = two_trainers()
    before = [momentum(run, trainer) for trainer in (0, 1)]
    assert before[0].abs().sum() > 0
    merge(run, MergeFates(outer_momentum=fate))
    if weights is None:
        assert run.trainers[1].outer.momentum() == []
    else:
        torch.testing.assert_close(
            momentum(run, 1), weights[0] * before[0] + weights[1] * before[1], rtol=1e-6, atol=1e-7
        )


def test_the_survivor_keeps_what_its_outer_optimizer_has_besides_tensors() -> None:
    run = two_trainers(outer=SlowedSGD)
    first, second = (run.trainers[each].outer.optimizer for each in (0, 1))
    assert first and second
    seen = second.param_groups[0]["seen"]
    assert seen != first.param_groups[0]["seen"]
    merge(run, MergeFates())
    assert second.param_groups[0]["seen"] == seen


def test_a_reset_takes_back_what_optimizers_have_besides_tensors() -> None:
    run = two_trainers(inner=lambda model: SlowedSGD([*model.parameters()]), outer=SlowedSGD)
    merge(run, MergeFates(outer_momentum="reset", inner_state="reset"))
    outer = run.trainers[1].outer.optimizer
    assert outer
    for optimizer in (outer, *run.workers[0].optimizers):
        assert optimizer.param_groups[0]["seen"] == 1


def test_codes_have_no_mean() -> None:
    run = two_trainers()
    for optimizer in run.workers[0].optimizers:
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].byte()
    with pytest.raises(ValueError, match="set merge.inner_state keep or reset"):
        merge(run, MergeFates(inner_state="mean"))


def test_a_mean_of_counts_is_rounded() -> None:
    count = torch.tensor(0)
    copy_all([torch.tensor(2.9999998)], [count])
    assert count == 3


@pytest.mark.parametrize("fate", ["keep", "mean", "reset"])
def test_inner_state(fate: Any) -> None:
    run = two_trainers()
    before = [inner_state(run, worker) for worker in range(4)]
    merge(run, MergeFates(inner_state=fate))
    # Mean: each trainer's weight shared by its two workers.
    mean = 0.125 * before[0] + 0.125 * before[1] + 0.375 * before[2] + 0.375 * before[3]
    for worker in range(4):
        if fate == "reset":
            assert not inner_state(run, worker).any()
        else:
            torch.testing.assert_close(
                inner_state(run, worker),
                before[worker] if fate == "keep" else mean,
                rtol=1e-5,
                atol=1e-7,
            )
    assert run.round() is not None


def test_the_mean_of_inner_state_where_workers_had_gradients_of_other_parameters() -> None:
    """A parameter without a gradient so far has the state of a first step: zeros."""
    run = two_trainers()
    states = [run.workers[worker].optimizers[0].state for worker in range(4)]
    params = [run.workers[worker].replica.params for worker in range(4)]
    moment = {worker: states[worker][params[worker][0]]["exp_avg"].clone() for worker in (0, 1, 2)}
    del states[3][params[3][0]]  # As if its first parameter never had a gradient.
    merge(run, MergeFates(inner_state="mean"))
    expected = 0.125 * moment[0] + 0.125 * moment[1] + 0.375 * moment[2]
    for worker in range(4):
        found = run.workers[worker].optimizers[0].state[params[worker][0]]["exp_avg"]
        torch.testing.assert_close(found, expected)
    assert run.round() is not None


def stepless(inner: Any, **changes: Any) -> None:
    """Two rounds of one step, with a merge after each; the first sample of worker 3 is not finite,
    so it takes no step."""
    data = regression(4)
    numbered = TensorSource(torch.arange(len(data.tensors[1])), num_streams=4)
    data.tensors[1][numbered.read(3, 0, 1)] = torch.nan
    run = make_run(
        data=data,
        inner=inner,
        num_trainers=2,
        sync_every=1,
        on_nonfinite="skip",
        merge=MergeSmallest(every=1, first_round=1),
        fates=MergeFates(inner_state="mean"),
        **changes,
    )
    list(run.rounds(2))


def stepless_sentence() -> str:
    """The error of `stepless` on a rank that has one of the workers."""
    try:
        stepless(adamw(0.01), placement=place(4))
    except ValueError as error:
        return str(error)
    return "none"


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_states_of_workers_that_took_no_step_have_no_mean(kind: Any) -> None:
    with pytest.raises(ValueError, match="of workers 0 and 3 have no mean.* keep or reset"):
        stepless(lambda model: [kind(model.parameters(), lr=0.01)])
    stepless(lambda model: [torch.optim.SGD(model.parameters(), lr=0.01)])  # It has no state.


def test_all_ranks_refuse_a_mean_of_states_that_some_workers_lack() -> None:
    sentences = run_on_ranks(stepless_sentence, 4, timeout_seconds=60)
    assert sentences == sentences[:1] * 4
    assert "workers 0 and 3 have no mean" in sentences[0]


@pytest.mark.parametrize(
    ("fate", "request_after"), [("survivor", 30), ("weighted", 25), ("sum", 40)]
)
def test_requested_batch(fate: Any, request_after: int) -> None:
    run = two_trainers()
    merge(run, MergeFates(requested_batch=fate))
    assert run.trainers[1].requested_batch == request_after


def test_requested_batch_stays_below_the_maximum() -> None:
    run = make_run(num_trainers=2, guards=BatchGuards(initial=8, maximum=12))
    merge(run, MergeFates(requested_batch="sum"))
    assert run.trainers[1].requested_batch == 12


def test_streams_are_kept_or_balanced() -> None:
    run = two_trainers()
    for worker, position in enumerate((500, 10, 20, 30)):
        run.workers[worker].position = position
    merge(run, MergeFates(streams="keep"))
    assert [(run.workers[worker].stream, run.workers[worker].position) for worker in range(4)] == [
        (0, 500),
        (1, 10),
        (2, 20),
        (3, 30),
    ]

    run = make_run(num_trainers=3, workers_per_trainer=1)
    for trainer, (request, position) in enumerate(((10, 5), (60, 90), (20, 40))):
        run.trainers[trainer].controller.requested_batch = request
        run.workers[trainer].position = position
    run.state.trainers = apply_merge(
        Merge(survivor=2, absorbed=(0,), weights={0: 1 / 3, 2: 2 / 3}),
        run.trainers,
        run.workers,
        MergeFates(streams="balance"),
        run.placement,
    )
    # Freed worker 0 joins trainer 1 (60 / 2 > 20 / 2), which asks for 30 per worker: its workers 0
    # and 1 get the least-read streams.
    assert run.trainers[1].worker_ids == [0, 1]
    assert [(run.workers[worker].stream, run.workers[worker].position) for worker in range(3)] == [
        (0, 5),
        (2, 40),
        (1, 90),
    ]


@pytest.mark.parametrize("outer", [outer_sgd(1.0), None], ids=["sgd", "mean"])
def test_a_freed_worker_that_joins_a_third_trainer_stands_at_its_parameters(outer: Any) -> None:
    run = make_run(num_trainers=3, workers_per_trainer=1, outer=outer)
    list(run.rounds(2))
    third = params_of(run, 1)
    for trainer, request in enumerate((10, 60, 20)):
        run.trainers[trainer].controller.requested_batch = request
    run.state.trainers = apply_merge(
        Merge(survivor=2, absorbed=(0,), weights={0: 1 / 3, 2: 2 / 3}),
        run.trainers,
        run.workers,
        MergeFates(),
        run.placement,
    )
    assert params_of(run, 1).equal(third)
    assert torch.cat(
        [parameter.detach().flatten() for parameter in run.workers[0].replica.params]
    ).equal(third)


def test_merge_of_equal_trainers_is_the_identity() -> None:
    """Two trainers fed the same streams are equal; their merge, and training on, is that of one."""

    class Same(Recording):
        def read(self, stream: int, position: int, count: int) -> Any:
            return super().read(stream % 2, position, count)

    alone = make_run(inner=adamw(0.01), outer=outer_sgd(0.7, 0.9, True), data=regression(2))
    pair = make_run(
        num_trainers=2,
        inner=adamw(0.01),
        outer=outer_sgd(0.7, 0.9, True),
        data=Same(regression(4)),
        merge=MergeSmallest(every=1, first_round=2),
    )
    # The streams of `alone` are those of four streams' first two.
    alone_data = Same(regression(4))
    alone = make_run(inner=adamw(0.01), outer=outer_sgd(0.7, 0.9, True), data=alone_data)
    for _ in range(2):
        alone.round()
        pair.round()
    assert list(pair.trainers) == [0]
    torch.testing.assert_close(params_of(pair), params_of(alone), rtol=1e-7, atol=0)
    torch.testing.assert_close(momentum(pair, 0), momentum(alone, 0), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("fates", "expected"),
    [
        # Two trainers of two workers, 4 parameters with momentum, 16 bytes each: in a mean every
        # worker sends its own.
        (MergeFates(), 4 * 16 + 4 * 16),
        # What is not averaged goes once from the survivor to those that join it.
        (MergeFates(parameters="survivor"), 16 + 4 * 16),
        (MergeFates(outer_momentum="survivor"), 4 * 16 + 16),
        (MergeFates(parameters="survivor", outer_momentum="reset"), 16),
    ],
)
def test_bytes_of_a_merge(fates: MergeFates, expected: int) -> None:
    run = two_trainers()
    before = run.placement.traffic.between
    merge(run, fates)
    assert run.placement.traffic.between - before == expected


LOSSY: list[tuple[WireFormat, int, int]] = [
    (Bf16(), 128, 128),
    (Int8(), 260, 260),
    (Int4(), 260, 68),
    (Int2(), 260, 68),
]
"""Wire formats, and the bytes of a block of parameters and of outer momentum in a merge."""


@pytest.mark.parametrize(("wire", "of_params", "of_momentum"), LOSSY)
def test_a_merge_in_few_bits(wire: WireFormat, of_params: int, of_momentum: int) -> None:
    """Parameters lose at most half of a step of int8, absmax / 254, of each trainer's term and of
    their sum. Momentum loses at most 0.4 of each value in 4 bits, and a value near zero itself.

    There are four workers, and a weight and a bias, of a block each.
    """
    run = two_trainers(wire=wire, feedback=Feedback(feedback="none"))
    params, moved = (
        [[tensor.detach().clone() for tensor in each(run.trainers[i].outer)] for i in (0, 1)]
        for each in (OuterSync.parameters, OuterSync.momentum)
    )
    before = run.placement.traffic.between
    merge(run, MergeFates())
    assert run.placement.traffic.between - before == 4 * 2 * (of_params + of_momentum)
    lost = 0.0
    for one, other, merged in zip(*params, run.trainers[1].outer.parameters(), strict=True):
        mean = 0.25 * one + 0.75 * other
        limit = (0.25 * one).abs().max() + (0.75 * other).abs().max() + merged.abs().max()
        error = (merged.detach() - mean).abs().max()
        assert error <= limit / 254 * 1.001
        lost += float(error)
    assert lost > 0
    for one, other, merged in zip(*moved, run.trainers[1].outer.momentum(), strict=True):
        limit = 0.4 * (0.25 * one.abs().max() + 0.75 * other.abs().max() + merged.abs().max())
        assert (merged - (0.25 * one + 0.75 * other)).abs().max() <= limit
    for worker in run.workers.values():
        assert torch.cat([tensor.detach().flatten() for tensor in worker.replica.params]).equal(
            params_of(run, 1)
        )


def test_second_moments_of_an_outer_optimizer_are_merged_uncompressed() -> None:
    """Its steps are divided by their roots, so none may become zero."""
    run = two_trainers(wire=Int4(), outer=lambda params: torch.optim.Adam(params, lr=0.01))
    before = [momentum(run, trainer) for trainer in (0, 1)]
    merge(run, MergeFates())
    torch.testing.assert_close(
        momentum(run, 1), 0.25 * before[0] + 0.75 * before[1], rtol=1e-6, atol=0
    )


def test_no_sample_is_lost_or_repeated_across_merges() -> None:
    source = Recording(regression(4, samples=4000))
    run = make_run(
        num_trainers=4,
        workers_per_trainer=1,
        data=source,
        batch=NormTest(eta=0.5),
        guards=BatchGuards(initial=4, maximum=40),
        merge=MergeSmallest(every=1, first_round=2),
        fates=MergeFates(streams="balance"),
    )
    reports = list(run.rounds(6))
    assert sum(len(report.merges) for report in reports) == 3
    streams: dict[int, list[int]] = {stream: [] for stream in range(4)}
    for stream, position, count in source.reads:
        streams[stream] += range(position, position + count)
    for positions in streams.values():
        assert positions == list(range(len(positions)))
    assert sum(map(len, streams.values())) == run.state.samples


def test_refusal() -> None:
    with pytest.raises(ValueError, match=r"streams must be keep or balance, got 'drop'"):
        MergeFates(streams="drop")  # type: ignore[arg-type]


def test_running_statistics_are_averaged_as_parameters_are() -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))

    run = two_trainers(build_model=model)
    one, other = (run.trainers[i].outer.buffers[0].clone() for i in (0, 1))
    assert not one.equal(other)
    merge(run, MergeFates())
    for worker in run.workers.values():
        first, *_ = worker.replica.buffers
        torch.testing.assert_close(first, 0.25 * one + 0.75 * other)


@pytest.mark.parametrize("fate", ["weighted", "survivor"])
def test_gradient_statistics_go_with_the_parameters(fate: Any) -> None:
    run = two_trainers(batch=NormTest())
    before = run.trainers[1].controller.estimate
    merge(run, MergeFates(parameters=fate))
    assert (run.trainers[1].controller.estimate == before) == (fate == "survivor")
