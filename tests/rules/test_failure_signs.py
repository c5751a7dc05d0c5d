"""Warnings about a run: each from records made for it, just above its threshold and just below."""

import math
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import pytest

from adloco.rules.failure_signs import (
    CAP_ROUNDS,
    EXPLODING_FACTOR,
    NewSigns,
    Sign,
    all_signs,
)

CAP = 64


def row(trainer: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "trainer": trainer,
        "requested_batch": 8,
        "trainer_batch": 8,
        "val_loss": None,
        "cosine_similarity": None,
        "distance_to_mean": None,
    } | fields


def record(number: int, *trainers: dict[str, Any], loss: float | None = None) -> dict[str, Any]:
    """A round whose loss falls by 1% from one to the next, unless it is given."""
    fallen = 3 * 0.99**number if loss is None else loss
    return {"round": number, "train_loss": fallen, "trainers": trainers or (row(),)}


def batches(requested: Sequence[int], trained: Sequence[int] | None = None) -> list[dict[str, Any]]:
    pairs = zip(requested, trained or requested, strict=True)
    return [
        record(number, row(requested_batch=asked, trainer_batch=used))
        for number, (asked, used) in enumerate(pairs, 1)
    ]


def losses(values: Sequence[float], batch: Sequence[int]) -> list[dict[str, Any]]:
    return [
        record(number, row(requested_batch=size, trainer_batch=size), loss=value)
        for number, (value, size) in enumerate(zip(values, batch, strict=True), 1)
    ]


def validations(
    *rounds: Sequence[float | None], distances: Sequence[float | None] = (0.1, 0.12, 0.15, 0.2)
) -> list[dict[str, Any]]:
    """Rounds by the losses of their trainers; the distance is that of the last trainer."""
    return [
        record(
            number,
            *(row(trainer, val_loss=loss) for trainer, loss in enumerate(losses[:-1])),
            row(len(losses) - 1, val_loss=losses[-1], distance_to_mean=distance),
        )
        for number, (losses, distance) in enumerate(zip(rounds, distances, strict=False), 1)
    ]


def cosines(*values: float | None) -> list[dict[str, Any]]:
    return [record(number, row(cosine_similarity=cos)) for number, cos in enumerate(values, 1)]


def warned(records: Sequence[dict[str, Any]]) -> tuple[int, Sign]:
    """The only warning, with the round after which it is given."""
    new = NewSigns(CAP)
    (found,) = [(each["round"], sign) for each in records for sign in new.see(each)]
    return found


def only(records: Sequence[dict[str, Any]]) -> Sign:
    return warned(records)[1]


def test_a_batch_at_its_cap_for_long() -> None:
    rising = [32, 48]
    after, sign = warned(batches([*rising, *[CAP] * CAP_ROUNDS]))
    assert (sign.kind, sign.trainer, sign.since, after) == ("batch at its cap", 0, 3, 22)
    assert sign.seen == ("trainer 0 has requested batch.maximum = 64 samples in 20 rounds in a row")
    assert all_signs(batches([*rising, *[CAP] * (CAP_ROUNDS - 1)]), CAP) == []
    interrupted = [CAP] * (CAP_ROUNDS - 1) + [CAP - 1] + [CAP] * (CAP_ROUNDS - 1)
    assert all_signs(batches(interrupted), CAP) == []
    # A rule that follows a plan reaches its maximum on purpose.
    assert all_signs(batches([CAP] * CAP_ROUNDS), None) == []


def test_a_batch_that_memory_decides() -> None:
    sign = only(batches([17] * CAP_ROUNDS, [8] * CAP_ROUNDS))
    assert "requests 17 samples and trains on 8, less than half, in 20 rounds" in sign.seen
    assert "switch.max_micro_batch" in sign.advice
    # Switch mode cuts by up to its multiplier, 2, on purpose.
    assert all_signs(batches([16] * CAP_ROUNDS, [8] * CAP_ROUNDS), CAP) == []


