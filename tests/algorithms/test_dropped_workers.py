"""Workers that are dropped from a run: the others continue without them (`method.dropped`)."""

from typing import Any

import numpy as np
import pytest
import torch

from adloco import BatchGuards, place
from adloco.algorithms.adloco import AdLoCo
from adloco.distributed.testing import run_on_ranks
from adloco.rules.learning_rate import LearningRate
from adloco.rules.merge_policies.smallest import MergeSmallest
from tests.problems import Interrupting, make_run, regression, round_with_ends, sgd


def run_with(batch: int, dropped: tuple[int, ...], **changes: Any) -> AdLoCo:
    """A trainer with three workers, or two of two, without some of them; plain means."""
    sizes = {"workers_per_trainer": 3, "outer": None} | changes
    data = regression(4)
    return make_run(data=data, guards=BatchGuards(initial=batch), dropped=dropped, **sizes)


def parameters(run: AdLoCo, trainer: int = 0) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in run.model(trainer).parameters()])


def test_the_others_go_on_without_a_dropped_worker() -> None:
    """The new global parameters are the mean of the two that are left, weighted by samples."""
    whole = run_with(9, ())
    whole.round()
    state = whole.state_dict()
    left, first, third = (
        run_with(batch, dropped) for batch, dropped in ((5, (1,)), (3, (1, 2)), (2, (0, 1)))
    )
    for run in (left, first, third):
        run.load_state_dict(state)
        for trainer in run.trainers.values():
            trainer.controller.requested_batch = {left: 5, first: 3, third: 2}[run]
        run.round()
    assert left.trainers[0].worker_ids == [0, 2]
    expected = (3 * parameters(first) + 2 * parameters(third)) / 5
    torch.testing.assert_close(parameters(left), expected)
    assert left.state.samples == whole.state.samples + 5 * 3


def test_a_round_that_goes_on_without_a_worker_weighs_what_was_trained() -> None:
    """Three workers take 3 samples each. The first two have taken all three steps and the third one
    two when the round stops; it goes on without the second one, so that the third takes 4.
    """
    source = Interrupting(regression(3))
    sizes = {"workers_per_trainer": 3, "outer": None, "sync_every": 3}
    whole = make_run(data=source, guards=BatchGuards(initial=9), **sizes)
    source.before(2, whole.stop, streams=[2])
    assert whole.round() is None
    assert [len(worker.round.losses) for worker in whole.workers.values()] == [3, 3, 2]
    left = run_with(9, (1,), sync_every=3)
    left.load_state_dict(whole.state_dict())
    assert left.state.saved_samples == left.state.samples_so_far == 9 + 6
    report, (first, third) = round_with_ends(left)
    torch.testing.assert_close(parameters(left), (9 * first + 10 * third) / 19)
    assert [row.samples for row in report.steps] == [3, 3, 3, 3, 3, 4]
    losses = [row.loss * row.samples for row in report.steps]
    assert report.train_loss == pytest.approx(sum(losses) / 19)


@pytest.mark.parametrize("dropped", [(1,), (2, 3)])
def test_the_rate_of_a_round_that_goes_on_without_workers(dropped: tuple[int, ...]) -> None:
    """Two trainers of two workers, which take 4 samples each. The round stops when the first worker
    has taken two of four steps and the others none. The rate grows by 1e-4 for each sample
    that counts; without worker 1, worker 0 takes 8 of them.
    """
    source, rates = Interrupting(regression(4)), list[float]()
    rate = LearningRate(shape="constant", total_tokens=1000, warmup_fraction=1)
    sizes: dict[str, Any] = {"workers_per_trainer": 2, "num_trainers": 2, "sync_every": 4}
    sizes |= {"learning_rate": rate, "inner": sgd(0.1)}
    whole = make_run(data=source, outer=None, guards=BatchGuards(initial=8), **sizes)
    source.before(2, whole.stop, streams=[0])
    assert whole.round(final_samples=18) is None
    assert [len(worker.round.losses) for worker in whole.workers.values()] == [2, 0, 0, 0]
    left = run_with(8, dropped, **sizes)
    left.load_state_dict(whole.state_dict())
    (optimizer,) = left.workers[0].optimizers
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    report = left.round()
    assert report is not None
    samples = np.zeros(4)
    for row in report.steps:
        samples[row.inner_step - 1] += row.samples
    assert rates == pytest.approx(1e-4 * np.cumsum(samples)[2:])


def test_those_that_are_left_do_not_take_the_last_samples_of_a_dropped_trainer() -> None:
    """The last step has 14 samples for four trainers that take 4 each; one of them is left."""
    source, sizes = Interrupting(regression(4)), {"workers_per_trainer": 1, "num_trainers": 4}
    whole = make_run(data=source, outer=None, guards=BatchGuards(initial=4), **sizes)
    source.before(1, whole.stop)
    assert whole.round(final_samples=14) is None
    left = run_with(4, (1, 2, 3), **sizes)
    left.load_state_dict(whole.state_dict())
    report = left.round()
    assert report is not None
    assert [row.samples for row in report.steps] == [4, 4, 4]


def test_a_trainer_ends_with_its_last_worker() -> None:
    policy = MergeSmallest(count=2, every=1, first_round=2)
    sizes = {"num_trainers": 2, "workers_per_trainer": 2, "merge": policy}
    whole = run_with(4, (), **sizes)
    whole.round()
    left = run_with(4, (0, 1, 3), **sizes)
    left.load_state_dict(whole.state_dict())
    assert {number: each.worker_ids for number, each in left.trainers.items()} == {1: [2]}
    report = left.round()
    assert report is not None
    assert not report.merges
    assert [row.worker for row in report.workers] == [2]
    assert [*run_with(4, (2, 3), **sizes).trainers] == [0], "also in a run that begins so"


def on_ranks() -> tuple[list[int], Any]:
    with pytest.raises(ValueError, match=r"workers \[0, 1, 2\], but \[0, 2\] train here"):
        run_with(6, (1,), placement=place(3))
    run = run_with(6, (1,), placement=place([0, 2]))
    run.round()
    run.round()
    return sorted(run.workers), run.state_dict().get("trainer-0")  # On rank 0 only.


def test_ranks_share_the_workers_that_are_left() -> None:
    one = run_with(6, (1,))
    one.round()
    one.round()
    expected = one.state_dict()["trainer-0"]["outer"]["params"][0]
    (zero, found), (two, _) = run_on_ranks(on_ranks, 2)
    assert (zero, two) == ([0], [2])
    assert torch.equal(found["outer"]["params"][0], expected)


@pytest.mark.parametrize("dropped", [(0, 1, 2), (3,), (1, 1), (-1,)])
def test_who_may_be_dropped(dropped: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="dropped must be some of the workers 0 to 2, not all"):
        run_with(6, dropped)


def test_bytes_of_a_worker_go_on_without_a_jump() -> None:
    """They are a mean over the run's workers, of which there were more before."""
    whole = run_with(9, ())
    before = [report.bytes_communicated for report in whole.rounds(2)]
    left = run_with(9, (1,))
    left.load_state_dict(whole.state_dict())
    after = [report.bytes_communicated for report in left.rounds(2)]
    sent = np.diff([0, *before, *after])
    assert sent == pytest.approx([before[0]] * 4)


def test_the_loss_of_a_trainer_is_the_mean_over_its_samples() -> None:
    """Of three workers that take 2, 1 and 1 samples a step."""
    report = run_with(4, ()).round()
    assert report is not None
    losses = [row.loss * row.samples for row in report.steps]
    assert report.trainers[0].train_loss == pytest.approx(sum(losses) / 12)
