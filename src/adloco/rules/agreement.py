"""Measures of agreement: how alike the workers' pseudo-gradients are and how much of them the wire
format lost, from squared norms alone; and how far trainers are apart.
"""

import math
from collections.abc import Sequence


def mean_cosine(squares: Sequence[float], square_of_sum: float) -> float | None:
    """Mean cosine similarity over all pairs of vectors v_i, each weighted by |v_i| |v_j|.

    It follows from |sum v|^2 = sum |v_i|^2 + 2 (sum over pairs of |v_i| |v_j| cos_ij).

    Args:
        squares: |v_i|^2 of each vector.
        square_of_sum: |sum v_i|^2.

    Returns:
        The mean, in [-1, 1]; None if fewer than two vectors are not zero.
    """
    products = sum(math.sqrt(square) for square in squares) ** 2 - sum(squares)
    if products <= 1e-12 * sum(squares):
        return None
    return (square_of_sum - sum(squares)) / products


def relative_error(errors: Sequence[float], wanted: Sequence[float]) -> float | None:
    """Relative error of what all workers sent: sqrt(sum |error_i|^2 / sum |wanted_i|^2).

    Args:
        errors: Squared norm of what the wire format lost, for each worker.
        wanted: Squared norm of each worker's contribution before encoding.

    Returns:
        The relative error; None if all contributions are zero.
    """
    return math.sqrt(sum(errors) / sum(wanted)) if sum(wanted) > 0 else None


def relative_distances(vectors: Sequence[Sequence[float]]) -> list[float | None]:
    """Distance of each vector from the mean of all, relative to the norm of the mean.

    Args:
        vectors: Vectors of the same length.

    Returns:
        |v_i - mean| / |mean| of each; None if the mean is zero.
    """
    mean = [sum(column) / len(vectors) for column in zip(*vectors, strict=True)]
    norm = math.hypot(*mean)
    return [math.dist(vector, mean) / norm if norm > 0 else None for vector in vectors]
