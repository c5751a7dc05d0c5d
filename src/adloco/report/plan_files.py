"""plan.json, plan.csv and recipe.toml: a plan for programs, and its recipe for `adloco train`."""

import math
import re
from dataclasses import asdict, replace
from typing import Any

from adloco.config.recipe_text import to_toml
from adloco.plan.advice import pareto
from adloco.plan.cluster_plan import BANDWIDTHS, Plan
from adloco.plan.prediction import Prediction
from adloco.report.table import csv_text
from adloco.run.json_files import finite


def to_json(plan: Plan) -> dict[str, Any]:
    """Everything, for programs."""
    return {
        "target": plan.target,
        "workload": asdict(plan.workload),
        "cluster": asdict(plan.cluster),
        "advice": {
            "chosen": _described(plan.chosen),
            "reasons": list(plan.reasons),
            "crossing_bits_per_second": finite(plan.crossing),
            "pareto": [one.candidate.label for one in pareto(plan.predictions)],
        },
        "assumptions": list(plan.assumptions),
        "predictions": [_described(one) for one in plan.predictions],
        "over_bandwidth": {
            "bits_per_second": list(BANDWIDTHS),
            "methods": {
                name: [_described(one) for one in found]
                for name, found in plan.over_bandwidth.items()
            },
        },
    }


def to_csv(plan: Plan) -> str:
    """A row for each candidate; empty where it lacks a setting or a number."""
    axes = dict.fromkeys(name for one in plan.predictions for name, _ in one.candidate.settings)
    front = pareto(plan.predictions)
    rows = [
        [
            one.candidate.name,
            *(dict(one.candidate.settings).get(name, "") for name in axes),
            *_numbers(one).values(),
            int(one in front),
            int(one is plan.chosen),
        ]
        for one in plan.predictions
    ]
    names = ["method", *axes, *_numbers(plan.chosen), "pareto", "recommended"]
    return csv_text(names, rows)


def recipe_text(plan: Plan) -> str:
    """The recommended recipe as TOML below its reasons; its budget is the tokens to the target."""
    chosen = plan.chosen.candidate
    reasons = [f"Recommended by `adloco plan`: {chosen.label}.", *plan.reasons]
    comment = "".join(f"# {line}\n" for reason in reasons for line in reason.splitlines())
    budget = replace(
        chosen.recipe.run, tokens=math.ceil(plan.chosen.tokens), rounds=0, inner_steps=0, syncs=0
    )
    schedule = replace(chosen.recipe.learning_rate, total_tokens=0)
    recipe = replace(chosen.recipe, run=budget, learning_rate=schedule)
    text = to_toml(recipe)
    if not plan.has_model:  # Without a shape nothing trains it by mistake.
        text = re.sub(r'(?<=\[model\]\nsource = "llama"\n)shape = .*', 'shape = ""', text)
    return f"{comment}\n{text}"


def _described(one: Prediction) -> dict[str, Any]:
    candidate = one.candidate
    about = {"method": candidate.name, "label": candidate.label}
    return about | {"settings": dict(candidate.settings)} | _numbers(one)


def _numbers(one: Prediction) -> dict[str, float | None]:
    """The numbers of a prediction by name, None for those that are not known or not finite."""
    names = ("batch", "tokens", "inner_steps", "syncs", "bytes_sent", "seconds")
    numbers = {name: getattr(one, name) for name in names}
    numbers |= {f"round_{name}_seconds": value for name, value in asdict(one.round).items()}
    numbers |= {name: getattr(one, name) for name in ("memory_bytes", "price", "loss")}
    least, most = one.spread or (None, None)
    numbers |= {"times_least": least, "times_most": most}
    known: dict[str, float | None] = finite(numbers | {"utilisation": one.round.utilisation})
    return known