def test_a_request_that_explodes() -> None:
    high = 2 * EXPLODING_FACTOR
    after, sign = warned(batches([2, 2, 5, 11, high]))
    assert (sign.kind, sign.since, after) == ("request exploding", 2, 5)
    assert "rose from 2 to 32 samples between rounds 2 and 5" in sign.seen
    assert all_signs(batches([2, 2, 5, 11, high - 1]), CAP) == []
    # The same rise in four rounds, and by a rule that follows a plan.
    assert all_signs(batches([2, 4, 8, 16, high]), CAP) == []
    assert all_signs(batches([2, 2, 5, 11, high]), None) == []


@pytest.mark.parametrize(
    ("after", "batch", "given"),
    [
        (1.991, 12, True),  # 0.45% below 2.
        (1.989, 12, False),  # 0.55% below 2.
        (1.991, 11, False),  # Batches that hardly grow: the learning rate may have decayed.
        (2.1, 12, True),
    ],
)
def test_a_loss_that_stalls_while_batches_grow(after: float, batch: int, given: bool) -> None:
    records = losses([2.0] * 10 + [after] * 10, [8] * 10 + [batch] * 10)
    signs = all_signs(records, CAP)
    assert [sign.kind for sign in signs] == ["loss stalled while batches grow"] * given
    if given:
        assert signs[0].since == 11
        assert f"is {after:.4f}, that of the 10 before is 2.0000" in signs[0].seen
        assert "has 12 samples instead of 8" in signs[0].seen
    assert all_signs(records[:-1], CAP) == []


def test_a_loss_above_its_start() -> None:
    """5% above 2 is 2.1."""
    after, sign = warned(losses([2, 1.5, 2.11, 2.2, 2.3], [8] * 5))
    assert (sign.kind, sign.since, after) == ("loss above its start", 3, 5)
    assert "is 2.3000, and in 3 rounds in a row it was more than 5% above 2.0000" in sign.seen
    assert all_signs(losses([2, 2.2, 2.09, 2.2, 2.2], [8] * 5), CAP) == []
    assert all_signs(losses([2, 2.2, 2.2], [8] * 3), CAP) == []


def test_trainers_that_diverge() -> None:
    """Round 2 was not evaluated. The gap of the last is 3.45 / 3 - 1 = 15%."""
    rounds = [(3.0, 3.31), (None, None), (3.0, 3.36), (3.0, 3.45)]
    after, sign = warned(validations(*rounds))
    assert (sign.kind, sign.trainer, sign.since, after) == ("trainers diverge", None, 1, 4)
    assert "of trainer 1 is 3.4500, 15% above 3.0000 of trainer 0" in sign.seen
    assert "its parameters are 20.0% away from the mean of all trainers" in sign.seen
    assert "; 2 evaluations ago the widest gap was 10%, and it was 10.0% away" in sign.seen
    assert all_signs(validations((3.0, 3.29), *rounds[1:]), CAP) == []  # 9.7%
    assert all_signs(validations((3.0, 3.6), *rounds[1:]), CAP) == []  # It closes.
    assert all_signs(validations(*rounds[2:]), CAP) == []
    # Trainers that come closer again, after a merge for instance, or whose distance is unknown.
    assert all_signs(validations(*rounds, distances=(0.2, 0.3, 0.25, 0.2)), CAP) == []
    assert all_signs(validations(*rounds, distances=(0.1, 0.12, None, 0.2)), CAP) == []
    # Healthy trainers move apart too.
    assert all_signs(validations(*[(3.0, 3.01)] * 4), CAP) == []
    merged = [*validations(*rounds[:3]), *validations((3.0,)), *validations((3.0,))]
    assert all_signs(merged, CAP) == []


def test_workers_whose_cosine_falls() -> None:
    start = [0.6, 0.4, 0.5, 0.5, 0.5]
    after, sign = warned(cosines(None, *start, 0.3, *[0.09] * 5))
    assert (sign.kind, sign.trainer, sign.since, after) == ("workers disagree", 0, 8, 12)
    assert "from 0.50 in its first 5 rounds to 0.09 in the last 5" in sign.seen
    assert all_signs(cosines(*start, *[0.11] * 10), CAP) == []
    assert all_signs(cosines(*start, *[0.09] * 4), CAP) == []
    # 0.09 is a fall by less than two thirds, and -0.2 to -0.5 begins with nothing in common.
    assert all_signs(cosines(*[0.26] * 5, *[0.09] * 10), CAP) == []
    assert all_signs(cosines(*[-0.2] * 5, *[-0.5] * 10), CAP) == []


