"""The gate before a sync: one bad worker of eight costs next to nothing, on all placements."""

import copy
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from adloco import AdLoCo, BatchGuards, Int4, NonFiniteLossError
from adloco.algorithms.trainer_distance import BUCKETS
from adloco.distributed.dtensor import gather_shards
from adloco.distributed.launch.launcher import place
from adloco.distributed.testing import run_on_ranks
from adloco.distributed.wire.int1 import Int1
from adloco.lab.gate.option import Gate
from adloco.rules.sync_schedule import Streaming
from tests.problems import (
    TWO_WORKERS_PLACED,
    BlockLM,
    Recording,
    adamw,
    cases,
    make_run,
    next_token,
    outer_sgd,
    params_of,
    regression,
    tokens,
)

BAD = 3


def eight(**changes: Any) -> AdLoCo:
    """A language model, trained by eight workers."""
    told: dict[str, Any] = {
        "build_model": BlockLM,
        "loss_fn": next_token,
        "data": tokens(4000, 8),
        "workers_per_trainer": 8,
        "inner": adamw(0.01),
        "outer": outer_sgd(0.7, 0.6, True),
        "sync_every": 4,
        "guards": BatchGuards(initial=32),
    }
    return make_run(**told | changes)


def faulty(run: AdLoCo, factor: float) -> Callable[[str], AbstractContextManager[None]]:
    """A phase of `round` that multiplies worker BAD's pseudo-gradient before each sync."""
    done: list[int] = []

    @torch.no_grad()
    def phase(name: str) -> AbstractContextManager[None]:
        if name == "sync" and run.state.rounds_done not in done and BAD in run.workers:
            done.append(run.state.rounds_done)
            start = run.trainers[0].outer.global_params
            for own, before in zip(run.workers[BAD].replica.params, start, strict=True):
                own.copy_(before + factor * (own - before))
        return nullcontext()

    return phase


def loss_after(run: AdLoCo, rounds: int, factor: float) -> float:
    """Mean loss of the workers over 400 samples, with the global parameters after these rounds."""
    phase = faulty(run, factor) if factor != 1 else lambda name: nullcontext()
    try:
        for _ in range(rounds):
            assert run.round(phase=phase) is not None
    except NonFiniteLossError:
        return math.inf
    with torch.no_grad():
        return float(next_token(run.model(0), tokens(400, 1).read(0, 0, 400)))


@pytest.mark.parametrize(
    ("factor", "wire"),
    cases(
        {
            "100x": (100.0, None),
            "flipped": (-1.0, None),
            "both": (-100.0, None),
            "100x, int4": (100.0, Int4()),
            "flipped, int4": (-1.0, Int4()),
            "both, int4": (-100.0, Int4()),
        },
        default=("flipped", "100x, int4"),
    ),
)
def test_one_bad_worker_of_eight_costs_next_to_nothing(factor: float, wire: Any) -> None:
    good, gated = (
        loss_after(eight(wire=wire, options=[gate]), 6, by)
        for gate, by in ((Gate(), 1), (Gate(gate=True), factor))
    )
    assert gated == pytest.approx(good, rel=0.01)
    if factor != -1:  # One flipped of eight slows the others down by a fourth, no more.
        assert not loss_after(eight(wire=wire), 6, factor) <= 1.01 * good


def test_a_flipped_worker_is_left_out_of_each_sync() -> None:
    run = eight(options=[Gate(gate=True)])
    phase = faulty(run, -1)
    for _ in range(4):
        report = run.round(phase=phase)
        assert report is not None
        assert [row.worker for row in report.workers if row.more["syncs_left_out"]] == [BAD]


def test_a_gate_changes_nothing_without_a_bad_worker() -> None:
    plain, gated = eight(), eight(options=[Gate(gate=True)])
    reports = [list(run.rounds(4)) for run in (plain, gated)]
    assert params_of(plain).equal(params_of(gated))
    rows = [row for report in reports[1] for row in report.workers]
    assert not any(row.more["syncs_left_out"] for row in rows)
    assert all(
        row.more["cosine_with_others"] and row.more["cosine_with_others"] > 0.1 for row in rows
    )
    sent = [report.bytes_communicated for report in (reports[0][-1], reports[1][-1])]
    assert sent[1] - sent[0] == 4 * 8 * BUCKETS


