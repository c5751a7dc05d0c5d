"""What fewer syncs cost: the law of the gap between local and data-parallel training.

    gap = (K - 1)^b (a N^d S^-c + f)

The gap is how much higher the loss is, as a part of it, with N million parameters, K workers and S
syncs, everything else tuned. `benchmarks/gap.py --fit` fits (log a, b, -c, d, f) to its runs and
prints what stands here; docs/plan.md shows the runs.
"""

import math
from dataclasses import dataclass

CONSTANTS = (0.4876, 0.6597, -1.0655, 0.1713, 0.0037)
"""log a, b, -c, d and f, fitted to the gaps of RUNS."""
RUNS = "0.13M to 24M parameters, 0.7 to 300 tokens a parameter, 2 to 8 workers and 6 to 3,702 syncs"
COVARIANCE = (
    (2.2920e-01, -1.2343e-03, -4.9559e-02, 2.2428e-02, 1.7813e-04),
    (-1.2343e-03, 4.3868e-03, -1.2961e-03, 6.3060e-04, -1.7524e-05),
    (-4.9559e-02, -1.2961e-03, 1.2681e-02, -3.2236e-03, -4.7238e-05),
    (2.2428e-02, 6.3060e-04, -3.2236e-03, 6.9058e-03, 6.4415e-06),
    (1.7813e-04, -1.7524e-05, -4.7238e-05, 6.4415e-06, 5.8484e-07),
)
"""The covariance of the constants over fits to drawn gaps (bootstrap)."""
SLOPE, SLOPE_DEVIATION = 0.07, 0.19
"""Part by which a loss falls when the tokens grow by a part: 0.094 and 0.05 between 5, 20 and 80
tokens a parameter of 0.13M (`benchmarks/gap.py --table`), and 0.058 for 1 billion at 20 by the law
L = 1.69 + 406.4 N^-0.34 + 410.7 D^-0.28 (Chinchilla, arXiv 2203.15556); and the standard deviation
of its logarithm with which 90% of slopes lie between the first two."""
NORMAL_90 = 1.645
"""Standard deviations on each side of 90% of a normal distribution."""


@dataclass(frozen=True)
class Gap:
    """A gap of the loss, as a part of it."""

    expected: float
    deviation: float
    """Standard deviation over the laws that fit the runs."""

    def times_tokens(self, deviations: float = 0.0) -> float:
        """Times the tokens with which local training reaches the loss of data-parallel training.

        deviations: By how many standard deviations, of gap and slope together, it is more.
        """
        exponent = self.expected / SLOPE
        each = math.hypot(self.deviation / SLOPE, exponent * SLOPE_DEVIATION)
        return math.exp(min(max(0.0, exponent + deviations * each), 50.0))


def gap(parameters: float, workers: int, syncs: float) -> Gap:
    """The gap of local training; none for one worker."""
    if workers < 2:
        return Gap(0.0, 0.0)
    scale, by_workers, by_syncs, by_size, floor = CONSTANTS
    size, others, logs = math.log(parameters / 1e6), workers - 1.0, math.log(max(syncs, 1.0))
    grown = others**by_workers
    falling = grown * math.exp(scale + by_size * size + by_syncs * logs)
    expected = falling + grown * floor
    slopes = (falling, math.log(others) * expected, logs * falling, size * falling, grown)
    variance = sum(
        one * other * value
        for one, row in zip(slopes, COVARIANCE, strict=True)
        for other, value in zip(slopes, row, strict=True)
    )
    return Gap(expected, math.sqrt(variance))
