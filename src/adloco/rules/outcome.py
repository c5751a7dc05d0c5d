"""Tells if a run ended better than it began, from its records (lines of metrics.jsonl)."""

from collections.abc import Mapping, Sequence
from typing import Any

from adloco.rules.failure_signs import is_finite

ADVICE = "Begin again with a lower inner.lr or method.max_grad_norm, or look at the data"


def no_success(records: Sequence[Mapping[str, Any]]) -> str:
    """Sentences that say that a run has diverged or ended above its start; empty if it has not.

    The validation loss is compared with that of the first evaluation, after a round or more; with
    one evaluation alone, nothing is known.
    """
    if not records:
        return ""
    last = records[-1]
    evaluated: list[Any] = [record.get("val_loss") for record in records]
    known = [loss for loss in evaluated if is_finite(loss)]
    if not is_finite(last["train_loss"]) or (
        evaluated[-1] is not None and not is_finite(evaluated[-1])
    ):
        return f"The run has diverged: its last loss is not finite. {ADVICE}."
    if len(known) > 1 and round(known[-1], 4) > round(known[0], 4):  # As they are shown.
        return (
            f"The run did not learn: its validation loss ended at {known[-1]:.4f}, above "
            f"{known[0]:.4f} in its first evaluation. {ADVICE}."
        )
    return ""