@pytest.mark.parametrize(
    "wire",
    [*(pytest.param(wire, marks=pytest.mark.nightly) for wire in (None, Int4())), Int1(block=16)],
)
def test_a_worker_that_is_left_out_leaves_no_trace(wire: Any) -> None:
    """Nor does it come back as a residual: the others train as if it had not moved."""
    rounds = []
    for factor in (100.0, -300.0):
        run = eight(wire=wire, options=[Gate(gate=True)], guards=BatchGuards(initial=16))
        report = run.round(phase=faulty(run, factor))
        assert report is not None
        assert [row.worker for row in report.workers if row.more["syncs_left_out"]] == [BAD]
        assert report.workers[BAD].more["relative_norm"] == pytest.approx(abs(factor), rel=0.3)
        run.round()
        rounds.append(params_of(run))
    assert rounds[0].equal(rounds[1])


def gated_run(shards: int, replicas: int) -> tuple[list[Any], list[float]]:
    run = eight(
        workers_per_trainer=4,
        options=[Gate(gate=True)],
        guards=BatchGuards(initial=16),
        streaming=Streaming(fragments=2),
        placement=place(4, torch.device("cpu"), 1, shards, replicas),
    )
    seen = []
    for factor in (1.0, -20.0):
        report = run.round(phase=faulty(run, factor))
        assert report is not None
        seen += [
            (row.more["syncs_left_out"], row.more["relative_norm"], row.more["cosine_with_others"])
            for row in report.workers
        ]
    whole = gather_shards(list(run.trainers[0].outer.global_params))
    flat: Tensor = torch.cat([tensor.detach().flatten() for tensor in whole])
    return seen, flat.tolist()


@pytest.mark.parametrize(("ranks", "shards", "replicas"), TWO_WORKERS_PLACED)
def test_all_placements_leave_out_the_same(ranks: int, shards: int, replicas: int) -> None:
    seen, params = gated_run(1, 1)
    assert [left_out for left_out, _, _ in seen] == [0, 0, 0, 0, 0, 0, 0, 2]
    for found, own in run_on_ranks(gated_run, ranks, shards, replicas):
        assert [row[0] for row in found] == [row[0] for row in seen]
        for row, expected in zip(found, seen, strict=True):
            assert row[1:] == pytest.approx(expected[1:], rel=1e-6)
        assert own == pytest.approx(params, rel=1e-6)


def test_the_verdicts_of_a_round_survive_a_stop_in_it() -> None:
    run = eight(options=[Gate(gate=True)], streaming=Streaming(fragments=2))
    phase = faulty(run, 100.0)

    def stopping(name: str) -> AbstractContextManager[None]:
        if name == "inner_steps" and run.state.events_done == 1:
            run.stop()
        return phase(name)

    assert run.round(phase=stopping) is None
    resumed = eight(options=[Gate(gate=True)], streaming=Streaming(fragments=2))
    resumed.load_state_dict(copy.deepcopy(run.state_dict()))
    report = resumed.round()
    assert report is not None
    assert report.workers[BAD].more["syncs_left_out"] >= 1


def test_with_texts_of_their_own_the_workers_of_an_island_are_compared() -> None:
    """Six workers of two islands; the last two read targets a hundred times as large."""
    left_out = {}
    for islands in (1, 2):
        run = make_run(
            workers_per_trainer=6,
            data=LargeTargets(regression(6)),
            islands=islands,
            options=[Gate(gate=True, gate_cosine=-1.0)],
            guards=BatchGuards(initial=60),
        )
        report = run.round()
        assert report is not None
        left_out[islands] = [row.worker for row in report.workers if row.more["syncs_left_out"]]
    assert left_out == {1: [4, 5], 2: [3]}


class LargeTargets(Recording):
    """A source of which two streams have targets a hundred times as large."""

    def read(self, stream: int, position: int, count: int) -> Any:
        inputs, targets = super().read(stream, position, count)
        return inputs, targets * (100 if stream >= 4 else 1)
