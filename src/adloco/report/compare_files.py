"""compare.json, compare.csv and compare_differences.csv: a comparison for programs."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from adloco.report.table import csv_text
from adloco.study.comparison import Comparison
from adloco.study.statistics import Difference


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "held_equal": list(comparison.equal),
        "differs": list(comparison.differs),
        "not_held_equal": list(comparison.unequal),
        "units": {
            **{name: metric.unit.name for name, metric in comparison.axes.items()},
            **{metric.name: metric.unit.name for metric in comparison.measures},
        },
        "data_parallel_replicas": comparison.replicas,
        "targets": list(comparison.targets),
        "arms": [_arm_json(comparison, arm) for arm in comparison.arms],
        "differences_of_final_loss": _differences_json(comparison.final_differences()),
        "differences_to_target": {
            f"{target:g}": {
                axis: _differences_json(comparison.differences_to_target(axis, target))
                for axis in comparison.axes
            }
            for target in comparison.targets
        },
    }


def to_csv(comparison: Comparison) -> str:
    """A row for each run: its final measures, totals, and what it needed for each target."""
    measures = [metric.name for metric in comparison.measures]
    reached = [(axis, target) for target in comparison.targets for axis in comparison.axes]
    names = [*measures, *comparison.axes, *(f"{axis}_to_{target:g}" for axis, target in reached)]
    rows = [
        [
            *(arm, run.run.seed, run.run.folder, run.problem),
            *(run.final(name) for name in measures),
            *(run.total(axis) for axis in comparison.axes),
            *(comparison.reached(run, axis, target) for axis, target in reached),
        ]
        for arm, runs in comparison.arms.items()
        for run in runs
    ]
    return csv_text(["arm", "seed", "folder", "problem", *names], rows)


def differences_csv(comparison: Comparison) -> str:
    """A row for each pair of arms and number in which they are compared."""
    loss = comparison.loss.name
    found = {f"final {loss}": comparison.final_differences()} | {
        f"{axis}_to_{target:g}": comparison.differences_to_target(axis, target)
        for target in comparison.targets
        for axis in comparison.axes
    }
    names = [field.name for field in fields(Difference)]
    rows = [
        [number, *asdict(difference).values()]
        for number, differences in found.items()
        for difference in differences
    ]
    return csv_text(["number", *names], rows)


def _differences_json(differences: Sequence[Difference]) -> list[dict[str, Any]]:
    interval = {"interval": "95%, Student's t, paired by seed"}
    return [asdict(difference) | interval for difference in differences]


def _arm_json(comparison: Comparison, arm: str) -> dict[str, Any]:
    return {
        "name": arm,
        "final": {
            metric.name: asdict(comparison.finals(arm, metric.name))
            for metric in comparison.measures
        },
        "total": {axis: asdict(comparison.totals(arm, axis)) for axis in comparison.axes},
        "to_target": {
            f"{target:g}": {
                axis: asdict(comparison.to_target(arm, axis, target)) for axis in comparison.axes
            }
            for target in comparison.targets
        },
        "runs": [
            {
                "seed": run.run.seed,
                "folder": str(run.run.folder),
                "problem": run.problem,
                "axes": run.axes,
                "measures": run.measures,
            }
            for run in comparison.arms[arm]
        ],
    }
