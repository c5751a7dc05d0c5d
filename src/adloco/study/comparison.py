"""The comparison of a study's runs: curves, final values, the cost of a loss, and differences."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context
from functools import partial
from pathlib import Path

from adloco.config.finding import held_by
from adloco.errors import require
from adloco.metric import SECONDS
from adloco.metrics import ROUND, Metric, Record, known_measures, validation
from adloco.plan.link import Link
from adloco.rules.outcome import ended_finite, islands_in, of_newest_text
from adloco.run.folder import SUMMARY
from adloco.run.json_files import finite, read_json
from adloco.run.records import METRICS, Records
from adloco.study.arms import StudyRun
from adloco.study.fairness import differences, held_equal, inequalities, unpaired
from adloco.study.links import bytes_sent, link_seconds, num_syncs
from adloco.study.statistics import Difference, Spread, first_crossing, paired_difference

ARMS_IN_PAIRS = 4
"""Arms of which all pairs are compared."""
MOST_WORDS = 400
"""Characters in which settings that differ are said with their values."""
FEW_ROUNDS = 5
"""Rounds that an outer momentum and a batch rule need before they act."""
SENT = replace(ROUND["bytes_sent"], name="sent")
"""Bytes that each worker sent over links, with every worker on an island of its own."""


@dataclass(frozen=True, kw_only=True)
class RunCurves:
    """One run's numbers at the end of each of its rounds."""

    run: StudyRun
    axes: Mapping[str, list[float]]
    """Name of an axis -> values; [rounds]."""
    measures: Mapping[str, list[float | None]]
    """Name of a measure -> values, None in rounds without evaluation; [rounds]."""
    corpus: str
    """Fingerprint of the text; empty if it is not known."""
    parameters: int = 0
    """Parameters that were trained; 0 if they are not known."""
    problem: str = ""
    """Why the run counts in no number; empty if it ended with a finite evaluation."""

    def last(self, name: str) -> float | None:
        """The last value of a measure or on an axis; None if the run failed."""
        values = self.measures[name] if name in self.measures else self.axes[name]
        known = [value for value in values if value is not None]
        return known[-1] if known and not self.problem else None


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A number in which arms are compared."""

    name: str
    metric: Metric
    of: Callable[[RunCurves], float | None]
    """The number of a run; None if it has none."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs of several arms, and what is said of them."""

    arms: Mapping[str, list[RunCurves]]
    """Arm -> its runs, by seed."""
    axes: Mapping[str, Metric]
    measures: tuple[Metric, ...]
    """The task's measures on the evaluation set; the loss first."""
    targets: tuple[float, ...]
    """Losses to reach."""
    replicas: int
    """Replicas that data-parallel arms are taken to have."""
    equal: tuple[str, ...]
    unequal: tuple[str, ...]
    """Things not held equal, for which a comparison is refused unless it is forced."""
    marked: tuple[str, ...]
    """Other things not held equal: tokenizers that are compared, and what resumes changed."""
    differs: tuple[str, ...]
    """Settings in which the arms differ, with their values."""

    @property
    def loss(self) -> Metric:
        """The loss on the evaluation set."""
        return self.measures[0]

    @property
    def statement(self) -> str:
        """The things held equal, the number of seeds, and how to read the lines."""
        counts = [sum(not run.problem for run in runs) for runs in self.arms.values()]
        number = " to ".join(map(str, sorted({min(counts), max(counts)})))
        seeds = f"{number} seed{'' if number == '1' else 's'} of each arm"
        parallel = [arm for arm, runs in self.arms.items() if runs[0].run.recipe.data_parallel]
        taken = f"{', '.join(parallel)}: {self.replicas} replicas that sync in each step."
        sentences = [
            f"Held equal: {', '.join(self.equal) or 'nothing'}; {seeds}.",
            unpaired([run.run for runs in self.arms.values() for run in runs]),
            taken if parallel else "",
        ]
        return " ".join(filter(None, sentences)) + self.warning

    @property
    def differing(self) -> str:
        """The settings in which the arms differ, and a sentence if an arm has few rounds."""
        few = [
            arm
            for arm, runs in self.arms.items()
            if 0 < max(len(run.axes["tokens"]) for run in runs) < FEW_ROUNDS
            and runs[0].run.recipe.syncs
        ]
        short = (
            f" Fewer than {FEW_ROUNDS} rounds: {', '.join(few)}; what syncs do shows later, so "
            "give more tokens or a smaller method.sync_every."
        )
        differs = "; ".join(self.differs) or "nothing"
        if len(differs) > MOST_WORDS:
            names = ", ".join(text.partition(" (")[0] for text in self.differs)
            differs = f"{names} (their values are in compare.json)"
        return f"Differs: {differs}.{short if few else ''}"

    @property
    def warning(self) -> str:
        """The things not held equal, as a sentence; empty if all was."""
        every = "; ".join((*self.unequal, *self.marked))
        return f" NOT HELD EQUAL: {every}." if every else ""

    @property
    def finals(self) -> list[Quantity]:
        """The last value of each measure; the loss first."""
        return [
            Quantity(name=metric.name, metric=metric, of=partial(RunCurves.last, name=metric.name))
            for metric in self.measures
        ]

    @property
    def totals(self) -> list[Quantity]:
        """The last value on each axis."""
        return [
            Quantity(name=axis, metric=metric, of=partial(RunCurves.last, name=axis))
            for axis, metric in self.axes.items()
        ]

    def needed(self, target: float) -> list[Quantity]:
        """The place on each axis where the loss first reaches a target."""

        def reached(run: RunCurves, axis: str) -> float | None:
            crossing = first_crossing(run.axes[axis], run.measures[self.loss.name], target)
            return None if run.problem else crossing

        return [
            Quantity(name=axis, metric=metric, of=partial(reached, axis=axis))
            for axis, metric in self.axes.items()
        ]

    def spread(self, quantity: Quantity, arm: str) -> Spread:
        """A quantity over the seeds of an arm."""
        return Spread.of([quantity.of(run) for run in self.arms[arm]])

    @property
    def best(self) -> str:
        """The arm with the lowest mean final loss, of those with the most seeds that have one."""

        def rank(arm: str) -> tuple[int, float]:
            found = self.spread(self.finals[0], arm)
            mean = math.inf if found.mean is None else found.mean
            return -found.count, mean

        return min(self.arms, key=rank)

    def differences(self, quantity: Quantity) -> list[Difference]:
        """A quantity of an arm minus that of another, over the seeds with which both have it: of
        all pairs, or of the best arm and each other one with more than `ARMS_IN_PAIRS` arms.
        """
        numbers = {
            arm: {run.run.seed: value for run in runs if (value := quantity.of(run)) is not None}
            for arm, runs in self.arms.items()
        }
        names = list(self.arms)
        pairs = list(itertools.combinations(names, 2))
        if len(names) > ARMS_IN_PAIRS:
            pairs = [(self.best, name) for name in names if name != self.best]
        found = (paired_difference(one, two, numbers) for one, two in pairs)
        return [difference for difference in found if difference is not None]


