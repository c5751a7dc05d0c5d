"""Successive halving (arXiv 1502.07943): at given parts of the budget the worse half of the arms
stops, so that the others have the time.
"""

import math
from collections.abc import Mapping

import numpy as np

from adloco.errors import require
from adloco.run.budget import part_used
from adloco.run.records import Records
from adloco.study.arms import StudyRun


def parse_parts(text: str) -> tuple[float, ...]:
    """Parts of the budget at which arms stop, from words such as 0.25,0.5.

    Raises:
        ValueError: They are no rising numbers between 0 and 1.
    """
    try:
        parts = tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError as error:
        raise ValueError(f"--halve-at must be numbers as in 0.25,0.5, got {text!r}") from error
    require(
        all(0 < part < 1 for part in parts) and list(parts) == sorted({*parts}),
        f"--halve-at must be parts of the budget between 0 and 1 that rise, got {text!r}",
    )
    return parts


def loss_at(run: StudyRun, part: float) -> float | None:
    """A run's validation loss when it had used a part of its budget, on the straight line between
    evaluations; None if no evaluation at or after that part is known yet.

    Raises:
        ValueError: The first evaluation came later, so it says nothing about that part.
    """
    evaluated = [
        (part_used(run.recipe.run.limits, record), record["val_loss"])
        for record in Records(run.folder).read()
        if record["val_loss"] is not None
    ]
    if not evaluated or evaluated[-1][0] < part:
        return None
    parts, losses = zip(*evaluated, strict=True)
    require(
        parts[0] <= part,
        f"--halve-at {part:g} is before the first evaluation of {run.arm}, at {parts[0]:.2f} of "
        "its budget; give a larger part, or evaluate earlier (evaluation.every, "
        "method.sync_every)",
    )
    return float(np.interp(part, parts, losses))


def better_half(losses: Mapping[str, float]) -> list[str]:
    """The arms with the lowest losses: half of them, rounded up; of equal ones the first."""
    ranked = sorted(losses, key=lambda arm: losses[arm] if math.isfinite(losses[arm]) else math.inf)
    return ranked[: math.ceil(len(ranked) / 2)]
