"""The estimate of the number of communications (abstract of arXiv 2508.18182): inner steps,
samples and syncs until a loss is reached, as functions of the batch or of eta.

McCandlish et al. (arXiv 1812.06162): a step of batch b makes the progress 1 / (1 + B / b) of a step
along the true gradient, with B = S / |G|^2 the noise scale. So a loss that takes `min_steps` steps
with huge batches and `min_samples` samples with tiny ones, B = min_samples / min_steps, takes

    steps   = min_steps (1 + B / b)        samples = min_samples (1 + b / B)

The norm test holds b at B / eta^2 (unbiased form) or at B (1 - eta^2) / eta^2 (plug-in form), also
while B grows, so that

    steps   = min_steps (1 + eta^2)        samples = min_samples (1 + 1 / eta^2)    (unbiased)
    steps   = min_steps / (1 - eta^2)      samples = min_samples / eta^2            (plug-in)

and syncs = steps / H. docs/plan.md derives this and says where it breaks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from adloco.errors import require
from adloco.rules.batch_rules.norm_test import Estimator


@dataclass(frozen=True, kw_only=True)
class StepsToLoss:
    """Steps and tokens that a loss needs."""

    min_steps: float
    """S_min: inner steps with huge batches."""
    min_samples: float
    """E_min: samples with tiny batches."""

    @property
    def noise_scale(self) -> float:
        """B, in samples: the mean over the run that the two numbers stand for."""
        return self.min_samples / self.min_steps

    def steps(self, batch: float) -> float:
        """Inner steps with a constant batch of so many samples."""
        return self.min_steps * (1 + self.noise_scale / batch)

    def samples(self, batch: float) -> float:
        """Samples with a constant batch of so many samples."""
        return self.min_samples * (1 + batch / self.noise_scale)

    def adaptive_steps(self, eta: float, estimator: Estimator = "unbiased") -> float:
        """Inner steps with the batch of the norm test."""
        return self.min_steps * (1 + noise_per_batch(eta, estimator))

    def adaptive_samples(self, eta: float, estimator: Estimator = "unbiased") -> float:
        """Samples with the batch of the norm test."""
        return self.min_samples * (1 + 1 / noise_per_batch(eta, estimator))


def noise_per_batch(eta: float, estimator: Estimator = "unbiased") -> float:
    """B / b at which the norm test holds the batch.

    Raises:
        ValueError: The plug-in form has no such batch: it asks for ever smaller ones from eta = 1
            on.
    """
    if estimator == "unbiased":
        return eta**2
    require(
        eta < 1,
        f"eta must be < 1 for the plug-in norm test to hold a batch, got {eta}; use a smaller eta "
        "or the unbiased form",
    )
    return eta**2 / (1 - eta**2)


def fit_steps(batches: Sequence[float], steps: Sequence[float]) -> StepsToLoss:
    """Fit S_min and E_min to runs with constant batches that reached a loss.

    steps = S_min + E_min / batch is linear in both; relative errors are squared, since the spread
    of a run's steps grows with them.

    Args:
        batches: Batch of each run, in samples.
        steps: Inner steps until the loss.

    Raises:
        ValueError: Fewer than two batches differ, or steps do not fall as batches grow so that one
            of the numbers would not be > 0.
    """
    require(
        len(set(batches)) >= 2, f"at least two different batches are needed, got {sorted(batches)}"
    )
    weights = 1 / np.array(steps)
    matrix = np.stack([weights, weights / np.array(batches)], axis=1)
    min_steps, min_samples = np.linalg.lstsq(matrix, np.ones(len(weights)), rcond=None)[0]
    require(
        min_steps > 0 and min_samples > 0,
        "steps must fall as batches grow, but less than in proportion; these runs give "
        f"S_min = {min_steps:.3g} and E_min = {min_samples:.3g}",
    )
    return StepsToLoss(min_steps=float(min_steps), min_samples=float(min_samples))
