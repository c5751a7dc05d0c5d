"""Measures of agreement: how alike the workers' pseudo-gradients are and how much of them the wire
format lost, from squared norms alone; and how far trainers are apart.
"""

import math
from collections.abc import Sequence


def mean_cosine(squares: Sequence[float], square_of_sum: float) -> float | None:
    """Mean cosine similarity in [-1, 1] over all pairs of vectors v_i, each weighted by |v_i|
    |v_j|, from |v_i|^2 of each and |sum v_i|^2; None if fewer than two vectors are not zero.

    It follows from |sum v|^2 = sum |v_i|^2 + 2 (sum over pairs of |v_i| |v_j| cos_ij).
    """
    products = sum(math.sqrt(square) for square in squares) ** 2 - sum(squares)
    if products <= 1e-12 * sum(squares):
        return None
    return (square_of_sum - sum(squares)) / products


def relative_error(errors: Sequence[float], wanted: Sequence[float]) -> float | None:
    """Relative error of what all workers sent: sqrt(sum |error_i|^2 / sum |wanted_i|^2), from the
    squared norms of what the wire format lost and of what was given to it; None if that is zero.
    """
    return math.sqrt(sum(errors) / sum(wanted)) if sum(wanted) > 0 else None


def relative_distances(vectors: Sequence[Sequence[float]]) -> list[float | None]:
    """|v_i - mean| / |mean| of each of these vectors of one length; None if the mean is zero."""
    mean = [sum(column) / len(vectors) for column in zip(*vectors, strict=True)]
    norm = math.hypot(*mean)
    return [math.dist(vector, mean) / norm if norm > 0 else None for vector in vectors]
