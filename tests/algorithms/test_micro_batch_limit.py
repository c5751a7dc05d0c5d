"""A step that runs out of memory is repeated with halved micro-batches on the same samples; all
workers use the smaller micro-batches from then on.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing import ProcessRaisedException

from adloco import AdLoCo, BatchGuards, NormTest, SwitchMode
from adloco.algorithms.reports import Change
from adloco.distributed.launch.launcher import place
from adloco.distributed.testing import run_on_ranks
from adloco.errors import OutOfMemoryError
from tests.problems import BlockLM, adamw, make_run, next_token, outer_sgd, params_of, tokens


class Small:
    """A device on which only this many samples fit, from one of its calls on."""

    def __init__(self, fits: int, first_call: int = 0, message: str = "") -> None:
        self.fits, self.first_call, self.message, self.calls = fits, first_call, message, 0

    def __call__(self, model: Any, ids: Tensor) -> Tensor:
        self.calls += 1
        loss = next_token(model, ids)
        if len(ids) > self.fits and self.calls > self.first_call:
            raise (
                torch.OutOfMemoryError("no memory left")
                if not self.message
                else RuntimeError(self.message)
            )
        return loss


def language(loss: Any, **changes: Any) -> AdLoCo:
    return make_run(
        **(
            {
                "build_model": BlockLM,
                "loss_fn": loss,
                "data": tokens(500, 2),
                "inner": adamw(0.01),
                "outer": outer_sgd(0.7, 0.9),
                "sync_every": 3,
                "guards": BatchGuards(initial=24, minimum=24, maximum=24),
                "switch": SwitchMode(max_micro_batch=12),
            }
            | changes
        )
    )


def test_the_same_samples_in_smaller_pieces() -> None:
    """A worker's 12 samples do not fit, nor do 6, but 3 do; the result equals that of a run whose
    passes never had more than 3.
    """
    small, plain = (
        language(Small(3)),
        language(next_token, switch=SwitchMode(max_micro_batch=12, pass_limit=3)),
    )
    reports = [list(run.rounds(3)) for run in (small, plain)]
    ran_out = Change(setting="pass_limit", before=12, after=3, reason="memory ran out")
    assert [report.changes for report in reports[0]] == [(ran_out,), (), ()]
    assert [report.changes for report in reports[1]] == [()] * 3
    assert [report.trainers[0].micro_batch for report in reports[0]] == [12, 3, 3]
    assert [report.trainers[0].accumulation_steps for report in reports[0]] == [1, 4, 4]
    assert [report.trainers[0].trainer_batch for report in reports[0]] == [24, 24, 24]
    torch.testing.assert_close(params_of(small), params_of(plain), rtol=1e-9, atol=1e-12)


def test_in_the_middle_of_a_step_that_accumulates_and_tests() -> None:
    """The third of four groups fails; the statistics of the first two count only once."""
    small = language(
        Small(1, first_call=2),
        batch=NormTest(),
        workers_per_trainer=1,
        guards=BatchGuards(initial=8, minimum=8, maximum=8),
    )
    plain = language(
        next_token,
        batch=NormTest(),
        workers_per_trainer=1,
        guards=BatchGuards(initial=8, minimum=8, maximum=8),
    )
    small.round()
    plain.round()
    torch.testing.assert_close(params_of(small), params_of(plain), rtol=1e-9, atol=1e-12)
    estimate = small.trainers[0].controller.estimate
    assert estimate is not None
    assert small.state.pass_limit == 1


def test_the_limit_resumes_from_a_checkpoint() -> None:
    run, resumed = language(Small(4)), language(Small(4))
    run.round()
    resumed.load_state_dict(copy.deepcopy(run.state_dict()))
    assert resumed.state.pass_limit == run.state.pass_limit == 3
    report = resumed.round()
    assert report is not None
    assert (report.changes, report.trainers[0].micro_batch) == ((), 3)


def test_the_limit_of_a_worker_lasts_when_its_round_is_stopped_and_resumed() -> None:
    """It reaches the other workers, and the report, with the end of the round."""
    stopping = Small(4)

    def stops(model: Any, ids: Tensor) -> Tensor:
        if stopping.calls > 2:
            run.stop()
        return stopping(model, ids)

    run = language(stops)
    assert run.round() is None
    resumed = language(next_token)  # It never runs out itself.
    resumed.load_state_dict(copy.deepcopy(run.state_dict()))
    report = resumed.round()
    assert report is not None and report.changes[0].after == 3
    assert resumed.state.pass_limit == 3


def test_the_allocator_of_the_cpu_is_understood_and_other_errors_are_not_caught() -> None:
    run = language(
        Small(
            6,
            message=(
                "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you "
                "tried to allocate 9 bytes"
            ),
        )
    )
    run.round()
    assert run.state.pass_limit == 6
    with pytest.raises(RuntimeError, match="something else"):
        language(Small(6, message="something else")).round()


def test_one_sample_that_does_not_fit_ends_the_run() -> None:
    with pytest.raises(
        OutOfMemoryError,
        match="memory ran out with micro-batches of 1 on cpu; one sample does not fit; make the",
    ):
        language(Small(0)).round()


class Counting(nn.Module):
    """A language model whose running statistics see every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = BlockLM(), nn.BatchNorm1d(7).double()

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.norm(self.body(ids).transpose(1, 2)).transpose(1, 2)
        return logits


def forgets_the_attempt(batch: Any) -> None:
    """Halved micro-batches leave the running statistics of those that fit."""
    guards = BatchGuards(initial=24, minimum=24, maximum=24)
    settings = {"build_model": Counting, "workers_per_trainer": 1, "guards": guards, "batch": batch}
    small = language(
        Small(6, first_call=2), **settings, switch=SwitchMode(max_micro_batch=12, mode="always")
    )
    plain = language(
        next_token, **settings, switch=SwitchMode(max_micro_batch=12, mode="always", pass_limit=6)
    )
    small.round()
    plain.round()
    for mine, theirs in zip(
        small.workers[0].model.buffers(), plain.workers[0].model.buffers(), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_running_statistics_forget_the_attempt() -> None:
    forgets_the_attempt(NormTest())


class OnOneRank(Small):
    def __call__(self, model: Any, ids: Tensor) -> Tensor:
        self.fits = 5 if torch.distributed.get_rank() == 1 else 100
        return super().__call__(model, ids)


def on_ranks() -> tuple[int, int]:
    """The agreed limit, and the first worker's micro-batch afterwards."""
    run = language(
        OnOneRank(5), workers_per_trainer=2, placement=place(2, torch.device("cpu"), 1, 1, 1)
    )
    run.round()
    report = run.round()
    assert report is not None
    return run.state.pass_limit, report.trainers[0].micro_batch


def test_all_ranks_take_the_smaller_ones() -> None:
    assert run_on_ranks(on_ranks, 2) == [(3, 3)] * 2


def test_an_island_ends_with_what_to_set(tmp_path: Path) -> None:
    """The other ranks are in the middle of the step and cannot begin it again."""
    # Of whichever rank is seen first: the other one has lost its connection.
    with pytest.raises(ProcessRaisedException):
        run_on_ranks(ends, 2, tmp_path / "said")
    assert (
        tmp_path / "said"
    ).read_text() == "memory ran out with micro-batches of 12 on cpu; set switch.pass_limit 6"


def ends(said: Path) -> None:
    run = language(
        OnOneRank(5), workers_per_trainer=1, placement=place(1, torch.device("cpu"), 1, 1, 2)
    )
    try:
        run.round()
    except OutOfMemoryError as error:
        said.write_text(str(error))
        raise
