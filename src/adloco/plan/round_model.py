"""What the time of a measured round is made of, with constants that `plan/calibration.py` fits.

A round of H inner steps on links of bandwidth B takes

    H step + latency + volume / B + inefficiency / sqrt(B) + stragglers sqrt(H) + overhead H

with constants >= 0 for each method, number of workers and size of the model; B is the bandwidth,
or a ceiling from which on transfers get no faster. `latency` is paid for each sync. `inefficiency`
stands for transfers that profit less and less from a faster link, as TCP streams do. Workers wait
for the slowest of them: the sum of H independent times deviates by sqrt(H). `overhead` is time of
each step that is not computation. Transfers, `volume` and `inefficiency`, may be hidden behind a
part of the round's steps, and take time only from there on.

A round's utilisation is H step over its time. From utilisations alone the constants are known in
units of `step`; from seconds alone `overhead` cannot be told from `step` and counts as that.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from adloco.plan.measured_rows import Measure, Row

TERMS: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "latency": lambda steps, bits: np.ones_like(steps),
    "volume": lambda steps, bits: 1 / bits,
    "inefficiency": lambda steps, bits: 1 / np.sqrt(bits),
    "stragglers": lambda steps, bits: np.sqrt(steps),
    "overhead": lambda steps, bits: steps,
}
"""Name of a term -> its factor for each row, from H and the bandwidth in bits/s."""
TRANSFERS = ("volume", "inefficiency")
"""Terms that steps can hide."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The fitted constants of a group."""

    measure: Measure
    terms: Mapping[str, float] = field(default_factory=dict)
    """Constants >= 0 by name. From utilisations: in units of a step's computation; from seconds: in
    seconds, with `overhead` as the time of a step.
    """
    ceiling: float = math.inf
    """Bandwidth in bits/s from which on transfers get no faster."""
    hidden: float = 0.0
    """Part of a round's steps during which its transfers take no time of their own."""

    def of(self, names: Iterable[str]) -> "Constants":
        """Return the same form with these terms, not fitted yet."""
        return replace(self, terms=dict.fromkeys(names, 0.0))

    def factors(self, steps: np.ndarray, bits: np.ndarray, late: np.ndarray | bool) -> np.ndarray:
        """Factors of the constants in the times of rounds, of shape (terms, rows).

        Args:
            steps: H of each row.
            bits: Bandwidth of each.
            late: True for each whose transfers end after the steps that hide them.
        """
        factors = {n: TERMS[n](steps, np.minimum(bits, self.ceiling)) for n in self.terms}
        for name in TRANSFERS:
            if name in factors:
                factors[name] = factors[name] * late
        if "overhead" in factors:
            factors["overhead"] = factors["overhead"] * (1 - self.hidden * late)
        return np.array([*factors.values()]).reshape(len(factors), len(steps))

    def hiding(self, steps: np.ndarray) -> np.ndarray:
        """Computation that hides late transfers, in units of a step; 0 where it has a constant."""
        return steps * (self.hidden if self.measure == "compute_utilisation" else 0.0)

    def times(self, steps: np.ndarray, bits: np.ndarray) -> np.ndarray:
        """Times of rounds whose transfers are not late, and are: of shape (2, rows). The larger is
        right. From utilisations, without computation.
        """
        constants = np.array([*self.terms.values()])
        in_time = constants @ self.factors(steps, bits, False)
        late = constants @ self.factors(steps, bits, True) - self.hiding(steps)
        return np.array([in_time, late])

    def late(self, steps: np.ndarray, bits: np.ndarray) -> np.ndarray:
        """True for each row whose transfers end after the steps that hide them."""
        in_time, late = self.times(steps, bits)
        found: np.ndarray = late > in_time
        return found

    def values(self, steps: np.ndarray, bits: np.ndarray) -> np.ndarray:
        """The measure of rows, predicted."""
        times = self.times(steps, bits).max(axis=0)
        by_ratio = self.measure == "compute_utilisation"
        values: np.ndarray = steps / (steps + times) if by_ratio else times
        return values

    def value(self, row: Row) -> float:
        """The measure of a row, predicted."""
        return float(self.values(np.array([row.sync_every]), np.array([row.bits_per_second]))[0])

    def utilisation(self, row: Row) -> float:
        """Compute seconds over all seconds of a round."""
        if self.measure == "compute_utilisation":
            return self.value(row)
        return self.terms["overhead"] * row.sync_every / self.value(row)