def compare(
    runs: Sequence[StudyRun],
    *,
    targets: Sequence[float],
    links: Sequence[Link],
    problems: Mapping[Path, str],
    varied: Sequence[str] = (),
) -> Comparison:
    """Compare runs by their records.

    Args:
        runs: The runs, arm by arm.
        targets: Losses to reach; empty for the highest final loss of any run.
        links: Links for which times are modelled.
        problems: Folder -> why its run did not end. A run that ended without a finite evaluation
            has a problem all the same.
        varied: Settings in which the arms differ on purpose.

    Raises:
        ValueError: No run ended with a finite evaluation, or records cannot be compared.
    """
    rounds = [Records(run.folder).read_whole() for run in runs]
    trainers = (row for records in rounds for record in records for row in record["trainers"])
    replicas = max([2, *(row["workers"] for row in trainers)])
    known = known_measures(runs[0].recipe.task.measures, list(itertools.chain(*rounds)))
    measures = tuple(map(validation, known))
    curves = [
        _curves(run, records, measures, links, replicas, problems.get(run.folder, ""))
        for run, records in zip(runs, rounds, strict=True)
    ]
    arms: dict[str, list[RunCurves]] = {}
    for curve in curves:
        arms.setdefault(curve.run.arm, []).append(curve)
    texts = {arm: sorted({run.corpus for run in found} - {""}) for arm, found in arms.items()}
    different = {text for found in texts.values() for text in found}
    other = "; ".join(f"{arm}: {', '.join(text) or '-'}" for arm, text in texts.items())
    unequal = inequalities(runs, varied)
    # Losses are for each token, of which tokenizers make more or fewer from a text, and texts,
    # windows and their places differ in how hard they are.
    others = [name for name in varied if held_by(name) in ("", "model", "budget")]
    marked = [each for each in inequalities(runs, others) if each not in unequal]
    marked += [
        f"settings of {run.arm}, seed {run.seed}: {'; '.join(changes)}"
        for run in runs
        if (changes := run.changes)
    ]
    text_varies = any(setting.startswith("data.") for setting in varied)
    unequal += [f"text (fingerprints {other})"] if len(different) > 1 and not text_varies else []
    last = [alike[-1] for records in rounds if (alike := of_newest_text(records))]
    if len({islands_in(record) for record in last}) > 1 and not text_varies:
        unequal.append("islands whose texts are evaluated at the end")
    # No setting says what a model from Python is.
    sizes = {arm: sorted({run.parameters for run in found} - {0}) for arm, found in arms.items()}
    held = held_equal(runs)
    if not unequal and not varied and len({*itertools.chain(*sizes.values())}) > 1:
        said = "; ".join(f"{arm}: {' or '.join(map(str, each))}" for arm, each in sizes.items())
        unequal.append(f"model (its parameters that are trained: {said})")
        held.remove("model")
    comparison = Comparison(
        arms=arms,
        axes={
            **{name: ROUND[name] for name in ("tokens", "inner_steps", "syncs")},
            "sent": SENT,
            "seconds": Metric("seconds", "time measured", SECONDS),
            **{
                f"seconds on {link.name}": Metric(link.name, f"time on {link.name}", SECONDS)
                for link in links
            },
        },
        measures=measures,
        targets=tuple(targets),
        replicas=replicas,
        equal=tuple(held),
        unequal=tuple(unequal),
        marked=tuple(marked),
        differs=tuple(differences(runs, varied)),
    )
    finals = [comparison.spread(comparison.finals[0], arm).highest for arm in arms]
    reached = [value for value in finals if value is not None]
    require(
        bool(reached),
        "no run ended with a finite evaluation, so there is nothing to compare; lower "
        "evaluation.every, or the learning rates of runs that diverged",
    )
    # Rounded up, so that every run that ended reaches it.
    highest = Context(prec=4, rounding=ROUND_CEILING).create_decimal(repr(max(reached)))
    return comparison if targets else replace(comparison, targets=(float(highest),))


