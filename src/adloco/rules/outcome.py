"""Tells if a run ended better than it began, from its records (lines of metrics.jsonl)."""

from collections.abc import Iterable, Sequence
from typing import Any

from adloco.rules.failure_signs import is_finite

ADVICE = "Begin again with a lower inner.lr or method.max_grad_norm, or look at the data"


def no_success(records: Sequence[dict[str, Any]]) -> str:
    """Sentences that say that a run has diverged or ended above its start; empty if it has not.

    The validation loss is compared with that of the first evaluation of the same text, after a
    round or more; with one evaluation alone, nothing is known.
    """
    if not records:
        return ""
    last = records[-1]
    known = [each["val_loss"] for each in of_newest_text(records) if is_finite(each["val_loss"])]
    if not is_finite(last["train_loss"]) or not ended_finite(records):
        return f"The run has diverged: its last loss is not finite. {ADVICE}."
    first, newest = (_shown(known[0]), _shown(known[-1])) if known else ("0", "0")
    if float(newest) > float(first):
        above = f"ended at {newest}, above {first} in its first evaluation"
        began, ended = records[0]["train_loss"], last["train_loss"]
        if not is_finite(began) or ended >= began:
            return f"The run did not learn: its validation loss {above}. {ADVICE}."
        return (
            f"The validation loss {above}, while that of training fell from {_shown(began)} to "
            f"{_shown(ended)}: the run has learned its text alone, or it is too short to tell. "
            "Give it more text, or more rounds."
        )
    return ""


def _shown(loss: float) -> str:
    """A loss with four digits: those that rise by less are level."""
    return f"{loss:#.4g}"


def ended_finite(records: Sequence[dict[str, Any]]) -> bool:
    """False if the newest evaluation gave no finite number.

    A line has none then, as one without an evaluation; but that one has no memory of it either.
    """
    losses = (
        each.get("val_loss")
        for each in reversed(records)
        if each.get("val_loss") is not None or "evaluation" in each.get("memory", ())
    )
    return is_finite(next(losses, 0.0))


def of_newest_text(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines with an evaluation that can be compared with the newest one: on the texts of as
    many islands. An island that is dropped takes its text with it.
    """
    evaluated = [each for each in records if each.get("val_loss") is not None]
    return [each for each in evaluated if islands_in(each) == islands_in(evaluated[-1])]


def islands_in(record: dict[str, Any]) -> int:
    """Islands with texts of their own in a line's evaluation."""
    return len(record.get("islands", ()))
