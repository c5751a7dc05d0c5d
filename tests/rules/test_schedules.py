"""Batch rules that follow a plan, by hand."""

import pytest

from adloco.rules.batch_rules.batch_rule import UNBOUNDED, BatchRule
from adloco.rules.batch_rules.constant import ConstantBatch
from adloco.rules.batch_rules.ramp import RampBatch
from adloco.rules.batch_rules.seesaw import Seesaw
from adloco.rules.batch_rules.warmup import BatchWarmup
from adloco.rules.controller import BatchController, BatchGuards
from adloco.rules.learning_rate import LearningRate
from tests.problems import at


def requests(rule: BatchRule, *samples: int) -> list[int]:
    return [rule.requested(None, at(seen)) for seen in samples]


def test_ramps() -> None:
    """From 4 to 64 over 400 samples: a factor of 16 is 2 per 100."""
    seen = (0, 100, 200, 300, 400, 9999)
    assert requests(RampBatch(first=4, last=64, over_samples=400), *seen) == [4, 8, 16, 32, 64, 64]
    assert requests(RampBatch(first=64, last=4, over_samples=400), *seen[:3]) == [64, 32, 16]


def test_seesaw_splits_the_cut_between_rate_and_batch() -> None:
    """Where the schedule cuts the rate to a quarter, the rate falls to a half and the batch grows
    from 8 to 32.
    """
    assert [
        Seesaw().requested(None, at(0, 99, initial_batch=8, decay=decay))
        for decay in (1, 0.5, 0.25, 0.1)
    ] == [8, 16, 32, 80]
    assert Seesaw().requested(None, at(0, decay=0.0)) == UNBOUNDED
    schedule = LearningRate(
        shape="wsd",
        total_tokens=1000,
        warmup_fraction=0.1,
        decay_fraction=0.5,
        final_fraction=0,
        coupling="sqrt",
        reference_batch=8,
    )
    # From 500 to 1000 tokens the rate falls linearly to 0: 0.25 is left after 875.
    assert schedule.decay(50) == schedule.decay(500) == 1.0
    assert schedule.decay(875) == 0.25
    assert schedule.factor(875, trainer_batch=32) == 0.5
    assert schedule.factor(50, trainer_batch=8) == 0.5  # The warm-up cuts the rate alone.


def test_the_first_round_has_the_first_batch_of_a_schedule() -> None:
    """batch.initial is 8; a growth of 2 limits later requests, not the first one."""
    firsts: list[tuple[BatchRule, int]] = [
        (RampBatch(first=2, last=64, over_samples=400), 2),
        (BatchWarmup(batches=[3, 64], after_samples=[0, 100]), 3),
        (BatchWarmup(batches=[64], after_samples=[100]), 8),
        (ConstantBatch(), 8),
        (Seesaw(), 8),
        (RampBatch(first=1, last=64, over_samples=400), 2),  # batch.minimum
        (RampBatch(first=999, last=64, over_samples=400), 50),  # batch.maximum
    ]
    guards = BatchGuards(initial=8, minimum=2, maximum=50, max_growth=2, grow_only=True)
    assert [BatchController(rule, guards).requested_batch for rule, _ in firsts] == [
        first for _, first in firsts
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RampBatch(first=0, last=4, over_samples=9), "^first must be > 0, got 0"),
        (lambda: RampBatch(first=1, last=0, over_samples=9), "^last must be > 0, got 0"),
        (lambda: RampBatch(first=1, last=4, over_samples=0), "^over_samples must be > 0, got 0"),
    ],
)
def test_bad_settings(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
