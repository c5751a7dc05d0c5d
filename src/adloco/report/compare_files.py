"""compare.json and compare.csv: a comparison for programs."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from adloco.report.table import csv_text
from adloco.study.comparison import Comparison, Quantity


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "held_equal": list(comparison.equal),
        "differs": list(comparison.differs),
        "not_held_equal": [*comparison.unequal, *comparison.marked],
        "units": {
            each.name: each.metric.unit.name for each in (*comparison.totals, *comparison.finals)
        },
        "data_parallel_replicas": comparison.replicas,
        "targets": list(comparison.targets),
        "arms": [_arm_json(comparison, arm) for arm in comparison.arms],
        "differences_of_final_loss": _differences_json(comparison, comparison.finals[0]),
        "differences_to_target": {
            f"{target:g}": {
                each.name: _differences_json(comparison, each) for each in comparison.needed(target)
            }
            for target in comparison.targets
        },
    }


def to_csv(comparison: Comparison) -> str:
    """A row for each run: its final measures, totals, and what it needed for each target."""
    quantities = {each.name: each for each in (*comparison.finals, *comparison.totals)} | {
        f"{each.name}_to_{target:g}": each
        for target in comparison.targets
        for each in comparison.needed(target)
    }
    rows = [
        [
            *(arm, run.run.seed, run.run.folder, run.problem),
            *(quantity.of(run) for quantity in quantities.values()),
        ]
        for arm, runs in comparison.arms.items()
        for run in runs
    ]
    return csv_text(["arm", "seed", "folder", "problem", *quantities], rows)


def _differences_json(comparison: Comparison, quantity: Quantity) -> list[dict[str, Any]]:
    interval = {"interval": "95%, Student's t, paired by seed"}
    return [asdict(difference) | interval for difference in comparison.differences(quantity)]


def _arm_json(comparison: Comparison, arm: str) -> dict[str, Any]:
    def spreads(quantities: Sequence[Quantity]) -> dict[str, Any]:
        return {each.name: asdict(comparison.spread(each, arm)) for each in quantities}

    return {
        "name": arm,
        "final": spreads(comparison.finals),
        "total": spreads(comparison.totals),
        "to_target": {
            f"{target:g}": spreads(comparison.needed(target)) for target in comparison.targets
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
