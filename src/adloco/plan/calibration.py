"""A model of the time of a round, fitted to measured rounds.

The time that a round of H inner steps takes on links of bandwidth B is

    H step + latency + volume / B + inefficiency / sqrt(B) + stragglers sqrt(H) + overhead H

with constants >= 0 for each method, number of workers and size of the model; B is the bandwidth,
or a ceiling from which on transfers get no faster. `latency` is paid for each sync. `inefficiency`
stands for transfers that profit less and less from a faster link, as TCP streams do. Workers wait
for the slowest of them: the sum of H independent times deviates by sqrt(H). `overhead` is time of
each step that is not computation. All bytes cross the link, so `inefficiency` comes beside `volume`
only; and two bandwidths cannot tell the two apart, so it takes three.

A round's utilisation is H step over its time. From utilisations alone the constants are known in
units of `step`; from seconds alone `overhead` cannot be told from `step` and counts as that.

Each group of rows takes those terms that predict best what they were not fitted to: every value of
H, and every bandwidth, is left out once. Then it takes the ceiling that predicts best, if that is
clearly better than none.
"""

import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from adloco.errors import require
from adloco.plan.measured_rows import Group, Measure, Row, Rows

TERMS: Mapping[str, Callable[[float, float], float]] = {
    "latency": lambda steps, bits: 1.0,
    "volume": lambda steps, bits: 1 / bits,
    "inefficiency": lambda steps, bits: 1 / math.sqrt(bits),
    "stragglers": lambda steps, bits: math.sqrt(steps),
    "overhead": lambda steps, bits: steps,
}
"""Name of a term -> its factor, from H and the bandwidth in bits/s."""
CLEARLY = 0.8
"""A ceiling is taken if it lowers the root mean square of errors to this part of it, or less."""
CEILINGS = 4
"""Ceilings that are tried from each measured bandwidth to the next."""
LEAST_ROWS = 3
"""Rows of a group: fewer say nothing about rows that were not measured."""


STEPS, BANDWIDTH = operator.attrgetter("sync_every"), operator.attrgetter("bits_per_second")
"""Values that a fit leaves out, one after another."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The fitted constants of a group."""

    measure: Measure
    terms: Mapping[str, float]
    """Constants >= 0 by name. From utilisations: in units of a step's computation; from seconds: in
    seconds, with `overhead` as the time of a step.
    """
    ceiling: float = math.inf
    """Bandwidth in bits/s from which on transfers get no faster."""

    @staticmethod
    def unfitted(measure: Measure, names: Iterable[str], ceiling: float = math.inf) -> "Constants":
        """These terms, with constants of 0."""
        return Constants(measure=measure, terms=dict.fromkeys(names, 0.0), ceiling=ceiling)

    def factors(self, row: Row) -> list[float]:
        """Factors of the constants in the time of a row."""
        bits = min(row.bits_per_second, self.ceiling)
        return [TERMS[name](row.sync_every, bits) for name in self.terms]

    def utilisation(self, row: Row) -> float:
        """Compute seconds over all seconds of a round."""
        if self.measure == "compute_utilisation":
            return row.sync_every / (row.sync_every + self._time(row))
        return self.terms.get("overhead", 0.0) * row.sync_every / self._time(row)

    def value(self, row: Row) -> float:
        """The measure of a row, predicted."""
        by_ratio = self.measure == "compute_utilisation"
        return self.utilisation(row) if by_ratio else self._time(row)

    def error(self, row: Row) -> float:
        """Relative error of what is predicted for a measured row."""
        assert row.value is not None
        return abs(self.value(row) / row.value - 1)

    def _time(self, row: Row) -> float:
        pairs = zip(self.terms.values(), self.factors(row), strict=True)
        return sum(constant * factor for constant, factor in pairs)


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Relative errors of predictions."""

    median: float
    worst: float
    count: int

    @staticmethod
    def of(errors: Sequence[float]) -> "Errors | None":
        """The median and the worst of these; None if there are none."""
        if not errors:
            return None
        return Errors(median=float(np.median(errors)), worst=max(errors), count=len(errors))


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A group's constants, and how well they predict."""

    constants: Constants
    fitted: Errors
    """Errors for the rows of the fit."""
    held_out_steps: Errors | None
    """Errors for the rows of each H, by constants of the other rows; None with one H."""
    held_out_bandwidths: Errors | None
    """Errors for the rows of each bandwidth, by constants of the others; None with one."""


def calibrate(measured: Rows) -> dict[Group, Calibration]:
    """Fit the constants of each group of rows.

    Raises:
        ValueError: A group has too few rows.
    """
    groups: dict[Group, list[Row]] = {}
    for row in measured.rows:
        groups.setdefault(row.group, []).append(row)
    for group, rows in groups.items():
        require(
            len(rows) >= LEAST_ROWS,
            f"a fit needs at least {LEAST_ROWS} measured rows of the same method, workers and "
            f"parameters, got {len(rows)} of {describe(group)}",
        )
    return {group: _calibrate(rows, measured.measure) for group, rows in groups.items()}


