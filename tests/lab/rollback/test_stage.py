"""A round with a spike is undone: what remains is a run that has skipped the round's data."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from adloco import AdLoCo, BatchGuards, Int4, NormTest, OneProcess, RoundReport, TensorSource
from adloco.algorithms import round as round_module
from adloco.algorithms.merging import apply_merge
from adloco.distributed.dtensor import gather_shards
from adloco.distributed.launch.launcher import place
from adloco.distributed.testing import run_on_ranks
from adloco.lab.rollback.losses import FEWEST
from adloco.lab.rollback.option import Spikes
from adloco.lab.rollback.stage import NO_SPIKE
from adloco.rules.merge import MergeFates
from adloco.rules.merge_policies.smallest import MergeSmallest
from adloco.rules.sync_schedule import Streaming
from tests.problems import (
    TWO_WORKERS_PLACED,
    adamw,
    cases,
    linear,
    make_run,
    outer_sgd,
    params_of,
    regression,
    squared_error,
)

H = 5
CALM = FEWEST // H
"""Rounds without a spike at the start."""


def spiky(dtype: torch.dtype = torch.float32) -> TensorSource:
    """The regression problem, one sample of which is far off: worker 1's, in round CALM + 1."""
    source = regression(2, samples=4000, dtype=dtype)
    targets = source.tensors[1]
    numbered = TensorSource(torch.arange(len(targets)), num_streams=2)
    targets[numbered.read(1, CALM * H * 4 + 6, 1)] = 300.0
    return source


def spiky_run(**changes: Any) -> AdLoCo:
    told: dict[str, Any] = {
        "data": spiky(),
        "inner": adamw(0.01),
        "outer": outer_sgd(0.7, 0.9),
        "sync_every": H,
        "options": [Spikes(on_spike="rollback")],
    }
    return make_run(**told | changes)


def seen(report: RoundReport) -> tuple[int, int | None, int]:
    (trainer,) = report.trainers
    found = NO_SPIKE | trainer.more  # Without the stage, nothing is said.
    return found["spikes"], found["spike_step"], found["rolled_back"]


@pytest.mark.parametrize(
    "settings",
    cases(
        {
            "plain": ({},),
            "int4": ({"wire": Int4()},),
            "streaming": ({"streaming": Streaming(fragments=1, tau=2)},),
            "statistics": (
                {
                    "batch": NormTest(),
                    "guards": BatchGuards(initial=8, minimum=8, maximum=8),
                    "test_groups": 2,
                    "build_model": lambda: normalised(),
                },
            ),
        },
        default=("plain", "statistics"),
    ),
)
def test_a_round_with_a_spike_is_undone(settings: dict[str, Any]) -> None:
    run = spiky_run(**settings)
    calm = list(run.rounds(CALM))
    assert {seen(report) for report in calm} == {(0, None, 0)}
    before = copy.deepcopy(run.state_dict())
    (report,) = run.rounds(1)
    assert seen(report) == (1, CALM * H + 2, 1)
    counters = before["run"]
    samples = counters["samples"] + sum(step.samples for step in report.steps)
    assert report.samples == samples, "they count as trained on"
    after = run.state_dict()
    for worker, saved in counters["workers"].items():
        now = after["run"]["workers"][worker]
        assert now["position"] == saved["position"] + (samples - counters["samples"]) // 2
        inner, now_inner = (state[f"worker-{worker}"]["inner"] for state in (before, after))
        for key in ("params", "buffers", "counters", "residuals", "optimizers"):
            if inner[key] or key != "params":
                assert equal(now_inner[key], inner[key]), key
    assert equal(after["trainer-0"]["outer"], before["trainer-0"]["outer"])
    assert after["run"]["trainers"][0]["controller"] == counters["trainers"][0]["controller"]
    assert [seen(report) for report in run.rounds(2)] == [(0, None, 0)] * 2


def normalised() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))


