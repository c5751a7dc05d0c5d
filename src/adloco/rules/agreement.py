"""What squared norms say about an exchange: how alike the workers' pseudo-gradients are, and what
the wire format has lost of them.
"""

import math
from collections.abc import Sequence


def mean_cosine(squares: Sequence[float], square_of_sum: float) -> float | None:
    """Mean cosine similarity of pairs of vectors, each pair weighted by the product of its norms;
    None with fewer than two that are not zero.

    squares: |v_i|^2; square_of_sum: |sum v_i|^2. From |sum v|^2 = sum |v_i|^2 + sum over pairs of
    |v_i| |v_j| cos_ij.
    """
    products = sum(math.sqrt(square) for square in squares) ** 2 - sum(squares)
    if products <= 1e-12 * sum(squares):
        return None
    return (square_of_sum - sum(squares)) / products


def relative_error(errors: Sequence[float], wanted: Sequence[float]) -> float | None:
    """Norm of what was lost over norm of what was to be sent, all workers together, from the
    squares of both; None if nothing was to be sent.
    """
    return math.sqrt(sum(errors) / sum(wanted)) if sum(wanted) > 0 else None
