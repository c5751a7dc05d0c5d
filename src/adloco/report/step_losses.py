"""The training loss of inner steps, from steps.jsonl, thinned to points that a picture can show."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from adloco.metrics import Record

POINTS = 500
"""At most so many points of a trainer are shown; each is a mean over equally many inner steps."""


def steps_per_point(records: Sequence[Record]) -> int:
    """Inner steps that one point stands for."""
    return -(-int(records[-1]["inner_steps"]) // POINTS)


def step_losses(
    records: Sequence[Record], steps: Iterable[Record]
) -> dict[int, dict[str, list[float]]]:
    """Read the step losses of each trainer.

    steps: The lines of steps.jsonl; those of a round that is not complete are left out.

    Returns:
        Trainer, by rising number -> `tokens` of all trainers and `inner_steps` of each worker at
        the end of a step, and `loss` over the samples of all workers before its update; each as
        means over the steps of a point. A loss that is not finite enters no mean.
    """
    last = records[-1]
    total = int(last["inner_steps"])
    every = np.zeros(total)
    samples: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(total))
    summed: dict[int, np.ndarray] = defaultdict(lambda: np.zeros(total))
    for step in steps:
        trainer, at = step["trainer"], step["inner_step"] - 1
        if at >= total:
            continue
        every[at] += step["samples"]
        if step["loss"] is not None:
            samples[trainer][at] += step["samples"]
            summed[trainer][at] += step["samples"] * step["loss"]
    lost = every == 0  # Records of whole rounds can be lost.
    if lost.any():
        every[lost] = (last["samples"] - every.sum()) / lost.sum()
    axes = {
        "tokens": every.cumsum() * (last["tokens"] / last["samples"]),
        "inner_steps": np.arange(1.0, total + 1),
    }
    point = np.arange(total) // steps_per_point(records)

    found = {}
    for trainer, weights in sorted(samples.items()):
        known = weights > 0
        first = np.flatnonzero(np.diff(point[known], prepend=-1))  # Where each point begins.
        counts = np.add.reduceat(known[known], first, dtype=float)
        means = {
            name: np.add.reduceat(numbers[known], first) / counts for name, numbers in axes.items()
        }
        losses = np.add.reduceat(summed[trainer][known], first)
        means["loss"] = losses / np.add.reduceat(weights[known], first)
        found[trainer] = {name: numbers.tolist() for name, numbers in means.items()}
    return found
