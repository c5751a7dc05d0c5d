"""The least squares behind the law of the loss (loss_law.py).

For a given irreducible loss E and critical batch B the law is linear in all else:

    log(L - E) = a - p log(D progress(B)) + p (costs of the columns)

with progress(B) the mean over tokens of 1 / (1 + b / B). So E and B are searched for, on a grid
that is then made finer around its best point; a, p and the costs are solved for at each point.
"""

import math
from dataclasses import dataclass

import numpy as np

EXPONENTS = (1e-3, 2.0)
"""Least and largest p."""
GRID, ZOOMS, ZOOMED = 15, 7, 7
"""Points of the first grid in each direction, finer grids, and their points."""
RIDGE = 1e-12


@dataclass(frozen=True, kw_only=True)
class Observations:
    """The data of n points, as arrays."""

    tokens: np.ndarray
    """[n] D."""
    losses: np.ndarray
    """[n] L."""
    weights: np.ndarray
    """[n] Weight of each point's squared error."""
    batches: np.ndarray
    """[u] Different batches, in samples."""
    shares: np.ndarray
    """[n, u] Part of the tokens that was trained with each batch."""
    columns: np.ndarray
    """[n, k] Factors of the terms of the logarithm of the cost."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The constants with the least squared relative errors of the loss."""

    irreducible: float
    critical_batch: float
    scale: float
    """exp(a)."""
    exponent: float
    costs: tuple[float, ...]
    """[k] Constants of the columns."""


def search(
    seen: Observations, irreducible: tuple[float, float], critical_batch: tuple[float, float]
) -> Solution:
    """Find the constants of the law.

    Args:
        irreducible: Lowest and highest E, below all losses.
        critical_batch: Lowest and highest B, in samples; infinite if batches cost nothing.

    The two ends are equal where a constant is not fitted.
    """
    bounds = [irreducible, (math.log(critical_batch[0]), math.log(critical_batch[1]))]
    axes = [_axis(low, high, GRID) for low, high in bounds]
    steps = [0.0 if low == high else (high - low) / (GRID - 1) for low, high in bounds]
    for zoom in range(ZOOMS + 1):
        errors, exponents, solved = _solve(seen, axes[0], np.exp(axes[1]))
        best = np.unravel_index(np.argmin(errors), errors.shape)
        middle = [axis[at] for axis, at in zip(axes, best, strict=True)]
        if zoom < ZOOMS:
            axes = [
                _axis(max(low, at - step), min(high, at + step), ZOOMED)
                for (low, high), at, step in zip(bounds, middle, steps, strict=True)
            ]
            # The next grid reaches to the neighbours of the best point of this one.
            steps = [step / 3 for step in steps]
    exponent, (intercept, *costs) = float(exponents[best]), solved[best]
    return Solution(
        irreducible=float(middle[0]),
        critical_batch=float(np.exp(middle[1])),
        scale=float(np.exp(intercept)),
        exponent=exponent,
        costs=tuple(float(cost) / exponent for cost in costs),
    )


def _axis(low: float, high: float, points: int) -> np.ndarray:
    return np.linspace(low, high, points) if high > low else np.array([low])


def _solve(
    seen: Observations, irreducible: np.ndarray, critical: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Solve at each point of a grid of e values of E and c of B: squared errors, [e, c]; p, [e, c];
    a and p times the costs, [e, c, 1 + k].
    """
    progress = (1 / (1 + seen.batches / critical[:, None])) @ seen.shares.T
    effective = np.log(seen.tokens * progress)[None]
    # A loss that was drawn at random can be below an L_inf of the grid; it then weighs nothing.
    above = np.maximum(seen.losses - irreducible[:, None], 1e-9)[:, None]
    # An error of log(L - E) is (L - E) / L times as large as one of log L.
    roots = np.sqrt(seen.weights) * above / seen.losses
    factors = np.concatenate([np.ones((len(seen.losses), 1)), seen.columns], axis=1)
    linear = roots[..., None] * factors
    linear = np.broadcast_to(linear, (len(irreducible), len(critical), *linear.shape[2:]))
    falling = np.broadcast_to(-roots * effective, linear.shape[:-1])
    wanted = np.broadcast_to(roots * np.log(above), falling.shape)
    free = _least_squares(np.concatenate([falling[..., None], linear], axis=-1), wanted)
    exponents, solved = np.clip(free[..., 0], *EXPONENTS), free[..., 1:]
    bounded = exponents != free[..., 0]
    if bounded.any():
        rest = (wanted - exponents[..., None] * falling)[bounded]
        solved[bounded] = _least_squares(linear[bounded], rest)
    fitted = solved @ factors.T - exponents[..., None] * effective
    errors = np.log((irreducible[:, None, None] + np.exp(fitted)) / seen.losses)
    return (seen.weights * errors**2).sum(axis=-1), exponents, solved


def _least_squares(matrices: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The x with the least |matrix x - wanted|, of all [..., n, k] matrices at once.

    Columns that depend on each other get the smallest x, by a ridge too small to matter otherwise.
    """
    scales = np.sqrt((matrices**2).sum(axis=-2)) + 1e-300
    scaled = matrices / scales[..., None, :]
    transposed = np.swapaxes(scaled, -1, -2)
    squares = transposed @ scaled + RIDGE * np.eye(matrices.shape[-1])
    solved: np.ndarray = np.linalg.solve(squares, transposed @ wanted[..., None])[..., 0] / scales
    return solved
