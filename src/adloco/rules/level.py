"""A positive quantity that changes by factors, followed through noisy tests (docs/method.md).

|G|^2 falls several hundredfold within the first steps of a run, and by small factors afterwards. An
arithmetic moving average remembers its first values for the whole of a short run. Here the
*logarithm* of the quantity has a normal distribution. Between tests the distribution widens, in
proportion to the logarithm of the samples, so a run of any length forgets its beginning. A test
multiplies it by the likelihood of the measured value. That value has normal noise and may be
negative, which says that the quantity is small against the noise. The product is replaced by the
normal distribution with its mean and variance.

The noise of a test is not derived from a model of the gradients, whose norms have heavy tails. It
is measured: the spread of the tests of a round.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

VAGUE = 9.0
"""Variance of the logarithm before the first test: a factor of 20 up or down."""
PAST_TESTS = 4
"""Tests for which the relative noise of earlier rounds counts, beside the tests of a round."""
LEAST_NOISE = 1e-12
"""The least relative variance of a test that is believed."""
MOST_ZOOMS = 10
"""Grids of a product: the first spans a factor of 10^15, and the next is 100 times finer while all
weight is on one point."""
LEAST_WEIGHT = 1e-7
"""Weight of a point that counts, as a part of the largest; a normal distribution has it at 5.7
standard deviations."""
POINTS = 200
"""Points of the grid on which a likelihood is multiplied by the distribution."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """Estimate of a positive quantity from the tests so far."""

    log_mean: float | None
    """Mean of its natural logarithm; None before the first test, and -inf for exactly zero."""
    log_variance: float
    """Variance of its logarithm."""
    test_variance: float
    """Variance of one test's value, relative to the square of the value's scale; see `seen`."""

    @property
    def value(self) -> float:
        """Median of the estimate."""
        return 0.0 if self.log_mean is None else math.exp(self.log_mean)

    @property
    def factor(self) -> float:
        """One standard deviation of the logarithm, as a factor: 1.5 is 1.5 times more or less."""
        return math.exp(math.sqrt(self.log_variance))

    def later(self, elapsed: float, *, wander: float, fall: float = 0.0) -> "Level":
        """The level after some training.

        Args:
            elapsed: Logarithm of the samples seen now over those seen at the last test.
            wander: Variance of the logarithm that is added for each unit of `elapsed`.
            fall: How much the logarithm falls on average for each unit of `elapsed`.
        """
        if self.log_mean is None:
            return self
        return replace(
            self,
            log_mean=self.log_mean - fall * elapsed,
            log_variance=self.log_variance + wander * elapsed,
        )

    def seen(self, value: float, *, scale: float, spread: float, tests: float) -> "Level":
        """The level after the tests of a round whose noise is added to it.

        Args:
            value: The mean of what the tests measured, which may be negative.
            scale: The size that the noise of a test is in proportion to; at least 0.
            spread: Variance of the tests' values around their mean.
            tests: How many tests; at least 1.
        """
        if scale == 0:
            return self._exactly(value)
        test_variance = self._noise(spread, tests, value, scale)
        error = scale * math.sqrt(test_variance / tests)
        if self.log_mean is None or self.log_mean == -math.inf:
            prior = math.log(max(value, error)), VAGUE
        else:
            prior = self.log_mean, self.log_variance
        log_mean, log_variance = _product(*prior, value, error)
        return Level(log_mean=log_mean, log_variance=log_variance, test_variance=test_variance)

    def seen_positive(self, value: float, *, spread: float, tests: float) -> "Level":
        """The level after the tests of a round whose noise is a factor with mean 1.

        So it is for a mean of squares, such as S. If the factor is log-normal with a variance of
        exp(v) - 1, its logarithm has the variance v and the mean -v / 2.

        Args:
            value: The mean of what the tests measured; at least 0.
            spread, tests: As for `seen`.
        """
        if value <= 0:
            return self._exactly(0.0)
        test_variance = self._noise(spread, tests, value, value)
        variance = math.log1p(test_variance / tests)
        found = math.log(value) + variance / 2
        if self.log_mean is None or self.log_mean == -math.inf:
            return Level(log_mean=found, log_variance=variance, test_variance=test_variance)
        gain = self.log_variance / (self.log_variance + variance)
        return Level(
            log_mean=self.log_mean + gain * (found - self.log_mean),
            log_variance=(1 - gain) * self.log_variance,
            test_variance=test_variance,
        )

    def _exactly(self, value: float) -> "Level":
        """The level after a test without noise: of equal gradients, of none, or of a measurement of
        one's own that gives no `mean_norm_sq`.
        """
        exact = math.log(value) if value > 0 else -math.inf
        return replace(self, log_mean=exact, log_variance=0.0)

    def _noise(self, spread: float, tests: float, value: float, scale: float) -> float:
        """A test's relative variance, from the spread of these tests and from earlier rounds.

        A single test has no spread; what it differs from the level by is taken, less what the
        level itself may be wrong by.
        """
        dof = tests - 1
        if tests == 1 and self.value > 0:
            dof, wrong = 1, self.value**2 * math.expm1(self.log_variance)
            spread = max(0.0, (value - self.value) ** 2 - wrong)
        before = PAST_TESTS * self.test_variance
        square = scale**2
        found = dof * spread / square if square > 0 else 0.0  # A square may underflow.
        # Tests that repeat exactly would make it vanish in the end.
        return max((found + before) / (dof + PAST_TESTS), LEAST_NOISE)


def merged(levels: Mapping[int, Level], weights: Mapping[int, float], added: float) -> Level:
    """The level of a trainer that others were merged into.

    It has the weighted mean of the logarithms, and the variance of a mixture of them.

    Args:
        levels: By trainer id.
        weights: By trainer id; they add up to 1.
        added: Variance added for what the merge changes.
    """
    known = {
        key: (level.log_mean, level)
        for key, level in levels.items()
        if level.log_mean is not None and level.log_mean > -math.inf
    }
    if not known:
        return next(iter(levels.values()))
    total = sum(weights[key] for key in known)
    shares = {key: weights[key] / total for key in known}
    mean = sum(shares[key] * log_mean for key, (log_mean, _) in known.items())
    within = sum(shares[key] * level.log_variance for key, (_, level) in known.items())
    between = sum(shares[key] * (log_mean - mean) ** 2 for key, (log_mean, _) in known.items())
    tests = sum(shares[key] * level.test_variance for key, (_, level) in known.items())
    return Level(log_mean=mean, log_variance=within + between + added, test_variance=tests)


def _product(mean: float, variance: float, value: float, error: float) -> tuple[float, float]:
    """Mean and variance of x, normal with these, given that exp(x) was measured.

    The first grid spans what the distribution and the measurement allow. The next ones zoom in on
    all points of some weight (it falls off to the left more slowly than to the right), at least
    twice and until the result is wider than a step, because a precise measurement can fall between
    the points. A measurement that says less than all of the first grid moves it to the left.

    Args:
        mean, variance: Of x before.
        value, error: The measured value of exp(x), and its standard deviation.
    """
    width = 6 * math.sqrt(variance)
    low, high = mean - width, mean + width
    if value > 0:
        low, high = min(low, math.log(value) - 1), max(high, math.log(value) + 1)
    zooms, step, spread, total = 0, math.inf, 0.0, 1.0
    while zooms < 3 or (spread / total < step**2 and zooms < MOST_ZOOMS):
        zooms, step = zooms + 1, (high - low) / POINTS
        points = [low + step * index for index in range(POINTS + 1)]
        logs = [
            -((x - mean) ** 2) / (2 * variance) - ((value - math.exp(x)) / error) ** 2 / 2
            for x in points
        ]
        most = max(logs)
        weights = [math.exp(log - most) for log in logs]
        total = math.fsum(weights)
        found = math.fsum(w * x for w, x in zip(weights, points, strict=True)) / total
        spread = math.fsum(w * (x - found) ** 2 for w, x in zip(weights, points, strict=True))
        seen = [x for w, x in zip(weights, points, strict=True) if w > LEAST_WEIGHT]
        if zooms == 1 and seen[0] == low:
            low, zooms = low - (high - low), 0
        else:
            low, high = seen[0] - step, seen[-1] + step
    return found, spread / total
