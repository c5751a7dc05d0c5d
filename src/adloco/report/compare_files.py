"""compare.json, compare.csv and compare_differences.csv: a comparison for programs."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from adloco.study.comparison import Comparison
from adloco.study.statistics import Difference


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "held_equal": list(comparison.equal),
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
    names = [f"{axis}_to_{target:g}" for target in comparison.targets for axis in comparison.axes]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        [
            "arm",
            "seed",
            "folder",
            "problem",
            *(metric.name for metric in comparison.measures),
            *comparison.axes,
            *names,
        ]
    )
    for arm, runs in comparison.arms.items():
        for run in runs:
            reached = (
                comparison.reached(run, axis, target)
                for target in comparison.targets
                for axis in comparison.axes
            )
            finals = (run.final(metric.name) for metric in comparison.measures)
            totals = (run.total(axis) for axis in comparison.axes)
            about = [arm, run.run.seed, run.run.folder, run.problem]
            writer.writerow([*about, *finals, *totals, *reached])
    return out.getvalue()


def differences_csv(comparison: Comparison) -> str:
    """A row for each pair of arms and number in which they are compared."""
    loss = comparison.loss.name
    found = {f"final {loss}": comparison.final_differences()} | {
        f"{axis}_to_{target:g}": comparison.differences_to_target(axis, target)
        for target in comparison.targets
        for axis in comparison.axes
    }
    out = io.StringIO()
    names = [field.name for field in fields(Difference)]
    writer = csv.DictWriter(out, ["number", *names], lineterminator="\n")
    writer.writeheader()
    for number, differences in found.items():
        writer.writerows({"number": number} | asdict(difference) for difference in differences)
    return out.getvalue()


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