def predict(calibrations: Mapping[Group, Calibration], rows: Iterable[Row]) -> list[float]:
    """The compute utilisation of each row.

    Raises:
        ValueError: Nothing was measured of a row's group.
    """
    found = []
    for row in rows:
        require(
            row.group in calibrations,
            f"nothing was measured of {describe(row.group)}; measured were "
            f"{'; '.join(describe(group) for group in calibrations)}",
        )
        found.append(calibrations[row.group].constants.utilisation(row))
    return found


def describe(group: Group) -> str:
    """A group in words."""
    method, workers, parameters = group
    return f"{method}, {workers:g} workers, {parameters:g} parameters"


def _calibrate(rows: Sequence[Row], measure: Measure) -> Calibration:
    by_ratio = measure == "compute_utilisation"
    names, always = ([*TERMS], ()) if by_ratio else ([*TERMS][:-1], ("overhead",))
    forms = [
        Constants.unfitted(measure, (*always, *chosen))
        for number in range(0 if always else 1, len(names) + 1)
        for chosen in itertools.combinations(names, number)
        if _can_tell(rows, chosen)
    ]
    # Fewer terms come first, and win if more do not predict better.
    best = min(forms, key=lambda form: round(_held_out_error(rows, form), 9))
    form = _with_ceiling(rows, best)
    constants = _fit(rows, form)
    fitted = Errors.of([constants.error(row) for row in rows])
    assert fitted is not None
    return Calibration(
        constants=constants,
        fitted=fitted,
        held_out_steps=Errors.of(_held_out(rows, form, STEPS)),
        held_out_bandwidths=Errors.of(_held_out(rows, form, BANDWIDTH)),
    )


def _can_tell(rows: Sequence[Row], terms: Collection[str]) -> bool:
    """True unless `inefficiency` would be mistaken for `volume`."""
    bandwidths = len({row.bits_per_second for row in rows})
    return "inefficiency" not in terms or ("volume" in terms and bandwidths > 2)


def _with_ceiling(rows: Sequence[Row], form: Constants) -> Constants:
    """The terms with the ceiling that predicts clearly better than none; else as they are."""
    measured = sorted({row.bits_per_second for row in rows})
    tried = [
        low * (high / low) ** (part / CEILINGS)
        for low, high in itertools.pairwise(measured)
        for part in range(CEILINGS)
    ]
    with_volume = tuple(name for name in TERMS if name in form.terms or name == "volume")
    errors = {
        (ceiling, names): _held_out_error(rows, Constants.unfitted(form.measure, names, ceiling))
        for ceiling in tried
        for names in (tuple(form.terms), with_volume)
    }
    best = min(errors, key=lambda choice: (round(errors[choice], 12), choice), default=None)
    if best is None or errors[best] > CLEARLY**2 * _held_out_error(rows, form):
        return form
    return Constants.unfitted(form.measure, best[1], best[0])


def _held_out_error(rows: Sequence[Row], form: Constants) -> float:
    """Mean squared relative error for values of H and bandwidths that were left out."""
    errors = _held_out(rows, form, STEPS) + _held_out(rows, form, BANDWIDTH)
    if not errors:
        constants = _fit(rows, form)
        errors = [constants.error(row) for row in rows]
    return float(np.mean(np.square(errors)))


def _held_out(rows: Sequence[Row], form: Constants, key: Callable[[Row], float]) -> list[float]:
    """Errors for the rows of each key, by a fit to the others; none if all rows have one key."""
    errors = []
    for left_out in {key(row) for row in rows}:
        others = [row for row in rows if key(row) != left_out]
        if others:
            constants = _fit(others, form)
            errors += [constants.error(row) for row in rows if key(row) == left_out]
    return errors


def _fit(rows: Sequence[Row], form: Constants) -> Constants:
    """Least squares of relative errors with constants >= 0.

    A utilisation u says that a round takes H / u steps' time, H (1 / u - 1) of it not computation.
    An error of that by d changes u by the part d u / H.
    """
    steps, measured = np.array([(row.sync_every, row.value) for row in rows], float).T
    by_ratio = form.measure == "compute_utilisation"
    weights = measured / steps if by_ratio else 1 / measured
    wanted = steps * (1 / measured - 1) if by_ratio else measured
    factors = np.array([form.factors(row) for row in rows])
    solved = _nonnegative(weights[:, None] * factors, weights * wanted)
    return replace(form, terms=dict(zip(form.terms, solved, strict=True)))


def _nonnegative(matrix: np.ndarray, wanted: np.ndarray) -> list[float]:
    """The x >= 0 with the smallest |matrix x - wanted|. With so few columns all sets of positive
    ones can be tried.
    """
    columns = matrix.shape[1]
    scale = np.linalg.norm(matrix, axis=0)
    best, smallest = np.zeros(columns), float(np.linalg.norm(wanted))
    for number in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), number):
            part = matrix[:, chosen] / scale[list(chosen)]
            found = np.linalg.lstsq(part, wanted, rcond=None)[0]
            residual = float(np.linalg.norm(part @ found - wanted))
            if (found >= 0).all() and residual < smallest * (1 - 1e-12):
                best, smallest = np.zeros(columns), residual
                best[list(chosen)] = found / scale[list(chosen)]
    return [float(value) for value in best]
