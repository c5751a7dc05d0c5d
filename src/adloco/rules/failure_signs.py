"""Signs that a run may fail, found in its records (lines of metrics.jsonl; docs/run-folder.md).

Each sign looks at the newest record and at a few before it, which are kept. Numbers that are
missing or not finite count as not measured.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

Record = Mapping[str, Any]

CAP_ROUNDS = 20
"""A batch at its cap for fewer rounds is common at the end of a run, where batches are largest."""
CLIPPED = 2.0
"""A request counts as cut off if it is more than this many times what is trained. Switch mode cuts
by up to its multiplier, which is 2 by default, on purpose.
"""
EXPLODING_ROUNDS = 3
EXPLODING_FACTOR = 16
"""Three tests with the `batch.max_growth` of 2 of the shipped recipes raise a request by 8."""
STALL_ROUNDS = 10
"""The loss of so many rounds is compared with that of as many before; a mean over ten hides the
noise of one round.
"""
STALL_FALL = 0.005
"""In our runs of 30 rounds the loss falls by 5% to 20% in ten rounds; half a percent is noise."""
STALL_GROWTH = 1.5
"""Growth of batches at which ten rounds train on half as many tokens more as the ten before."""
ABOVE_ROUNDS = 3
ABOVE_START = 1.05
"""A loss hovers around its start where there is nothing to learn; 5% above it is more than that."""
GAP = 0.1
"""Trainers of the same settings differed by up to 8% in their first evaluations, then by less."""
GAP_EVALUATIONS = 3
"""Evaluations in which the gap of the losses must not close and the distance must grow. Independent
trainers of healthy runs move apart too, so a distance alone warns of nothing.
"""
COSINE_ROUNDS = 5
COSINE_START = 0.15
"""Workers that had less in common at the start have no fall to warn of. Healthy runs begin with
0.2 to 0.7.
"""
COSINE_LOW = 0.1
"""With a cosine of 0.1, the mean of ten workers has as much noise as common direction: their mean
has the squared norm 0.1 + 0.9 / 10. Healthy runs stay above it while the learning rate is high.
"""
COSINE_FALL = 1 / 3
"""Healthy cosines fell to half of their start, when the learning rate had decayed."""
COSINE_ERROR = 0.5
"""A format that loses more of the norm hides what workers have in common: the recipe `diloco` sends
1 bit and loses 0.5 to 0.8; its cosines fall from 0.5 to 0.05, and with 4 bits only to 0.16.
"""

COSINE_ALIKE = 0.999999
"""Workers that have seen other samples are further apart than this."""


@dataclass(frozen=True, kw_only=True)
class Sign:
    """A warning about a run."""

    kind: str
    trainer: int | None = None
    """Whose sign it is; None: of the whole run."""
    since: int
    """The first of the rounds that show the sign."""
    seen: str
    """The sign, with its numbers."""
    meaning: str
    """The problem that it may point to."""
    advice: str
    """The change that may help."""

    @property
    def text(self) -> str:
        """The warning in one line."""
        return f"{self.kind} since round {self.since}: {self.seen}. {self.meaning}. {self.advice}."


SignsOfRound = Callable[[Record], Iterator[Sign]]


class NewSigns:
    """Gives each warning of a run once, when it begins.

    Args:
        cap: `batch.maximum` if a batch rule that measures gradients decides the batch; None for a
            rule that follows a plan, whose jumps and caps are intended.
        more: Functions that give further signs of a round.
    """

    def __init__(self, cap: int | None, more: Sequence[SignsOfRound] = ()) -> None:
        self._past, self._more = _Past(cap=cap), more
        self._given: set[tuple[str, int | None]] = set()

    def see(self, record: Record) -> list[Sign]:
        """The warnings that begin with this record, the next of the run."""
        past = self._past
        past.add(record)
        found = [sign for row in record["trainers"] for sign in _of_trainer(past, row["trainer"])]
        found += [*_of_run(past), *(sign for own in self._more for sign in own(record))]
        signs = [sign for sign in found if (sign.kind, sign.trainer) not in self._given]
        self._given |= {(sign.kind, sign.trainer) for sign in signs}
        return signs


def all_signs(
    records: Sequence[Record], cap: int | None, more: Sequence[SignsOfRound] = ()
) -> list[Sign]:
    """Every warning of these records, once; `cap` and `more` are those of `NewSigns`."""
    new = NewSigns(cap, more)
    return [sign for record in records for sign in new.see(record)]


@dataclass(kw_only=True)
class _Past:
    """The parts of the records so far that the signs need."""

    cap: int | None
    start: Any = None
    """The train loss of the first round."""
    records: list[Record] = field(default_factory=list)
    """The last ones."""
    cosines: dict[int, list[float]] = field(default_factory=dict)
    """The first cosines of each trainer, from before the last `COSINE_ROUNDS` records."""
    evaluated: list[tuple[Record, dict[int, float]]] = field(default_factory=list)
    """The last evaluations of several trainers, with their losses."""

    def add(self, record: Record) -> None:
        """Take the next record."""
        self.start = self.start if self.records else record["train_loss"]
        self.records = [*self.records, record][-max(CAP_ROUNDS, 2 * STALL_ROUNDS) :]
        before = self.records[:-COSINE_ROUNDS][-1:]
        for row in (row for record in before for row in record["trainers"]):
            first = self.cosines.setdefault(row["trainer"], [])
            if len(first) < COSINE_ROUNDS and is_finite(row.get("cosine_similarity")):
                first.append(row["cosine_similarity"])
        losses = {
            row["trainer"]: row["val_loss"]
            for row in record["trainers"]
            if is_finite(row.get("val_loss")) and row["val_loss"] > 0
        }
        if len(record["trainers"]) < 2:
            self.evaluated = []
        elif len(losses) > 1:
            self.evaluated = [*self.evaluated, (record, losses)][-GAP_EVALUATIONS:]


def _of_trainer(past: _Past, trainer: int) -> Iterator[Sign]:
    """The signs of one trainer."""
    if past.cap is not None:
        yield from _of_batches(past, past.cap, trainer)

    newest = _numbers(past.records[-1:], trainer, "cosine_similarity")
    if newest and newest[0] >= COSINE_ALIKE:
        yield Sign(
            kind="workers alike",
            seen=f"the pseudo-gradients of trainer {trainer}'s workers are the same",
            meaning="The workers may have the same samples, so that all but one add nothing",
            advice="Let the data's read give each stream samples of its own",
            since=past.records[-1]["round"],
            trainer=trainer,
        )

    window, first = past.records[-COSINE_ROUNDS:], past.cosines.get(trainer, [])
    recent = _numbers(window, trainer, "cosine_similarity")
    if (
        min(len(recent), len(first)) == COSINE_ROUNDS
        and fmean(first) >= COSINE_START
        and fmean(recent) <= min(COSINE_LOW, COSINE_FALL * fmean(first))
        and max(_numbers(window, trainer, "wire_error"), default=0) <= COSINE_ERROR
    ):
        yield Sign(
            kind="workers disagree",
            seen=f"the cosine of the pseudo-gradients of trainer {trainer}'s workers fell from "
            f"{fmean(first):.2f} in its first {COSINE_ROUNDS} rounds to {fmean(recent):.2f} in "
            f"the last {COSINE_ROUNDS}",
            meaning="The workers' changes may cancel in the mean, as noise does",
            advice="Lower method.sync_every or inner.lr, or let batches be larger",
            since=window[0]["round"],
            trainer=trainer,
        )

    found = {
        row["worker"]: row["skipped_steps"] + row["restarts"]
        for row in past.records[-1].get("workers", ())
        if row["trainer"] == trainer
    }
    if any(found.values()):
        worst, count = max(found, key=found.__getitem__), sum(found.values())
        yield Sign(
            kind="numbers not finite",
            seen=f"the numbers of trainer {trainer}'s workers were not finite in {count} inner "
            f"steps of a round, {found[worst]} of them worker {worst}'s",
            meaning="A sample may be bad, or the learning rate too high",
            advice="Check the data, or lower inner.lr or method.max_grad_norm",
            since=past.records[-1]["round"],
            trainer=trainer,
        )


def _of_batches(past: _Past, cap: int, trainer: int) -> Iterator[Sign]:
    """The signs in the batches that a rule requests for a trainer by what it measures."""
    window = past.records[-CAP_ROUNDS:]
    requests = _numbers(window, trainer, "requested_batch")
    trained = _numbers(window, trainer, "trainer_batch")
    if len(requests) == CAP_ROUNDS and min(requests) >= cap:
        yield Sign(
            kind="batch at its cap",
            seen=f"trainer {trainer} has requested batch.maximum = {cap} samples in {CAP_ROUNDS} "
            "rounds in a row",
            meaning="The batch rule may decide nothing any more, and training is that of a "
            "constant batch",
            advice="Raise batch.maximum, or batch.eta so that the rule asks for less",
            since=window[0]["round"],
            trainer=trainer,
        )
    elif len(requests) == len(trained) == CAP_ROUNDS and all(
        asked > CLIPPED * used for asked, used in zip(requests, trained, strict=True)
    ):
        yield Sign(
            kind="batch at its cap",
            seen=f"trainer {trainer} requests {requests[-1]:.0f} samples and trains on "
            f"{trained[-1]:.0f}, less than half, in {CAP_ROUNDS} rounds in a row",
            meaning="What fits in memory may decide the batch, not the batch rule",
            advice="Raise switch.max_micro_batch if memory allows, or set switch.mode to always",
            since=window[0]["round"],
            trainer=trainer,
        )

    window = past.records[-EXPLODING_ROUNDS - 1 :]
    requests = _numbers(window, trainer, "requested_batch")
    if len(requests) > 1 and requests[-1] >= EXPLODING_FACTOR * max(1.0, min(requests)):
        first, last = window[0]["round"], window[-1]["round"]
        yield Sign(
            kind="request exploding",
            seen=f"the request of trainer {trainer} rose from {min(requests):.0f} to "
            f"{requests[-1]:.0f} samples between rounds {first} and {last}",
            meaning="batch.eta may be too small, or the estimate of |G|^2 lost in noise, so that "
            "the jump says nothing about the gradient",
            advice="Set batch.max_growth to 2, or raise batch.eta or test.steps",
            since=window[0]["round"],
            trainer=trainer,
        )


def _of_run(past: _Past) -> Iterator[Sign]:
    """The signs of the whole run."""
    window = past.records[-2 * STALL_ROUNDS :]
    losses = [record["train_loss"] for record in window if is_finite(record["train_loss"])]
    if len(losses) == 2 * STALL_ROUNDS:
        batches = [sum(_numbers([record], None, "trainer_batch")) for record in window]
        before, after = fmean(losses[:STALL_ROUNDS]), fmean(losses[STALL_ROUNDS:])
        small, large = fmean(batches[:STALL_ROUNDS]), fmean(batches[STALL_ROUNDS:])
        if after > (1 - STALL_FALL) * before and large >= STALL_GROWTH * small:
            yield Sign(
                kind="loss stalled while batches grow",
                seen=f"the train loss of the last {STALL_ROUNDS} rounds is {after:.4f}, that of "
                f"the {STALL_ROUNDS} before is {before:.4f}, and an inner step has {large:.0f} "
                f"samples instead of {small:.0f}",
                meaning="The added samples may buy nothing: the learning rate is too low or too "
                "high for the batch, or the model has learnt what it can",
                advice="Try another inner.lr or a lower batch.maximum, or end the run",
                since=window[STALL_ROUNDS]["round"],
            )

    window, start = past.records[-ABOVE_ROUNDS:], past.start
    losses = [record["train_loss"] for record in window if is_finite(record["train_loss"])]
    known = len(past.records) > ABOVE_ROUNDS == len(losses) and is_finite(start) and start > 0
    if known and min(losses) > ABOVE_START * start:
        yield Sign(
            kind="loss above its start",
            seen=f"the train loss is {losses[-1]:.4f}, and in {ABOVE_ROUNDS} rounds in a row it "
            f"was more than {ABOVE_START - 1:.0%} above {start:.4f}, that of the first round",
            meaning="The run may have diverged: the learning rate is too high, or the data "
            "has changed",
            advice="Begin again with a lower inner.lr or method.max_grad_norm",
            since=window[0]["round"],
        )

    if len(past.evaluated) == GAP_EVALUATIONS:
        yield from _of_evaluations(past)


def _of_evaluations(past: _Past) -> Iterator[Sign]:
    """The sign of trainers that diverge."""
    losses = past.evaluated[-1][1]
    worst, best = max(losses, key=losses.__getitem__), min(losses, key=losses.__getitem__)
    gaps = [max(losses.values()) / min(losses.values()) - 1 for _, losses in past.evaluated]
    window = [record for record, _ in past.evaluated]
    away = _numbers(window, worst, "distance_to_mean")
    grows = len(away) == GAP_EVALUATIONS and away[-1] > away[0]
    if grows and min(gaps) >= GAP and gaps[-1] >= gaps[0]:
        yield Sign(
            kind="trainers diverge",
            seen=f"the validation loss of trainer {worst} is {losses[worst]:.4f}, {gaps[-1]:.0%} "
            f"above {losses[best]:.4f} of trainer {best}, and its parameters are {away[-1]:.1%} "
            f"away from the mean of all trainers; {GAP_EVALUATIONS - 1} evaluations ago the widest "
            f"gap was {gaps[0]:.0%}, and it was {away[0]:.1%} away",
            meaning="One trainer may be stuck or unstable; a merge of models so far apart can be "
            "worse than either",
            advice="Merge earlier (merge.first_round) or more often (merge.every), or lower "
            "inner.lr",
            since=window[0]["round"],
        )


def _numbers(records: Sequence[Record], trainer: int | None, name: str) -> list[float]:
    """The finite numbers of a trainer (None: of all), by round."""
    return [
        float(row[name])
        for record in records
        for row in record["trainers"]
        if trainer in (row["trainer"], None) and is_finite(row.get(name))
    ]


def is_finite(number: Any) -> bool:
    """True for a number that is there and finite."""
    return number is not None and math.isfinite(number)
