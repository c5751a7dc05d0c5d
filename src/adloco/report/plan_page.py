"""plan.html, and with it plan.png, plan.json, plan.csv and recipe.toml: a plan for its users."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from adloco.config.recipe_text import defaults
from adloco.plan.advice import by_method, pareto
from adloco.plan.candidates import ranks_of_island
from adloco.plan.cluster import Cluster
from adloco.plan.cluster_plan import Plan
from adloco.plan.prediction import Prediction, Workload
from adloco.report.html import write_page
from adloco.report.plan_curves import plan_curves
from adloco.report.plan_files import recipe_text, to_csv, to_json
from adloco.report.readable import BYTES, COUNTS, RATES, TIMES, readable
from adloco.report.table import Cell, Table
from adloco.run.folder import shell_word
from adloco.run.json_files import write_json
from adloco.whole_file import write_text

ROWS = 200
"""The most candidates that the page's table shows."""
RECIPE = "recipe.toml"


def write_plan(plan: Plan, folder: Path) -> Path:
    """Write plan.html, plan.png, plan.json, plan.csv and recipe.toml; return the page's path.

    Raises:
        ValueError: A setting of the recommended recipe cannot be written as TOML.
    """
    from adloco.report.pictures import draw  # Late, for matplotlib.

    recipe = recipe_text(plan)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / RECIPE, recipe)
    write_json(folder / "plan.json", to_json(plan))
    write_text(folder / "plan.csv", to_csv(plan))
    panel = plan_curves(plan)
    (chart,) = panel.charts
    title = f"{plan.target}: each method with its best settings at each bandwidth{plan.condition}"
    draw([(chart, "bandwidth", chart.measures[0])], title, folder / "plan.png")
    return write_page(folder / "plan.html", [panel], _content(plan, folder))


def best_table(plan: Plan) -> Table:
    """The best candidate of each method, for the page and for the terminal."""
    return _table(
        plan,
        f"The best of each method{plan.condition}",
        "Bytes are those that leave each island. It is busy while it computes. Memory is without "
        "activations. Within the range 90% of the laws that fit what was measured have tokens, and "
        "with them time, bytes, steps, syncs and price; errors of the noise scale, of speeds and "
        "of the link are not in it.",
        list(by_method(plan.predictions).values()),
    )


def crossing_text(plan: Plan) -> str:
    """From which bandwidth on data-parallel training is as fast, as a sentence; empty if no
    candidate is data-parallel or all are.
    """
    if plan.crossing is None:
        return ""
    if math.isinf(plan.crossing):
        return f"Data-parallel training is slower at every bandwidth{plan.condition}."
    if plan.crossing == 0:
        return (
            "Data-parallel training is about as fast as all others at every bandwidth"
            f"{plan.condition}."
        )
    return (
        f"From {readable(plan.crossing, RATES)} on, data-parallel training is about as fast as all "
        f"others{plan.condition}."
    )


def cluster_words(cluster: Cluster) -> str:
    """The entries of the cluster's description that are not the defaults."""
    usual, given = defaults(Cluster), vars(cluster)
    return ", ".join(f"{key} {value}" for key, value in given.items() if value != usual[key])


def _workload_words(workload: Workload) -> str:
    noise = workload.noise_scale
    return (
        f"{readable(workload.parameters, COUNTS)} parameters, "
        f"{workload.tokens_per_sample:,} tokens in a sample, noise scale "
        f"{'not known' if noise is None else f'{noise:,.4g} samples'}."
    )


def _content(plan: Plan, folder: Path) -> dict[str, Any]:
    chosen = plan.chosen
    command = f"adloco train {shell_word(folder / RECIPE)}"
    ranks = ranks_of_island(chosen.candidate.recipe, plan.cluster)
    return {
        "about": [
            ("Target", f"{plan.target}."),
            ("Model", _workload_words(plan.workload)),
            ("Cluster", f"{cluster_words(plan.cluster)}."),
        ],
        "chosen": chosen.candidate.label,
        "cards": [(column, show(chosen)) for column, show in _columns(plan).items()],
        "reasons": [*plan.reasons, *filter(None, [crossing_text(plan)])],
        "command": command if plan.has_model else "",
        "on_islands": f"torchrun --nnodes {plan.cluster.islands} --nproc-per-node {ranks} "
        f"--rdzv-backend c10d --rdzv-endpoint HOST:29400 -m {command}",
        "best": best_table(plan),
        "all": _all_table(plan),
        "assumptions": plan.assumptions,
    }


def _all_table(plan: Plan) -> Table:
    shown = sorted(plan.predictions, key=lambda one: one.seconds)[:ROWS]
    of = f"the fastest {ROWS} of {len(plan.predictions):,}" if len(shown) == ROWS else "all"
    note = (
        f"These are {of} candidates by time; plan.csv has every one with more digits. No other "
        "candidate is better than one of the Pareto front in time, bytes, tokens and predicted "
        "loss at once."
    )
    return _table(plan, "All candidates", note, shown, pareto(plan.predictions))


def _table(
    plan: Plan, title: str, note: str, shown: Sequence[Prediction], front: Sequence[Prediction] = ()
) -> Table:
    def mark(one: Prediction) -> str:
        marks = {"recommended": one is plan.chosen, "Pareto front": one in front}
        return ", ".join(name for name, true in marks.items() if true)

    columns = _columns(plan)
    rows = [
        [Cell(one.candidate.label, mark(one)), *(Cell(show(one)) for show in columns.values())]
        for one in shown
    ]
    return Table(title=title, note=note, columns=["candidate", *columns], rows=rows)


def range_text(one: Prediction) -> str:
    """How far the tokens of a prediction may be from what it says, in percent."""
    if not one.spread:
        return "-"
    least, most = one.spread
    if not math.isfinite(most):
        return f"{least - 1:+.0%} to no limit"
    if not one.varies:
        return "< 1%"
    return f"{least - 1:+.0%} to " + (f"{most - 1:+.0%}" if most < 10 else f"x{most:.3g}")


def _columns(plan: Plan) -> dict[str, Callable[[Prediction], str]]:
    """Columns of the table of candidates, each with its text for a prediction."""
    columns: dict[str, Callable[[Prediction], str]] = {
        "time": lambda one: readable(one.seconds, TIMES),
        "sent": lambda one: readable(one.bytes_sent, BYTES),
        "tokens": lambda one: readable(one.tokens, COUNTS),
        "range": range_text,
        "batch": lambda one: f"{one.batch:,.0f}",
        "steps": lambda one: readable(one.inner_steps, COUNTS),
        "syncs": lambda one: readable(one.syncs, COUNTS),
        "busy": lambda one: f"{one.round.utilisation:.0%}",
        "memory": lambda one: readable(one.memory_bytes, BYTES),
    }
    if plan.cluster.price_per_hour > 0:
        columns["price"] = lambda one: readable(one.price, COUNTS)
    if plan.chosen.loss is not None:
        columns["loss"] = lambda one: "-" if one.loss is None else f"{one.loss:.4f}"
    return columns
