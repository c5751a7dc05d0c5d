"""EF21: workers send how their pseudo-gradients change, and all keep the sum of the estimates."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from adloco import AdLoCo, BatchGuards, DiLoCo, MergeFates
from adloco.algorithms.merging import apply_merge
from adloco.distributed.codecs.int2 import Int2
from adloco.distributed.codecs.int4 import Int4
from adloco.distributed.codecs.topk import TopK
from adloco.rules.merge import Merge
from tests.problems import Interrupting, make_run, outer_sgd, params_of, regression

HALF = TopK(chunk=4, density=0.5, error_feedback=0.5, feedback="ef21")
"""The two largest of the weight's three values, and the bias; half of an estimate is kept."""


def top_two(values: Any) -> Any:
    """What `HALF` sends of a weight: its two largest values, each exactly."""
    kept = np.argsort(-np.abs(values), kind="stable")[:2]
    return np.where(np.isin(np.arange(3), kept), values, 0.0)


def zero_linear() -> nn.Linear:
    model = nn.Linear(3, 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def test_two_workers_equal_the_definition() -> None:
    """Each worker moves by numbers that bfloat16 has, so the format sends what it sends exactly."""
    models = [zero_linear(), zero_linear()]
    loop = DiLoCo(models, outer=outer_sgd(1.0), sync_every=1, wire=HALF)
    moves = np.array(
        [
            [[8.0, 2.0, -1.0], [4.0, -6.0, 0.5]],
            [[8.0, 2.0, -1.0], [-4.0, 1.0, 3.0]],
            [[0.0] * 3] * 2,
        ]
    )
    expected, estimates = np.zeros(3), np.zeros((2, 3))
    for of_round in moves:
        for model, move in zip(models, of_round, strict=True):
            with torch.no_grad():
                model.weight -= torch.tensor(move, dtype=torch.float32)
        loop.step()
        sent = np.array(
            [top_two(move / 2 - own) for move, own in zip(of_round, estimates, strict=True)]
        )
        estimates = estimates + sent
        expected = expected - estimates.sum(axis=0)
        estimates = estimates / 2
        for model in models:
            np.testing.assert_allclose(model.weight.detach()[0].numpy(), expected)
        kept = loop.state_dict()["residuals"]
        for (weight, _), own in zip(kept, estimates, strict=True):
            np.testing.assert_allclose(weight[0].numpy(), own)


def ef21_run(**changes: Any) -> AdLoCo:
    settings = {"wire": Int2(block=4, feedback="ef21"), "outer": outer_sgd(0.7, 0.9, True)}
    return make_run(**settings | changes)


def sums(run: AdLoCo, trainer: int = 0) -> tuple[Tensor, Tensor]:
    """The sum that all keep, and the sum of the workers' own estimates."""
    one = run.trainers[trainer]
    own = [run.workers[worker].replica.residuals for worker in one.worker_ids]
    return (
        torch.cat([tensor.flatten() for tensor in one.outer.estimates]),
        sum((torch.cat([each.flatten() for each in of]) for of in own), torch.zeros(4)),
    )


def test_a_constant_difference_is_sent_whole_after_a_while() -> None:
    """With a factor of 1 what is lost of a difference that stays becomes nothing, for each worker:
    what a format without feedback loses, it loses in every sync.
    """
    models = [zero_linear(), zero_linear()]
    wire = TopK(chunk=4, density=0.25, error_feedback=1.0, feedback="ef21")
    loop = DiLoCo(models, outer=outer_sgd(0.0), sync_every=1, wire=wire)
    moves = torch.tensor([[1.0, 2.0, 4.0], [3.0, -2.0, 1.0]])
    for _ in range(3):
        for model, move in zip(models, moves, strict=True):
            with torch.no_grad():
                model.weight -= move
        loop.step()
    torch.testing.assert_close(loop.state_dict()["outer"]["estimates"][0][0], moves.mean(dim=0))


def test_the_sum_is_that_of_the_estimates_and_survives_a_checkpoint() -> None:
    run, again = ef21_run(), ef21_run()
    list(run.rounds(3))
    kept, own = sums(run)
    assert kept.abs().sum() > 0
    torch.testing.assert_close(kept, own, rtol=1e-5, atol=1e-7)
    again.load_state_dict(copy.deepcopy(run.state_dict()))
    for each in (run, again):
        list(each.rounds(2))
    assert params_of(again).equal(params_of(run))
    assert all(a.equal(b) for a, b in zip(sums(again), sums(run), strict=True))


def test_a_lost_worker_and_a_merge_begin_anew() -> None:
    data = regression(4)
    whole = ef21_run(workers_per_trainer=3, data=data, guards=BatchGuards(initial=9))
    list(whole.rounds(2))
    left = ef21_run(workers_per_trainer=3, data=data, guards=BatchGuards(initial=9), dropped=(1,))
    left.load_state_dict(whole.state_dict())
    assert all(not each.any() for each in sums(left))
    list(left.rounds(2))
    torch.testing.assert_close(*sums(left), rtol=1e-5, atol=1e-7)

    three = ef21_run(num_trainers=3)
    list(three.rounds(2))
    before = sums(three, 2)
    for trainer, request in ((0, 10), (1, 30), (2, 60)):
        three.trainers[trainer].controller.requested_batch = request
    merge = Merge(survivor=1, absorbed=(0,), weights={0: 0.25, 1: 0.75})
    three.state.trainers = apply_merge(
        merge, three.trainers, three.workers, MergeFates(inner_state="mean"), three.placement
    )
    assert len(three.trainers[2].worker_ids) > 2
    assert all(not each.any() for each in sums(three, 1))
    for found, expected in zip(sums(three, 2), before, strict=True):
        torch.testing.assert_close(found, expected)
    list(three.rounds(2))
    for trainer in (1, 2):
        torch.testing.assert_close(*sums(three, trainer), rtol=1e-5, atol=1e-7)


class NotANumber(Interrupting):
    """A source whose first batch from now on, after `spoil`, is not finite."""

    spoilt = False

    def spoil(self) -> None:
        self.spoilt = True

    def read(self, stream: int, position: int, count: int) -> Any:
        inputs, targets = super().read(stream, position, count)
        factor, self.spoilt = (float("nan") if self.spoilt else 1.0), False
        return inputs, targets * factor


def test_a_restart_keeps_what_the_others_count_on() -> None:
    source = NotANumber(regression(2))
    run = ef21_run(on_nonfinite="restore", data=source)
    list(run.rounds(2))
    source.before(2, source.spoil)
    report = run.round()
    assert report is not None
    assert sum(row.restarts for row in report.workers) == 1
    torch.testing.assert_close(*sums(run), rtol=1e-5, atol=1e-7)


def test_settings_that_cannot_work() -> None:
    with pytest.raises(ValueError, match="feedback must be residual or ef21, got 'ef22'"):
        Int2(feedback="ef22")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="error_feedback must be > 0 where feedback is ef21"):
        Int4(feedback="ef21")
    first, second = ef21_run(), ef21_run(wire=Int2(block=4))
    with pytest.raises(ValueError, match=r"was 'ef21' when .* and is 'in params' here"):
        second.load_state_dict(first.state_dict())
