"""A model of the time of a round, fitted to measured rounds.

The time that a round of H inner steps takes on links of bandwidth B is

    H step + latency + volume / B + inefficiency / sqrt(B) + stragglers sqrt(H) + overhead H

with constants >= 0 for each method, number of workers and size of the model; B is the bandwidth,
or a ceiling from which on transfers get no faster. `latency` is paid for each sync. `inefficiency`
stands for transfers that profit less and less from a faster link, as TCP streams do. Workers wait
for the slowest of them: the sum of H independent times deviates by sqrt(H). `overhead` is time of
each step that is not computation. All bytes cross the link, so `inefficiency` comes beside `volume`
only; and two bandwidths cannot tell the two apart, so it takes three. Transfers may be hidden
behind a part of the round's steps, and take time only from there on.

A round's utilisation is H step over its time. From utilisations alone the constants are known in
units of `step`; from seconds alone `overhead` cannot be told from `step` and counts as that.

Each group of rows takes those terms that predict best what they were not fitted to: every value of
H, and every bandwidth, is left out once. Then it takes the part of the steps that hides transfers,
and the ceiling, that predict best, if that is clearly better than none.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from adloco.errors import require
from adloco.plan.measured_rows import Group, Measure, Row, Rows

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
CLEARLY = 0.8
"""What hides transfers, or a ceiling, is taken if it lowers the root mean square of errors to this
part of it, or less."""
CEILINGS = 4
"""Ceilings that are tried from each measured bandwidth to the next."""
PARTS = 8
"""Parts of the steps, from 1 / PARTS to 1, that are tried as those that hide transfers."""
GUESSES, CORRECTIONS = 6, 5
"""First guesses which transfers are late, and fits from each of them."""
LEAST_ROWS = 3
"""Rows of a group, and of those whose transfers are late, and are not: fewer say nothing about rows
that were not measured."""
STEPS, BANDWIDTH = 0, 1
"""Rows of a table (H, bandwidth, measured value; a column for each row of the file) whose values a
fit leaves out, one after another."""


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
        """The same with these terms, not fitted yet."""
        return replace(self, terms=dict.fromkeys(names, 0.0))

    def factors(self, steps: np.ndarray, bits: np.ndarray, late: np.ndarray) -> np.ndarray:
        """Factors of the constants in the times of rounds, of shape (terms, rows).

        Args:
            steps: H of each row.
            bits: Bandwidth of each.
            late: 1.0 for each whose transfers end after the steps that hide them, else 0.0.
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
        flags = (np.zeros_like(steps), np.ones_like(steps))
        return np.array(
            [
                constants @ self.factors(steps, bits, late) - late * self.hiding(steps)
                for late in flags
            ]
        )

    def late(self, steps: np.ndarray, bits: np.ndarray) -> np.ndarray:
        """1.0 for each row whose transfers end after the steps that hide them, else 0.0."""
        in_time, late = self.times(steps, bits)
        found: np.ndarray = 1.0 * np.greater(late, in_time)
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
        return self.terms.get("overhead", 0.0) * row.sync_every / self.value(row)


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Relative errors of predictions."""

    median: float
    worst: float
    count: int

    @staticmethod
    def of(errors: Sequence[float] | np.ndarray) -> "Errors | None":
        """The median and the worst of these; None if there are none."""
        if len(errors) == 0:
            return None
        return Errors(
            median=float(np.median(errors)), worst=float(np.max(errors)), count=len(errors)
        )


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
    table = np.array([(row.sync_every, row.bits_per_second, row.value) for row in rows], float).T
    form = _refined(table, _best(table, Constants(measure=measure)))
    constants = _fit(table, form)
    form = constants if form.hidden else form
    fitted = Errors.of(_errors(table, constants))
    assert fitted is not None
    return Calibration(
        constants=constants,
        fitted=fitted,
        held_out_steps=Errors.of(_held_out(table, form, STEPS)),
        held_out_bandwidths=Errors.of(_held_out(table, form, BANDWIDTH)),
    )


def _best(table: np.ndarray, form: Constants) -> Constants:
    """The form with those terms that predict best; with volume if something hides it."""
    by_ratio = form.measure == "compute_utilisation"
    always = (() if by_ratio else ("overhead",)) + (("volume",) if form.hidden else ())
    names = [name for name in TERMS if name not in always]
    forms = [
        form.of((*always, *chosen))
        for number in range(0 if always else 1, len(names) + 1)
        for chosen in itertools.combinations(names, number)
        if _can_tell(table, (*always, *chosen))
    ]
    # Fewer terms come first, and win if more do not predict better.
    return min(forms, key=lambda form: round(_held_out_error(table, form), 9))


def _can_tell(table: np.ndarray, terms: Collection[str]) -> bool:
    """True unless `inefficiency` would be mistaken for `volume`."""
    bandwidths = len(np.unique(table[BANDWIDTH]))
    return "inefficiency" not in terms or ("volume" in terms and bandwidths > 2)


def _refined(table: np.ndarray, form: Constants) -> Constants:
    """The form with what hides transfers, and the ceiling, that predict clearly better than none;
    else as it is.
    """
    whole = form.of(name for name in TERMS if _can_tell(table, (name, "volume")))
    fits = [_fit(table, replace(whole, hidden=(1 + part) / PARTS)) for part in range(PARTS)]
    best = min(fits, key=lambda fit: round(_squared(_errors(table, fit)), 12))
    late = best.late(*table[:2])
    # From one H, what is hidden is only a shorter latency.
    enough = min(late.sum(), len(late) - late.sum()) >= LEAST_ROWS
    if enough and len(np.unique(table[STEPS])) > 1:
        form = _clearly_better(table, form, [_best(table, best)])
    ceilings = [
        replace(each, ceiling=low * (high / low) ** (part / CEILINGS))
        for low, high in itertools.pairwise(np.unique(table[BANDWIDTH]).tolist())
        for part in range(CEILINGS)
        for each in (form, form.of({**form.terms, "volume": 0.0}))
    ]
    return _clearly_better(table, form, ceilings)


def _clearly_better(table: np.ndarray, form: Constants, others: Sequence[Constants]) -> Constants:
    """The form among the others that predicts best, if it is clearly better than this one; else
    this one.
    """
    errors = [round(_held_out_error(table, other), 12) for other in others]
    if not errors or min(errors) >= CLEARLY**2 * round(_held_out_error(table, form), 12):
        return form
    return others[errors.index(min(errors))]


def _held_out_error(table: np.ndarray, form: Constants) -> float:
    """Mean squared relative error for values of H and bandwidths that were left out."""
    form = _fit(table, form) if form.hidden else form
    errors = np.concatenate([_held_out(table, form, column) for column in (STEPS, BANDWIDTH)])
    return _squared(errors if errors.size else _errors(table, _fit(table, form)))


def _held_out(table: np.ndarray, form: Constants, column: int) -> np.ndarray:
    """Errors for the rows of each value of a column, by a fit to the others; none if all rows have
    one value.
    """
    values = np.unique(table[column])
    left_out = [table[column] == value for value in (values if values.size > 1 else [])]
    parts = [_errors(table[:, out], _fit(table[:, ~out], form)) for out in left_out]
    return np.concatenate([*parts, np.zeros(0)])


def _errors(table: np.ndarray, constants: Constants) -> np.ndarray:
    """Relative error of what is predicted for each measured row."""
    steps, bits, measured = table
    errors: np.ndarray = np.abs(constants.values(steps, bits) / measured - 1)
    return errors


def _squared(errors: np.ndarray) -> float:
    return float(np.mean(np.square(errors)))


def _fit(table: np.ndarray, form: Constants) -> Constants:
    """The form with constants >= 0 that have the least squares of relative errors.

    Constants that it has are a first guess.
    """
    steps, bits, _ = table
    if not form.hidden:
        return _solved(table, form, np.ones_like(steps))
    # Which transfers are late depends on the constants: those of the slowest links and the shortest
    # rounds. Each fit corrects the guess of the one before.
    likely = np.quantile(steps * bits, np.linspace(0, 1, GUESSES))
    guesses = [1.0 * (steps * bits <= most) for most in likely]
    if any(form.terms.values()):
        guesses = [form.late(steps, bits)]
    found = []
    for late in guesses:
        for _ in range(CORRECTIONS):
            found.append(_solved(table, form, late))
            before, late = late, found[-1].late(steps, bits)
            if (late == before).all():
                break
    return min(found, key=lambda each: round(_squared(_errors(table, each)), 12))


def _solved(table: np.ndarray, form: Constants, late: np.ndarray) -> Constants:
    """The best constants if it is known which transfers are late.

    A utilisation u says that a round takes H / u steps' time, H (1 / u - 1) of it not computation.
    An error of that by d changes u by the part d u / H.
    """
    steps, bits, measured = table
    by_ratio = form.measure == "compute_utilisation"
    weights = measured / steps if by_ratio else 1 / measured
    wanted = steps * (1 / measured - 1) if by_ratio else measured
    wanted = wanted + late * form.hiding(steps)
    found = _nonnegative((weights * form.factors(steps, bits, late)).T, weights * wanted)
    return replace(form, terms=dict(zip(form.terms, found, strict=True)))


def _nonnegative(matrix: np.ndarray, wanted: np.ndarray) -> list[float]:
    """The x >= 0 with the smallest |matrix x - wanted|. With so few columns all sets of positive
    ones can be tried, beginning with all.
    """
    columns = matrix.shape[1]
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    best, smallest = np.zeros(columns), float(np.linalg.norm(wanted))
    for number in range(columns, 0, -1):
        for chosen in itertools.combinations(range(columns), number):
            part = matrix[:, chosen] / scale[list(chosen)]
            found = np.linalg.lstsq(part, wanted, rcond=None)[0]
            residual = float(np.linalg.norm(part @ found - wanted))
            if (found >= 0).all() and residual < smallest * (1 - 1e-12):
                best, smallest = np.zeros(columns), residual
                best[list(chosen)] = found / scale[list(chosen)]
                if number == columns:
                    return best.tolist()
    return best.tolist()
