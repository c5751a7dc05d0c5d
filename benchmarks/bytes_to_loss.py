"""Measures how many bytes a method sends until it reaches data-parallel training's final loss.

    .venv/bin/python benchmarks/bytes_to_loss.py --table    # the page; trains nothing
    .venv/bin/python benchmarks/bytes_to_loss.py --arms diloco-int4 --sync-every 50 --seeds 0 1

The page (bytes_to_loss.md) says what the problem, the protocol and the numbers are. Its tables have
all stored runs.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from common import run_script, table
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

TOKENS, TUNING_TOKENS, FACTORS = 3_000_000, 1_000_000, (1.0, 1.02, 1.05)
RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
OUTER = [(rate, momentum) for rate in (0.7, 1.0) for momentum in (0.0, 0.6, 0.9)]
"""Outer rates, each with its Nesterov momentum."""
CHOSEN = {"adamw": (2e-3, 2e-3, (1.0, 0.0)), "muon": (1.6e-2, 8e-3, (1.0, 0.6))}
"""Inner optimizer -> the rate of ddp, that of all others, and the outer setting that tuning chose:
those with the lowest losses in the page's last tables."""
EVERY = (50, 75, 100, 150, 200)
Point = dict[str, float]
"""One evaluation: tokens, bytes, sent (if known), syncs, seconds and loss."""


def ddp_of(inner: str) -> Spec:
    """The tuning run that chose the settings of ddp."""
    lr, *_ = CHOSEN[inner]
    return Spec(arm="ddp", inner=inner, inner_lr=lr, seed=TUNING_SEED, tokens=TUNING_TOKENS)


def diloco_of(inner: str) -> Spec:
    """The tuning run that chose the settings of all other arms."""
    _, lr, (outer_lr, momentum) = CHOSEN[inner]
    spec = replace(ddp_of(inner), arm="diloco", inner_lr=lr, sync_every=EVERY[0])
    return replace(spec, outer_lr=outer_lr, momentum=momentum)


def tuning(inner: str) -> list[Spec]:
    """All tuning runs of an inner optimizer, by the steps of the protocol."""
    ddp, diloco = ddp_of(inner), diloco_of(inner)
    first = replace(diloco, inner_lr=ddp.inner_lr)
    specs = [replace(ddp, inner_lr=rate) for rate in RATES]
    specs += [replace(first, outer_lr=rate, momentum=momentum) for rate, momentum in OUTER]
    specs += [replace(diloco, inner_lr=rate) for rate in RATES]
    return list(dict.fromkeys(specs))


def finals(arms: Sequence[str], every: Sequence[int], seeds: Sequence[int]) -> list[Spec]:
    """The runs of every arm, inner optimizer, H and seed, the seed outermost."""
    return [
        replace(spec, seed=seed, tokens=TOKENS)
        for seed in seeds
        for inner in CHOSEN
        for arm in arms
        for spec in (
            [ddp_of(inner)]
            if arm == "ddp"
            else [replace(diloco_of(inner), arm=arm, sync_every=each) for each in every]
        )
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


Rows = Mapping[tuple[str, str, int], Sequence[Result]]
"""The results over seeds of each arm, inner optimizer and H, which is 1 for ddp."""


def rows_of(found: Mapping[Spec, Result]) -> Rows:
    """The table's rows, in the order of the runs."""
    rows: dict[tuple[str, str, int], list[Result]] = {}
    for spec, run in found.items():
        every = 1 if spec.arm == "ddp" else spec.sync_every
        rows.setdefault((spec.arm, spec.inner, every), []).append(run)
    return rows


def curves_of(results: Sequence[Result]) -> list[list[Point]]:
    """The curves of the runs that did not diverge."""
    return [points_of(run["curve"]) for run in results if not run["diverged"]]


def tables(rows: Rows, tuned: Mapping[Spec, Result]) -> Iterator[str]:
    """A table that compares all arms with ddp with AdamW, one for each other inner optimizer with
    its own ddp, and the tuning runs.
    """
    for inner in CHOSEN:
        if ddp := curves_of(rows.get(("ddp", inner, 1), ())):
            end = statistics.fmean(curve[-1]["loss"] for curve in ddp)
            yield f"## Against ddp with {inner}, which ends at {end:.4f}"
            yield comparison({key: rows[key] for key in rows if inner in ("adamw", key[1])}, ddp)
    yield "## Tuning"
    for inner, (ddp_lr, lr, (outer_lr, momentum)) in CHOSEN.items():
        yield (
            f"{inner}, on {TUNING_TOKENS / 1e6:g}M tokens: ddp with {ddp_lr:g}; all others with "
            f"{lr:g}, outer learning rate {outer_lr:g}, momentum {momentum:g}."
        )
        losses = (
            (str(spec), run["final_loss"]) for spec, run in tuned.items() if spec.inner == inner
        )
        yield table(["run", "final loss"], ([name, f"{loss:.4f}"] for name, loss in losses))


def comparison(rows: Rows, ddp: Sequence[Sequence[Point]]) -> str:
    """A row for each arm, against the curves of ddp."""
    targets = [factor * statistics.fmean(curve[-1]["loss"] for curve in ddp) for factor in FACTORS]
    heads = ["arm", "inner", "H", "seeds", "final loss (lowest to highest)", "MB in all", "MB sent"]
    heads += [
        f"tokens / MB / syncs / s until {target:.4f} ({factor:.2f}x)"
        for factor, target in zip(FACTORS, targets, strict=True)
    ]
    heads += ["ddp's MB over the arm's, in all"]
    heads += [*(f"both until {factor:.2f}x" for factor in FACTORS), "MB sent, both until 1.00x"]
    base = mean_curve(ddp)
    base_reached = [crossing(base, target) for target in targets]
    lines = []
    for (arm, inner, every), results in rows.items():
        curves = curves_of(results)
        diverged = len(results) - len(curves)
        seeds = f"{len(curves)}" + (f" ({diverged} diverged)" if diverged else "")
        about = [arm, inner, str(every), seeds]
        if not curves:
            lines.append([*about, "diverged", *["-"] * (len(heads) - 5)])
            continue
        mean = mean_curve(curves)
        end = mean[-1]
        reached = [crossing(mean, target) for target in targets]
        lowest = f"not reached (best {min(each['loss'] for each in mean):.4f})"
        lines.append(
            [
                *about,
                spread([curve[-1]["loss"] for curve in curves]),
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


def main(words: Sequence[str] | None = None) -> None:
    parser = study_parser(__doc__, Path("benchmarks/bytes_to_loss.json"))
    add = parser.add_argument
    add("--tuning", action="store_true", help="train the tuning runs, too")
    add("--arms", nargs="+", choices=ARMS, default=[*ARMS], metavar="ARM", help=", ".join(ARMS))
    add("--sync-every", nargs="+", type=int, default=EVERY, help="values of H, but for ddp")
    add("--seeds", nargs="+", type=int, default=(0, 1, 2))
    options = parser.parse_args(words)
    tried = [spec for inner in CHOSEN for spec in tuning(inner)]
    if not options.table:
        chosen = finals(options.arms, options.sync_every, options.seeds)
        trained([*(tried if options.tuning else ()), *chosen], options)
    runs = Store(options.json).read_some()
    every, seeds = (*EVERY, *options.sync_every), (0, 1, 2, *options.seeds)
    found = stored(finals([*ARMS], every, seeds), runs)
    parts = tables(rows_of(found), stored(tried, runs))
    write_page(options.json, "bytes_to_loss", parts, [*found.values()])


if __name__ == "__main__":
    run_script("bytes_to_loss", main)