def test_workers_that_have_the_same_samples() -> None:
    after, sign = warned(cosines(None, 0.5, 1.0, 0.99999997))
    assert (sign.kind, sign.trainer, sign.since, after) == ("workers alike", 0, 3, 3)
    assert all_signs(cosines(0.9999), CAP) == []


def test_a_lossy_format_hides_what_workers_have_in_common() -> None:
    """The first ten rounds of `adloco train diloco --run.tokens 200k`, whose loss falls."""
    cosine = (0.45, 0.25, 0.15, 0.08, 0.06, 0.05, 0.05, 0.06, 0.06, 0.07)
    error = (0.53, 0.60, 0.63, 0.65, 0.66, 0.67, 0.67, 0.67, 0.68, 0.68)
    pairs = [*zip(cosine, error, strict=True)]
    rounds = [
        record(number, row(cosine_similarity=alike, wire_error=lost))
        for number, (alike, lost) in enumerate(pairs, 1)
    ]
    assert all_signs(rounds, CAP) == []
    fewer_lost = [
        record(number, row(cosine_similarity=alike, wire_error=lost / 2))
        for number, (alike, lost) in enumerate(pairs, 1)
    ]
    assert only(fewer_lost).kind == "workers disagree"


def test_numbers_that_are_not_finite() -> None:
    workers = [
        {"worker": worker, "trainer": worker // 2, "skipped_steps": steps, "restarts": restarts}
        for worker, steps, restarts in ((0, 0, 0), (1, 0, 0), (2, 1, 0), (3, 0, 2))
    ]
    trainers = row(0), row(1)
    rounds = [record(number, *trainers) | {"workers": workers} for number in (2, 3)]
    after, sign = warned([record(1, *trainers), *rounds])
    assert (sign.kind, sign.trainer, after) == ("numbers not finite", 1, 2)
    assert "trainer 1's workers were not finite in 3 inner steps of a round, 2 of" in sign.seen
    assert "worker 3's" in sign.seen
    assert all_signs([record(1) | {"workers": workers[:2]}], CAP) == []


def test_a_warning_is_given_once_for_each_trainer() -> None:
    watch = NewSigns(CAP)
    found = []
    for number in range(1, 3 * CAP_ROUNDS):
        late = CAP if number > CAP_ROUNDS else CAP - 1
        of_each = (
            row(trainer, requested_batch=asked, trainer_batch=asked)
            for trainer, asked in enumerate((CAP, late))
        )
        found += [(sign.trainer, number) for sign in watch.see(record(number, *of_each))]
    assert found == [(0, 20), (1, 40)]


@pytest.mark.parametrize("number", [None, math.nan, math.inf, -math.inf])
def test_numbers_that_are_missing_or_not_finite_warn_of_nothing(number: float | None) -> None:
    broken = dict.fromkeys(
        ("requested_batch", "trainer_batch", "val_loss", "cosine_similarity", "distance_to_mean"),
        number,
    )
    rounds = range(1, 3 * CAP_ROUNDS)
    records = [
        record(index, row(0, **broken), row(1, **broken)) | {"train_loss": number}
        for index in rounds
    ]
    assert all_signs(records, CAP) == []
    # Between numbers that warn: the cosine is that of the last five which were measured.
    some = [*cosines(0.5, 0.5, 0.5, 0.5, 0.5), *cosines(number), *cosines(*[0.05] * 5)]
    assert [sign.kind for sign in all_signs(some, CAP)] == ["workers disagree"]


def test_a_request_of_nothing_is_no_division_by_nothing() -> None:
    assert all_signs(batches([0, EXPLODING_FACTOR - 1]), CAP) == []
    assert [sign.kind for sign in all_signs(batches([0, EXPLODING_FACTOR]), CAP)] == [
        "request exploding"
    ]


class Kept(dict[str, Any]):
    """A record that can be counted."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def test_a_watch_keeps_few_records() -> None:
    watch, alive = NewSigns(CAP), WeakSet[Kept]()
    for number in range(1, 300):
        one = Kept(record(number, row(val_loss=2.0, cosine_similarity=0.5), row(1, val_loss=2.0)))
        alive.add(one)
        watch.see(one)
    assert len(alive) <= CAP_ROUNDS + 3