def equal(left: Any, right: Any) -> bool:
    """Nestings that have the same tensors, bit for bit, and the same values."""
    if isinstance(left, Tensor):
        return bool(torch.equal(left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)


def test_the_run_continues_as_if_it_had_skipped_the_data() -> None:
    run, skipping = spiky_run(), spiky_run(options=[Spikes(on_spike="off")])
    list(run.rounds(CALM + 3))
    list(skipping.rounds(CALM))
    skipping.state.skip_samples(H * 4)
    list(skipping.rounds(2))
    assert params_of(run).equal(params_of(skipping))


@pytest.mark.parametrize("choice", ["report", "off"])
def test_a_spike_that_is_only_reported_changes_nothing(choice: Any) -> None:
    run, other = (
        spiky_run(options=[Spikes(on_spike=choice)]),
        spiky_run(options=[Spikes(on_spike="off")]),
    )
    reports = list(run.rounds(CALM + 1))
    assert seen(reports[-1])[::2] == ((1, 0) if choice == "report" else (0, 0))
    list(other.rounds(CALM + 1))
    assert params_of(run).equal(params_of(other))


def test_a_run_resumed_within_the_round_is_rolled_back_too() -> None:
    whole, stopped = spiky_run(), spiky_run()
    list(whole.rounds(CALM + 2))
    list(stopped.rounds(CALM))
    stopped.stop()
    assert stopped.round() is None
    resumed = spiky_run()
    resumed.load_state_dict(copy.deepcopy(stopped.state_dict()))
    assert [seen(report)[2] for report in resumed.rounds(2)] == [1, 0]
    assert params_of(resumed).equal(params_of(whole))


def rolled_back(shards: int, replicas: int) -> tuple[list[Any], list[float]]:
    run = spiky_run(
        build_model=lambda: linear().double(),
        loss_fn=squared_error,
        data=spiky(torch.float64),
        placement=place(2, torch.device("cpu"), 1, shards, replicas),
    )
    reports = [seen(report) for report in run.rounds(CALM)]
    run.stop()
    assert run.round() is None
    run.load_state_dict(run.placement.agree(copy.deepcopy(run.state_dict())))
    reports += [seen(report) for report in run.rounds(2)]
    whole = gather_shards(list(run.trainers[0].outer.global_params))
    return reports, torch.cat([tensor.detach().flatten() for tensor in whole]).tolist()


@pytest.mark.parametrize(("ranks", "shards", "replicas"), TWO_WORKERS_PLACED)
def test_all_placements_roll_back_the_same(ranks: int, shards: int, replicas: int) -> None:
    reports, params = rolled_back(1, 1)
    assert [report[2] for report in reports] == [0] * CALM + [1, 0]
    for found, own in run_on_ranks(rolled_back, ranks, shards, replicas):
        assert found == reports
        assert own == pytest.approx(params, rel=1e-9)


@pytest.mark.parametrize("spiking", [0, 1])
@pytest.mark.parametrize(("ranks", "inner_state"), [(1, "keep"), (1, "mean"), (2, "mean")])
def test_a_merge_after_the_first_round_was_undone(
    spiking: int, inner_state: Any, ranks: int
) -> None:
    """The trainer has no momentum then: 0, of which the merge takes the mean with the other's."""
    if ranks == 1:
        found = [merged(spiking, inner_state)]
    else:
        found = run_on_ranks(merged, ranks, spiking, inner_state, timeout_seconds=60)
    # A rank has the momentum of its own trainers alone.
    (known,) = (momenta[1 - spiking] for _, momenta, _ in found if any(momenta[1 - spiking]))
    for rolled_back, momenta, mean in found:
        assert rolled_back == [int(trainer == spiking) for trainer in (0, 1)]
        assert not any(momenta[spiking])
        assert mean == pytest.approx([value / 2 for value in known])


def merged(spiking: int, inner_state: Any) -> tuple[list[int], list[list[float]], list[float]]:
    """Two trainers, one of which has a spike in the first round, after which they merge.

    Returns:
        Whose rounds were undone, the outer momenta as far as they are on this rank, before the
        merge, and the survivor's after it.
    """
    long = FEWEST + 10
    source = regression(2, samples=4000)
    numbered = TensorSource(torch.arange(4000), num_streams=2)
    source.tensors[1][numbered.read(spiking, (FEWEST + 5) * 8, 8)] += 1000.0
    run = spiky_run(
        num_trainers=2,
        workers_per_trainer=1,
        data=source,
        sync_every=long,
        guards=BatchGuards(initial=8),
        merge=MergeSmallest(count=2, every=1, first_round=1),
        fates=MergeFates(inner_state=inner_state),
        placement=place(2, torch.device("cpu"), 1) if dist.is_initialized() else OneProcess(),
    )
    momenta: dict[int, list[float]] = {}

    def noted(merge: Any, trainers: Any, *rest: Any) -> Any:
        for trainer in trainers.values():
            flat = [each.flatten() for each in trainer.outer.momentum()]
            momenta[trainer.id] = torch.cat(flat).tolist() if flat else []
        return apply_merge(merge, trainers, *rest)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(round_module, "apply_merge", noted)
        report = run.round()
    assert report is not None and report.merges
    (survivor,) = run.trainers.values()
    mean = torch.cat([each.flatten() for each in survivor.outer.momentum()]).tolist()
    rolled_back = [(NO_SPIKE | row.more)["rolled_back"] for row in report.trainers]
    return rolled_back, [momenta[0], momenta[1]], mean
