"""Measures how many bytes a method sends until it reaches data-parallel training's final loss.

    .venv/bin/python benchmarks/bytes_to_loss.py --stage tune     # then --stage final
    .venv/bin/python benchmarks/bytes_to_loss.py --stage all      # both; the default
    .venv/bin/python benchmarks/bytes_to_loss.py --stage table    # trains nothing

The page (bytes_to_loss.md) says what the problem, the protocol and the numbers are; the loss over
bytes is drawn beside it. `--section.key VALUE` changes the problem, for every arm.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from common import run_script, table
from matplotlib import colormaps
from matplotlib.figure import Figure
from stored_runs import (
    ARMS,
    TUNING_SEED,
    Result,
    Spec,
    Store,
    megabytes,
    spread,
    stored,
    study_parser,
    trained,
    write_page,
)

from adloco.cli.arguments import take_settings
from adloco.errors import require

TOKENS, FACTORS = 3_000_000, (1.0, 1.02, 1.05)
DEFAULT_ARMS = (
    *("ddp", "local-sgd", "diloco", "adloco", "diloco-bf16", "diloco-int8", "diloco-int4"),
    *("diloco-int2", "diloco-topk", "diloco-topk-64", "diloco-topk-64-behind", "streaming-int4"),
)
MARKERS = "os^Dv"
Point = dict[str, float]
"""One evaluation: tokens, bytes, sent (if known), syncs, seconds and loss."""
Finish = Callable[[Sequence[Spec]], list[Result]]
"""A function that returns the results of runs, in their order."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The settings that tuning chose for one inner optimizer, and the losses of all tuning runs."""

    ddp: Spec
    others: Spec
    losses: Mapping[str, float]


def tune(options: argparse.Namespace, inner: str, finish: Finish) -> Tuned:
    """Steps 1 to 3 of the protocol."""
    losses: dict[str, float] = {}

    def best(specs: Sequence[Spec]) -> Spec:
        results = [result["final_loss"] for result in finish(specs)]
        found = [math.inf if loss is None else loss for loss in results]
        losses.update(zip(map(str, specs), found, strict=True))
        require(
            min(found) < math.inf,
            f"all of the tuning runs diverged, for instance {specs[0]}; lower --inner-lr",
        )
        return specs[found.index(min(found))]

    first = Spec(
        arm="ddp",
        inner=inner,
        inner_lr=0.0,
        seed=TUNING_SEED,
        tokens=options.tune_tokens,
        problem=options.problem,
    )
    ddp = best([replace(first, inner_lr=rate) for rate in options.inner_lr])
    start = replace(ddp, arm="diloco", sync_every=options.tune_sync_every)
    grid = [(rate, momentum) for rate in options.outer_lr for momentum in options.outer_momentum]
    outer = best([replace(start, outer_lr=rate, momentum=momentum) for rate, momentum in grid])
    others = best([replace(outer, inner_lr=rate) for rate in options.inner_lr])
    return Tuned(ddp=ddp, others=others, losses=losses)


def final_specs(options: argparse.Namespace, tuned: Mapping[str, Tuned]) -> list[Spec]:
    """The runs of every arm, inner optimizer, H and seed."""
    return [
        replace(spec, seed=seed, tokens=options.tokens)
        for seed in options.seeds
        for choice in tuned.values()
        for arm in options.arms
        for spec in (
            [choice.ddp]
            if arm == "ddp"
            else [replace(choice.others, arm=arm, sync_every=each) for each in options.sync_every]
        )
    ]


@dataclass(frozen=True, kw_only=True)
class Row:
    """An arm with one inner optimizer and one H, over its seeds."""

    arm: str
    inner: str
    sync_every: int
    """1 for ddp."""
    curves: list[list[Point]]
    """The curve of each seed that did not diverge."""
    diverged: int
    """Number of seeds that diverged."""

    @property
    def finals(self) -> list[float]:
        return [curve[-1]["loss"] for curve in self.curves]

    @property
    def mean(self) -> list[Point]:
        return mean_curve(self.curves)


def rows_of(found: Mapping[Spec, Result]) -> list[Row]:
    """The table's rows, in the order of the runs."""
    groups: dict[tuple[str, str, int], list[Result]] = {}
    for spec, run in found.items():
        every = 1 if spec.arm == "ddp" else spec.sync_every
        groups.setdefault((spec.arm, spec.inner, every), []).append(run)
    return [
        Row(
            arm=arm,
            inner=inner,
            sync_every=every,
            curves=[points_of(run["curve"]) for run in results if not run["diverged"]],
            diverged=sum(bool(run["diverged"]) for run in results),
        )
        for (arm, inner, every), results in groups.items()
    ]


def points_of(curve: Mapping[str, Sequence[float]]) -> list[Point]:
    """Turn the columns of a stored curve into points."""
    return [dict(zip(curve, values, strict=True)) for values in zip(*curve.values(), strict=True)]


def mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean of the curves at every token count of any of them, from where all have a point.

    Each curve contributes its latest evaluation up to that token count.
    """
    result = []
    for tokens in sorted({each["tokens"] for curve in curves for each in curve}):
        before = [[each for each in curve if each["tokens"] <= tokens] for curve in curves]
        if all(before):
            last = [max(points, key=lambda each: each["tokens"]) for points in before]
            names = [name for name in last[0] if all(name in each for each in last)]
            means = {name: statistics.fmean(each[name] for each in last) for name in names}
            result.append(means | {"tokens": tokens})
    return result


def crossing(curve: Sequence[Point], target: float) -> Point | None:
    """The first point whose loss is at or below the target."""
    return next((each for each in curve if each["loss"] <= target), None)


def tables(
    rows: Sequence[Row], tuned: Mapping[str, Tuned], options: argparse.Namespace
) -> Iterator[str]:
    """A table that compares all arms with ddp with AdamW, one for each other inner
    optimizer with its own ddp, and the tuning runs.
    """
    problem = (("tokens", options.tokens), *options.problem)
    if changes := [f"`--{name} {value}`" for name, value in problem if value != TOKENS]:
        yield f"The problem was changed by {', '.join(changes)}."
    baselines = {row.inner: row for row in rows if row.arm == "ddp" and row.curves}
    for inner, ddp in sorted(baselines.items(), key=lambda item: item[0] != "adamw"):
        yield f"## Against ddp with {inner}, which ends at {statistics.fmean(ddp.finals):.4f}"
        yield comparison([row for row in rows if inner in ("adamw", row.inner)], ddp)
    yield "## Tuning"
    yield from tuning_text(tuned, options)


def tuning_text(tuned: Mapping[str, Tuned], options: argparse.Namespace) -> Iterator[str]:
    """Paragraphs that say what tuning chose, and from which losses."""
    for inner, choice in tuned.items():
        ddp, others = choice.ddp, choice.others
        at_edge = {ddp.inner_lr, others.inner_lr} & {min(options.inner_lr), max(options.inner_lr)}
        warning = f" {max(at_edge):g} is at the edge of the grid." if at_edge else ""
        yield (
            f"{inner}, on {options.tune_tokens / 1e6:g}M tokens: ddp with {ddp.inner_lr:g}; "
            f"all others with {others.inner_lr:g}, outer learning rate {others.outer_lr:g}, "
            f"momentum {others.momentum:g}.{warning}"
        )
        losses = "\n".join(f"| {name} | {loss:.4f} |" for name, loss in choice.losses.items())
        yield f"| run | final loss |\n|---|---|\n{losses}"


def comparison(rows: Sequence[Row], ddp: Row) -> str:
    targets = [factor * statistics.fmean(ddp.finals) for factor in FACTORS]
    heads = ["arm", "inner", "H", "seeds", "final loss (lowest to highest)", "MB in all", "MB sent"]
    heads += [
        f"tokens / MB / syncs / s until {target:.4f} ({factor:.2f}x)"
        for factor, target in zip(FACTORS, targets, strict=True)
    ]
    heads += ["ddp's MB over the arm's, in all"]
    heads += [*(f"both until {factor:.2f}x" for factor in FACTORS), "MB sent, both until 1.00x"]
    base = ddp.mean
    base_reached = [crossing(base, target) for target in targets]
    lines = []
    for row in rows:
        seeds = f"{len(row.curves)}" + (f" ({row.diverged} diverged)" if row.diverged else "")
        about = [row.arm, row.inner, str(row.sync_every), seeds]
        if not row.curves:
            lines.append([*about, "diverged", *["-"] * (len(heads) - 5)])
            continue
        mean, end = row.mean, row.mean[-1]
        reached = [crossing(mean, target) for target in targets]
        lowest = f"not reached (best {min(each['loss'] for each in mean):.4f})"
        lines.append(
            [
                *about,
                spread(row.finals),
                megabytes(end["bytes"]),
                megabytes(end["sent"]) if "sent" in end else "-",
                *(told(at) if at else lowest for at in reached),
                fewer(base[-1], end),
                *(fewer(theirs, at) for theirs, at in zip(base_reached, reached, strict=True)),
                fewer(base_reached[0], reached[0], "sent"),
            ]
        )
    return table(heads, lines)


def told(at: Point) -> str:
    counts = f"{at['tokens'] / 1e6:.2f}M / {megabytes(at['bytes'])} / {at['syncs']:,.0f}"
    return f"{counts} / {at['seconds']:.0f}"


def fewer(ddp: Point | None, arm: Point | None, counted: str = "bytes") -> str:
    """ddp's bytes divided by the arm's, as text; `-` if one is missing."""
    return f"{ddp[counted] / arm[counted]:.1f}x" if ddp and arm and arm.get(counted) else "-"


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw loss against bytes, and below it the final loss against all bytes, with a column for
    each inner optimizer, a colour for each arm and a marker for each H.
    """
    rows = [row for row in rows if row.curves]
    inners = list(dict.fromkeys(row.inner for row in rows)) or ["adamw"]
    arms = list(dict.fromkeys(row.arm for row in rows))
    every = sorted({row.sync_every for row in rows})
    figure = Figure(figsize=(7.5 * len(inners), 11), layout="constrained")
    axes = figure.subplots(2, len(inners), squeeze=False)
    for row in rows:
        above, below = axes[:, inners.index(row.inner)]
        look: dict[str, Any] = {"color": colormaps["tab20"](arms.index(row.arm))}
        look |= {"marker": MARKERS[every.index(row.sync_every) % len(MARKERS)]}
        look |= {"label": f"{row.arm}, H = {row.sync_every}"}
        mean, end = row.mean, row.mean[-1]
        size = [each["bytes"] / 1e6 for each in mean]
        above.plot(size, [each["loss"] for each in mean], markevery=[-1], linewidth=1.4, **look)
        bars = [[end["loss"] - min(row.finals)], [max(row.finals) - end["loss"]]]
        below.errorbar(size[-1], end["loss"], yerr=bars, linestyle="", capsize=2, **look)
    for inner, (above, below) in zip(inners, axes.T, strict=True):
        finals = [final for row in rows if row.inner == inner for final in row.finals]
        low, high = min(finals), max(finals)
        # Cuts off the first steps, where all curves fall from the same height.
        above.set_ylim(low - 0.1 * (high - low), low + 3 * (high - low))
        above.set_title(f"inner optimizer {inner}")
        above.set_xlabel("MB that a worker has reduced with others so far")
        below.set_xlabel("MB that a worker reduces with others in the whole run")
        own = [row for row in rows if row.arm == "ddp" and row.inner in ("adamw", inner)]
        for axis in (above, below):
            for row in own:
                axis.axhline(statistics.fmean(row.finals), color="#888888", linewidth=0.7)
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter("{x:g}")
            axis.grid(alpha=0.25)
    axes[0, 0].set_ylabel("validation loss, nats per byte (mean over seeds)")
    axes[1, 0].set_ylabel("final validation loss (bars: lowest and highest seed; lines: ddp)")
    shown: dict[str, Any] = {}
    for panel in axes[0]:
        shown |= {
            label: line for line, label in zip(*panel.get_legend_handles_labels(), strict=True)
        }
    figure.legend(shown.values(), shown, loc="outside lower center", ncols=6, frameon=False)
    figure.savefig(file, dpi=110)


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = study_parser(__doc__, Path("benchmarks/bytes_to_loss.json"))
    add = parser.add_argument
    add("--stage", choices=("tune", "final", "all", "table"), default="all")
    add(
        "--arms", nargs="+", choices=ARMS, default=DEFAULT_ARMS, metavar="ARM", help=", ".join(ARMS)
    )
    inners = ("adamw", "muon")
    add("--inner", nargs="+", choices=inners, default=inners)
    every = (50, 75, 100, 150, 200)
    add("--sync-every", nargs="+", type=int, default=every, help="values of H, but for ddp")
    add("--seeds", nargs="+", type=int, default=(0, 1, 2))
    add("--tokens", type=int, default=TOKENS)
    rates = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
    add("--inner-lr", nargs="+", type=float, default=rates)
    add("--outer-lr", nargs="+", type=float, default=(0.7, 1.0))
    add("--outer-momentum", nargs="+", type=float, default=(0.0, 0.6, 0.9))
    add("--tune-sync-every", type=int, default=50)
    add("--tune-tokens", type=int, default=1_000_000, help="at most --tokens")
    settings, rest = take_settings(sys.argv[1:] if words is None else words)
    options = parser.parse_args(rest)
    options.tune_tokens = min(options.tune_tokens, options.tokens)
    options.problem = tuple(settings)
    return options


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    store = Store(options.json)
    finish = partial(trained, options=options) if options.stage in ("tune", "all") else store.of
    if options.stage != "table":
        # An arm that this version refuses must fail now, not after hours of other runs.
        first = Spec(
            arm="", inner="adamw", inner_lr=1e-3, seed=0, tokens=1, problem=options.problem
        )
        for arm in options.arms:
            replace(first, arm=arm).recipe()
    tuned = {inner: tune(options, inner, finish) for inner in options.inner}
    specs = final_specs(options, tuned)
    if options.stage in ("final", "all"):
        trained(specs, options)
    found = stored(specs, store.read())
    rows = rows_of(found)
    write_page(options.json, "bytes_to_loss", tables(rows, tuned, options), [*found.values()])
    draw(rows, options.json.with_suffix(".png"))


if __name__ == "__main__":
    run_script("bytes_to_loss", main)
