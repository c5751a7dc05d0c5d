"""What fewer syncs cost: the law of the gap between local and data-parallel training.

    gap = exp(c . (1, log N, log D / N, log K, log S))

The gap is how much higher the loss is, as a part of it, with N parameters, D tokens, K workers and
S syncs, everything else tuned. `benchmarks/gap.py --fit` fits c to its runs and prints what stands
here; docs/plan.md shows the runs.
"""

import math
from dataclasses import dataclass

import numpy as np

CONSTANTS = (-1.8863, 0.0610, -0.0974, 0.8712, -0.7379)
"""c, fitted to the gaps of RUNS."""
RUNS = "0.13M to 24M parameters, 0.7 to 300 tokens a parameter, 2 to 8 workers and 6 to 3,702 syncs"
COVARIANCE = (
    (1.1633662, -0.0949387, -0.0636040, -0.0145791, 0.0338598),
    (-0.0949387, 0.0081941, 0.0053933, -0.0000342, -0.0037194),
    (-0.0636040, 0.0053933, 0.0060373, -0.0005194, -0.0030642),
    (-0.0145791, -0.0000342, -0.0005194, 0.0088260, 0.0007496),
    (0.0338598, -0.0037194, -0.0030642, 0.0007496, 0.0039626),
)
"""The covariance of c over fits to drawn gaps (bootstrap)."""
SLOPE = 0.07
"""Part by which a loss falls when the tokens grow by a part: 0.094 and 0.05 between 5, 20 and 80
tokens a parameter of 0.13M (`benchmarks/gap.py --table`), and 0.058 for 1 billion at 20 by the law
L = 1.69 + 406.4 N^-0.34 + 410.7 D^-0.28 (Chinchilla, arXiv 2203.15556)."""
NORMAL_90 = 1.645
"""Standard deviations on each side of 90% of a normal distribution."""


@dataclass(frozen=True)
class Gap:
    """Relative gaps of the loss."""

    expected: float
    least: float
    most: float
    """90% of the laws that fit the runs lie between these."""


def gap(parameters: float, tokens: float, workers: int, syncs: float) -> Gap:
    """The gap of local training; none for one worker."""
    if workers < 2:
        return Gap(0.0, 0.0, 0.0)
    logs = np.log([math.e, parameters, tokens / parameters, workers, max(syncs, 1.0)])
    middle = float(logs @ CONSTANTS)
    half = NORMAL_90 * math.sqrt(logs @ np.array(COVARIANCE) @ logs)
    least, expected, most = (math.exp(middle + each) for each in (-half, 0.0, half))
    return Gap(expected, least, most)


def times_tokens(relative_gap: float) -> float:
    """Times the tokens with which local training reaches the loss of data-parallel training."""
    return math.exp(min(relative_gap / SLOPE, 50.0))
