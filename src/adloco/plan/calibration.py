"""The model of a round (`plan/round_model.py`), fitted to measured rounds.

Each group of rows takes those terms that predict best what they were not fitted to: every value of
H, and every bandwidth, is left out once. All bytes cross the link, so `inefficiency` comes beside
`volume` only; and two bandwidths cannot tell the two apart, so it takes three. Then it takes the
part of the steps that hides transfers, and the ceiling, that fit best, if they predict clearly
better than none.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from adloco.errors import require
from adloco.plan.measured_rows import Group, Measure, Row, Rows
from adloco.plan.round_model import TERMS, Constants

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
        worst = float(np.max(errors))
        return Errors(median=float(np.median(errors)), worst=worst, count=len(errors))


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
    """Fit the constants of each group of rows; ValueError if a group has too few rows."""
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


def predict(calibrations: Mapping[Group, Calibration], rows: Sequence[Row]) -> list[float]:
    """The compute utilisation of each row; ValueError if nothing was measured of its group."""
    for row in rows:
        require(
            row.group in calibrations,
            f"nothing was measured of {describe(row.group)}; measured were "
            f"{'; '.join(map(describe, calibrations))}",
        )
    return [calibrations[row.group].constants.utilisation(row) for row in rows]


def describe(group: Group) -> str:
    """A group in words."""
    method, workers, parameters = group
    return f"{method}, {workers:g} workers, {parameters:g} parameters"


def _calibrate(rows: Sequence[Row], measure: Measure) -> Calibration:
    table = np.array([(row.sync_every, row.bits_per_second, row.value) for row in rows], float).T
    form = _refined(table, _best(table, Constants(measure=measure)))
    constants = _fit(table, form)
    fitted = Errors.of(_errors(table, constants))
    assert fitted is not None
    return Calibration(
        constants=constants,
        fitted=fitted,
        held_out_steps=Errors.of(_held_out(table, constants, STEPS)),
        held_out_bandwidths=Errors.of(_held_out(table, constants, BANDWIDTH)),
    )


def _best(table: np.ndarray, form: Constants) -> Constants:
    """The form with those terms that predict best."""
    always = () if form.measure == "compute_utilisation" else ("overhead",)
    names = [name for name in TERMS if name not in always]
    forms = [
        form.of((*always, *chosen))
        for number in range(len(names) + 1)
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
    """The form with what hides transfers, and the ceiling, that fit best, if they predict clearly
    better than none; else as it is.
    """
    whole = form.of(TERMS)
    best = _best_fit(table, [replace(whole, hidden=(1 + part) / PARTS) for part in range(PARTS)])
    late = best.late(*table[:2])
    # From one H, what is hidden is only a shorter latency.
    enough = min(late.sum(), (~late).sum()) >= LEAST_ROWS
    if enough and len(np.unique(table[STEPS])) > 1:
        form = _clearly_better(table, form, [_best(table, best)])
    ceilings = [
        low * (high / low) ** (part / CEILINGS)
        for low, high in itertools.pairwise(np.unique(table[BANDWIDTH]).tolist())
        for part in range(CEILINGS)
    ]
    forms = (form, form.of({**form.terms, "volume": 0.0})) if ceilings else ()
    limited = [_best_fit(table, [replace(each, ceiling=c) for c in ceilings]) for each in forms]
    return _clearly_better(table, form, limited)


def _best_fit(table: np.ndarray, forms: Sequence[Constants]) -> Constants:
    """The fit with the smallest errors among those of several forms."""
    fits = [_fit(table, form) for form in forms]
    return min(fits, key=lambda fit: round(_squared(_errors(table, fit)), 12))


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
    whole = _fit(table, form)
    errors = np.concatenate([_held_out(table, whole, column) for column in (STEPS, BANDWIDTH)])
    return _squared(errors if errors.size else _errors(table, whole))


def _held_out(table: np.ndarray, whole: Constants, column: int) -> np.ndarray:
    """Errors for the rows of each value of a column, by a fit to the others; none if all rows have
    one value.

    whole: The fit to all rows, which is a first guess.
    """
    values = np.unique(table[column])
    left_out = [table[column] == value for value in (values if values.size > 1 else [])]
    parts = [_errors(table[:, out], _fit(table[:, ~out], whole)) for out in left_out]
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
        return _solved(table, form, np.full(len(steps), True))
    # Which transfers are late depends on the constants: those of the slowest links and the shortest
    # rounds. Each fit corrects the guess of the one before.
    likely = np.quantile(steps * bits, np.linspace(0, 1, GUESSES))
    guesses = [steps * bits <= most for most in likely]
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