def _curves(
    run: StudyRun,
    records: Sequence[Record],
    measures: Sequence[Metric],
    links: Sequence[Link],
    replicas: int,
    problem: str,
) -> RunCurves:
    alike = {record["round"] for record in of_newest_text(records)}
    axes: dict[str, list[float]] = {
        name: [float(record[name]) for record in records]
        for name in ("tokens", "inner_steps", "seconds")
    }
    axes["syncs"] = [float(num_syncs(record, run.recipe)) for record in records]
    axes["sent"] = [bytes_sent(record, run.recipe, replicas) for record in records]
    for link in links:
        axes[f"seconds on {link.name}"] = link_seconds(records, run.recipe, link, replicas)
    if not problem and not records:
        problem = f"{run.folder / METRICS} has no rounds"
    summary = run.folder / SUMMARY
    ended = read_json(summary) if summary.is_file() else {}
    if not problem and records[-1]["round"] < ended.get("rounds", 0):
        problem = f"{run.folder / METRICS} has lost its last rounds"
    if not problem and not ended_finite(records):
        problem = "its last evaluation is not finite"
    return RunCurves(
        run=run,
        axes=axes,
        measures={
            metric.name: [
                finite(record.get(metric.name)) if record["round"] in alike else None
                for record in records
            ]
            for metric in measures
        },
        corpus="" if run.recipe.data.streaming else ended.get("corpus", ""),
        parameters=ended.get("num_parameters", 0),
        problem=problem,
    )
