"""The gap between data-parallel Muon and few bytes: its law over size, tokens, workers and syncs.

    .venv/bin/python benchmarks/gap.py --parallel 2    # trains what gap.csv lacks, cheapest first
    .venv/bin/python benchmarks/gap.py --table         # the gaps; trains nothing
    .venv/bin/python benchmarks/gap.py --fit           # the law, with intervals and predictions
    .venv/bin/python benchmarks/gap.py --picture       # writes gap.png
    .venv/bin/python benchmarks/gap.py --run 869504,20,int1-4096-h2,4,0,0.008,0.7,0.6

Problem and counting of bytes are frontier.py's; `loss` is the last one, of trials on 256 validation
windows and of final runs on all (`windows` is 0), on which losses deviate less between seeds (by
0.3% instead of 0.5%). Older final runs have 256 and are compared with each other until there are
others. All sizes have as many tokens in a step: 1,024 in ddp and ddp-outer, 2,048 elsewhere.
The learning rate, the outer rate and the momentum are tuned together, on seed 1000 (the rows whose
stage is trial), at the smallest size, for each method and number of workers, at 5 and at 20 tokens
a parameter. Longer runs take the settings of 20, and were repeated with lower rates at the smallest
size: 1.1e-2 after 80, and 5.6e-3 to 1.1e-2 (ddp: 5.6e-3) after 300; on seed 0 those of 0.28M
after 80 (7.33e-3) and of 0.87M after 20 (5.6e-3 and 4e-3, ddp 2.8e-3), too. Tried are all pairs
of METHODS' rates and outer settings, and then the neighbours of the best pair in RATES and in
OUTER, until none is better.
At another size the learning rate is divided by how much wider the model is, because Muon's steps
have the root mean square of AdamW's at any width; nothing else changes. Where final runs have been
repeated with other rates, those count that have most seeds, of several the ones with the lowest
mean, of ddp too. Final runs have seed 0, and seeds 1 and 2 where the gap of seed 0 is below three
sigma. The corpus has 10.6M tokens, so longer runs repeat it. gap.csv also has what other scripts
trained: the final runs of frontier.py whose step has twice ddp's tokens (0.13M with 3M tokens,
0.87M with 0.6M), two of its trials (0.87M with 2.4M, as many tokens in a step), gpu.py's stages
loss-30M-single, which is ddp on one device, and loss-30M-diloco (23.9M), and runs of `--run`: with
float32 on the wire (fp32-h3, and fp32-h1 without steps between syncs), with rounds of one length
(int1-h5), and with more tokens in a step. Methods that end with a2 or a4 have so many times the
rate for what AdamW trains.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from common import run_script, script_parser, table
from frontier import Trial
from matplotlib.figure import Figure
from stored_runs import TUNING_SEED, Result, Spec, train_runs

from adloco.errors import require
from adloco.study.statistics import Difference, paired_difference

SEEDS = (0, 1, 2)
SIGMA = 0.011
"""Standard deviation of a gap over seeds: that of diloco-int1 with H = 3 in frontier.json."""
LEFT_OUT = 0.1
"""Part of a gap by which a law is off even without noise, because gaps have more causes."""
SIGMAS = (0.0062, 0.0073)
"""Standard deviations of a gap over seeds, pooled over the gaps with several: on more than 256
validation windows, and on 256."""
LONG = 300
"""Syncs above which runs are left out, to see what shorter ones say of them."""
SMALLEST, WIDTH = 133_440, 64
SIZES = {
    133_440: (64, 2, 64),
    275_424: (96, 2, 64),
    869_504: (128, 4, 128),
    1_906_368: (192, 4, 128),
}
"""Parameters -> width, layers, tokens of a sample."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """How workers train together, and the settings that are tried."""

    arm: str
    """A name in ARMS of stored_runs.py."""
    step_tokens: int
    rates: tuple[float, ...]
    """Learning rates, each of which is tried with all outer settings."""
    outer: tuple[tuple[float, float], ...] = ()
    """Outer rates, each with its Nesterov momentum; none in training without an outer step."""
    sync_every: int = 0
    growth: float = 0.0
    adamw_ratio: float = 1.0


RATES = (2e-3, 2.8e-3, 4e-3, 5.6e-3, 8e-3, 1.1e-2, 1.6e-2, 2.2e-2, 3.2e-2, 4.5e-2, 6.4e-2)
PARALLEL, LOCAL = RATES[3:6], RATES[5:7]
OUTER = ((1.0, 0.0), (1.0, 0.3), (0.7, 0.6), (1.0, 0.6), (1.0, 0.8), (1.0, 0.9))
"""By how far they carry a change in the end, which is rate / (1 - momentum) times as far."""
METHODS = {
    "ddp": Method(arm="ddp", step_tokens=1024, rates=PARALLEL),
    "ddp-2048": Method(arm="ddp", step_tokens=2048, rates=RATES[4:7]),
    "ddp-outer": Method(
        arm="outer-alone", step_tokens=1024, rates=PARALLEL, outer=OUTER[2:3], sync_every=30
    ),
    **{
        name: Method(
            arm=arm,
            step_tokens=step_tokens,
            rates=LOCAL,
            outer=OUTER[1:4],
            sync_every=steps,
            growth=growth,
        )
        for name, arm, step_tokens, steps, growth in (
            ("int1-h3", "diloco-int1", 2048, 3, 1.0),
            ("int1-h11", "diloco-int1", 2048, 11, 1.0),
            ("int1-h5", "diloco-int1", 2048, 5, 0.0),
            ("int1-4096-h2", "diloco-int1", 4096, 2, 1.0),
            ("int1-8192-h1", "diloco-int1", 8192, 1, 1.0),
            ("fp32-h1", "diloco", 2048, 1, 0.0),
            ("fp32-h3", "diloco", 2048, 3, 1.0),
        )
    },
}
METHODS |= {
    f"{name}-a{ratio}": replace(METHODS[name], adamw_ratio=ratio)
    for name in ("ddp", "int1-h3")
    for ratio in (2, 4)
}
"""ddp-2048 has as many tokens in a step as the arms that send less: its gap is the batch's part of
theirs. ddp-outer is DiLoCo with one worker, whose gradients are reduced at every step. int1-h3
sends about 1/300 of the bytes of ddp, int1-h11 about 1/1,000. Those that GRID has not are trained
by `--run`; their rows are trials, but for int1-8192-h1, which has as many bytes as int1-h3 and
larger batches of each worker (at the one size and length at which it was trained)."""

FOUR, TWO_AND_EIGHT = (("int1-h3", 4), ("int1-h11", 4)), (("int1-h3", 2), ("int1-h3", 8))
OTHERS = (("ddp-outer", 1), *TWO_AND_EIGHT, ("int1-h11", 2), ("int1-h11", 8))
GRID: Sequence[tuple[int, int, tuple[tuple[str, int], ...]]] = (
    *((133_440, ratio, FOUR) for ratio in (5, 20, 80)),
    *((133_440, ratio, OTHERS) for ratio in (5, 20, 80)),
    *((133_440, ratio, (("ddp-2048", 1),)) for ratio in (5, 20, 80)),
    *((275_424, ratio, FOUR + TWO_AND_EIGHT) for ratio in (5, 20)),
    (869_504, 5, FOUR + TWO_AND_EIGHT),
    (275_424, 80, FOUR),
    (869_504, 20, FOUR),
    (133_440, 300, FOUR),
    (1_906_368, 5, FOUR),
    (1_906_368, 20, FOUR),
)
"""Parameters, tokens a parameter, and methods with their workers, besides ddp; in this order."""
FINAL = {"ddp", "int1-8192-h1", *(method for _, _, others in GRID for method, _ in others)}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run: what a row of the file must have in common with it."""

    parameters: int
    tokens: int
    workers: int
    """1 for ddp, whose numbers do not depend on how many share its batch."""
    method: str
    lr: float
    outer_lr: float
    momentum: float
    seed: int
    windows: int = 256
    """Validation windows; 0: all."""

    @property
    def identity(self) -> tuple[str, ...]:
        return tuple(f"{v:g}" if isinstance(v, float) else str(v) for v in asdict(self).values())

    @property
    def spec(self) -> Spec:
        width, layers, context = SIZES[self.parameters]
        method = METHODS[self.method]
        trial = Trial(
            arm=method.arm,
            batch=method.step_tokens // context,
            lr=self.lr,
            sync_every=method.sync_every,
            growth=method.growth,
            outer_lr=self.outer_lr,
            momentum=self.momentum,
            more=f"evaluation.windows={self.windows} "
            f"model.hidden_size={width} model.intermediate_size={width * 11 // 4} "
            f"model.num_layers={layers} data.context_tokens={context} "
            f"method.workers_per_trainer={self.workers}"
            + (f" inner.adamw_ratio={ratio:g}" if (ratio := method.adamw_ratio) != 1 else ""),
        )
        return replace(trial.spec(self.seed), tokens=self.tokens)

    def row(self, result: Result) -> dict[str, str]:
        """The row of this run, with what is needed to repeat it; loss is empty if it diverged."""
        require(
            result["parameters"] == self.parameters,
            f"the model has {result['parameters']} parameters, not {self.parameters}",
        )
        method, context = METHODS[self.method], SIZES[self.parameters][2]
        curve, loss = result["curve"], result["final_loss"]
        more = {
            "bytes": curve["bytes"][-1] if curve else "",
            "loss": "" if loss is None else f"{loss:.5f}",
            "syncs": curve["syncs"][-1] if curve else "",
            "stage": "trial" if self.seed == TUNING_SEED or self.method not in FINAL else "final",
            "sync_every": method.sync_every,
            "growth": f"{method.growth:g}",
            "batch": method.step_tokens // context,
            "context": context,
            "commit": result["git"]["commit"][:7] if result["git"] else "",
            "device": result["device"],
        }
        own = dict(zip(asdict(self), self.identity, strict=True))
        return own | {name: str(value) for name, value in more.items()}


Row = Mapping[str, str]
Rows = Mapping[tuple[str, ...], Row]
"""The rows of the file by the identity of their runs."""


def read(file: Path) -> Rows:
    if not file.exists():
        return {}
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    return {tuple(row[name] for name in Run.__annotations__): row for row in rows}


def loss_of(run: Run, rows: Rows) -> float:
    """The loss of a stored run; infinite if it diverged."""
    return float(rows[run.identity]["loss"] or math.inf)


def trials(method: str, workers: int, ratio: int, rows: Rows) -> tuple[list[Run], Run | None]:
    """The runs that choose the settings of a method for so many tokens a parameter.

    Returns:
        Those that are missing, and the best one if none is.
    """
    tried = [
        Run(
            parameters=SMALLEST,
            tokens=min(ratio, 20) * SMALLEST,
            workers=workers,
            method=method,
            lr=lr,
            outer_lr=outer_lr,
            momentum=momentum,
            seed=TUNING_SEED,
        )
        for lr in METHODS[method].rates
        for outer_lr, momentum in METHODS[method].outer or ((0.0, 0.0),)
    ]
    while all(run.identity in rows for run in tried):
        best = min(tried, key=lambda run: loss_of(run, rows))
        near = [replace(best, lr=lr) for lr in beside(RATES, best.lr)]
        outer = beside(OUTER, (best.outer_lr, best.momentum)) if METHODS[method].outer else ()
        near += [replace(best, outer_lr=rate, momentum=momentum) for rate, momentum in outer]
        more = [run for run in dict.fromkeys(near) if run not in tried]
        if not more:
            return [], best
        tried += more
    return [run for run in tried if run.identity not in rows], None


def beside(values: Sequence[Any], value: Any) -> Sequence[Any]:
    """A value with its neighbours."""
    at = values.index(value)
    return values[max(0, at - 1) : at + 2]


def finals(parameters: int, ratio: int, best: Run) -> list[Run]:
    """The final runs with the settings of the best trial, one for each seed."""
    lr = float(f"{best.lr * WIDTH / SIZES[parameters][0]:.3g}")
    tokens = ratio * parameters
    run = replace(best, parameters=parameters, tokens=tokens, lr=lr, windows=0)
    return [replace(run, seed=seed) for seed in SEEDS]


def wanted(rows: Rows) -> list[Run]:
    """The runs of the first entry of the grid that misses some, as far as stored runs choose them;
    empty if none is missing.
    """
    for parameters, ratio, others in GRID:
        missing, chosen = [], []
        for method, workers in (("ddp", 1), *others):
            tried, best = trials(method, workers, ratio, rows)
            missing += tried
            if best:
                chosen.append(finals(parameters, ratio, best))
        missing += [runs[0] for runs in chosen if runs[0].identity not in rows]
        if not missing:
            goal = loss_of(chosen[0][0], rows)
            near = [runs for runs in chosen if abs(loss_of(runs[0], rows) / goal - 1) < 3 * SIGMA]
            more = [run for runs in near for run in runs[1:]] if len(near) > 1 else []
            missing = [run for run in more if run.identity not in rows]
        if missing:
            return missing
    return []


def run_of(words: str) -> Run:
    """A run on all windows, from PARAMETERS,RATIO,METHOD,K,SEED,LR[,OUTER LR,MOMENTUM]."""
    size, ratio, method, *numbers = words.split(",")
    require(
        size in map(str, SIZES) and method in METHODS and len(numbers) in (3, 5),
        "a run must be PARAMETERS,RATIO,METHOD,K,SEED,LR[,OUTER LR,MOMENTUM] with parameters of "
        f"{', '.join(map(str, SIZES))} and a method of {', '.join(METHODS)}, got {words!r}",
    )
    lr, outer_lr, momentum = map(float, [*numbers[2:], "0", "0"][:3])
    return Run(
        parameters=int(size),
        tokens=int(ratio) * int(size),
        workers=int(numbers[0]),
        method=method,
        lr=lr,
        outer_lr=outer_lr,
        momentum=momentum,
        seed=int(numbers[1]),
        windows=0,
    )


def train(runs: Sequence[Run], file: Path, parallel: int) -> None:
    """Train runs, and add a row of each to the file."""
    each = {run.spec: run for run in runs}
    for spec, result in train_runs(list(each), file.stem, parallel):
        store(each[spec].row(result), file)


def store(row: Mapping[str, str], file: Path) -> None:
    """Add the row of a run to the file."""
    new = not file.exists()
    with file.open("a", newline="") as lines:
        writer = csv.DictWriter(lines, list(row), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


@dataclass(frozen=True, kw_only=True)
class Gap:
    """The loss of a method against ddp's with the same size, tokens and seeds."""

    row: Row
    """The row of one of its seeds."""
    loss: float
    """The mean over the seeds."""
    fewer: float
    """Bytes of ddp, divided by those of the method."""
    difference: Difference
    """Of log(loss), paired by seed."""

    @property
    def relative(self) -> float:
        """The difference of the losses as a part of ddp's."""
        return math.expm1(self.difference.mean)

    @property
    def place(self) -> tuple[float, ...]:
        """What the law takes: parameters, tokens a parameter, workers and syncs."""
        size, tokens, workers, syncs = (
            float(self.row[name]) for name in ("parameters", "tokens", "workers", "syncs")
        )
        return size, tokens / size, workers, syncs


def gaps(rows: Rows) -> list[Gap]:
    """All that can be compared, by size, tokens, method and workers: on all windows if there are
    such runs, and with the rates that have most seeds, of several those with the lowest mean.
    """
    tried: dict[tuple[int, int, str, int, int], dict[tuple[str, ...], dict[int, Row]]] = {}
    for row in rows.values():
        if row["stage"] == "final" and row["loss"]:
            size, tokens, workers, windows = (
                int(row[name]) for name in ("parameters", "tokens", "workers", "windows")
            )
            # All windows, which are 0, are the last of a place and replace the others below.
            place = size, tokens, row["method"], workers, -windows
            rates = tuple(row[name] for name in ("lr", "outer_lr", "momentum"))
            tried.setdefault(place, {}).setdefault(rates, {})[int(row["seed"])] = row
    groups = {
        place: min(settings.values(), key=lambda seeds: (-len(seeds), mean_loss(seeds)))
        for place, settings in tried.items()
    }
    found: dict[tuple[int, int, str, int], Gap] = {}
    for (size, tokens, method, workers, windows), runs in sorted(groups.items()):
        ddp = groups.get((size, tokens, "ddp", 1, windows), {})
        logs = {
            name: {seed: math.log(float(row["loss"])) for seed, row in each.items()}
            for name, each in ((method, runs), ("ddp", ddp))
        }
        difference = paired_difference(method, "ddp", logs)
        if difference:
            row = next(iter(runs.values()))
            fewer = float(next(iter(ddp.values()))["bytes"]) / float(row["bytes"])
            found[size, tokens, method, workers] = Gap(
                row=row, loss=mean_loss(runs), fewer=fewer, difference=difference
            )
    return [*found.values()]


def mean_loss(seeds: Mapping[int, Row]) -> float:
    """The mean of the losses of runs."""
    return float(np.mean([float(row["loss"]) for row in seeds.values()]))


def page(found: Sequence[Gap]) -> str:
    """A table of the gaps, with their 95% intervals where there is more than one seed."""
    cells = []
    for gap in found:
        size, ratio, workers, syncs = gap.place
        half = gap.difference.half_width
        interval = "" if half is None else f" ± {100 * half:.1f}"
        row = gap.row
        outer = f"{row['outer_lr']} / {row['momentum']}" if row["sync_every"] != "0" else "-"
        place = [f"{size / 1e6:.2f}M", f"{ratio:.3g}", row["method"], f"{workers:g}"]
        cost = [row["lr"], outer, f"{syncs:,.0f}", f"{gap.fewer:.0f}x"]
        windows = "all" if row["windows"] == "0" else row["windows"]
        loss = [str(gap.difference.seeds), windows, f"{gap.loss:.4f}"]
        cells.append([*place, *cost, *loss, f"{100 * gap.relative:+.1f}%{interval}"])
    heads = ["parameters", "tokens a parameter", "method", "K", "lr", "outer", "syncs", "fewer"]
    return table([*heads, "seeds", "windows", "loss", "gap"], cells)


NAMES = ("log a", "b", "-c", "d", "f")
START = np.array([0.0, 0.7, -1.0, 0.0, 0.0])
LAW = "gap = (K - 1)^b (a N^d S^-c + f), N in millions"


def said(constants: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The gaps of `LAW` at these parameters, workers and syncs [gaps, 3], and their slopes by
    constant.
    """
    scale, by_workers, by_syncs, by_size, floor = constants
    sizes, others, syncs = np.log(places[:, 0] / 1e6), places[:, 1] - 1, np.log(places[:, 2])
    grown = others**by_workers
    falling = grown * np.exp(scale + by_size * sizes + by_syncs * syncs)
    gaps = falling + grown * floor
    slopes = (falling, np.log(others) * gaps, syncs * falling, sizes * falling, grown)
    return gaps, np.column_stack(slopes)


def fitted(places: np.ndarray, values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The constants with the least squares of the gap itself, which may be below 0 for single
    runs; by Gauss and Newton with halved steps.
    """
    roots, found = np.sqrt(weights), START

    def error(at: np.ndarray) -> float:
        with np.errstate(all="ignore"):  # Of steps that are far too long, and halved then.
            return float((weights * (values - said(at, places)[0]) ** 2).sum())

    for _ in range(100):
        gaps, slopes = said(found, places)
        step = np.linalg.lstsq(roots[:, None] * slopes, roots * (values - gaps), rcond=None)[0]
        shorter = (found + step / 2**halvings for halvings in range(20))
        better = next((each for each in shorter if error(each) < error(found)), None)
        if better is None:
            break
        found = better
    return found


def of_several(found: Sequence[Gap]) -> list[Gap]:
    """The gaps of at least two workers, which alone the law is of, without those that another one
    with as many workers at the same size and tokens beats by no more bytes.
    """
    several = [gap for gap in found if gap.place[2] > 1]
    return [
        gap
        for gap in several
        if not any(
            other.place[:3] == gap.place[:3]
            and other.fewer >= gap.fewer
            and other.relative < gap.relative
            for other in several
        )
    ]


def data_of(used: Sequence[Gap]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Places (parameters, workers and syncs), gaps, and weights, which are 1 / variance: of seeds,
    and of what a law leaves out.
    """
    values = np.array([gap.relative for gap in used])
    variances = np.array(
        [SIGMAS[gap.row["windows"] == "256"] ** 2 / gap.difference.seeds for gap in used]
    )
    variances += (LEFT_OUT * values) ** 2
    places = np.array([gap.place for gap in used])[:, [0, 2, 3]]
    return places, values, 1 / variances


def law(found: Sequence[Gap], repeats: int = 500) -> tuple[np.ndarray, np.ndarray]:
    """The law of methods with at least two workers, and those of bootstrapped gaps.

    Raises:
        ValueError: There are too few gaps.
    """
    used = of_several(found)
    places, values, weights = data_of(used)
    varied = [len(set(column)) > 1 for column in places.T] if used else []
    require(
        len(used) > 7 and all(varied),
        f"the law has 5 constants, and {len(used)} gaps are stored, which must be 8 at least and "
        "differ in size, workers and syncs; train more first",
    )
    draws = np.random.default_rng(0)
    chosen = [draws.integers(len(used), size=len(used)) for _ in range(repeats)]
    again = [fitted(places[each], values[each], weights[each]) for each in chosen]
    return fitted(places, values, weights), np.array(again)


def held_out(found: Sequence[Gap]) -> list[list[str]]:
    """For each size, and for the longest runs, the mean gap and what a law of the others says."""
    used = of_several(found)
    sizes = sorted({gap.place[0] for gap in used})
    parts = {f"{size / 1e6:.2f}M": [gap.place[0] == size for gap in used] for size in sizes}
    parts[f"more than {LONG} syncs"] = [gap.place[3] > LONG for gap in used]
    cells = []
    for name, out in parts.items():
        left, others = (
            [gap for gap, is_out in zip(used, out, strict=True) if is_out == wanted]
            for wanted in (True, False)
        )
        places, values, weights = data_of(left)
        if others and len(values):
            gaps, _ = said(fitted(*data_of(others)), places)
            off = math.sqrt(float((weights * (values - gaps) ** 2).mean()))
            means = [f"{100 * each.mean():.1f}" for each in (values, gaps)]
            cells.append([name, str(len(values)), *means, f"{off:.1f}"])
    return cells


def told_law(found: Sequence[Gap]) -> str:
    """The law and what it predicts, with 95% intervals over the gaps."""
    best, drawn = law(found)
    lowest, highest = np.quantile(drawn, (0.025, 0.975), axis=0)
    constants = [
        [name, f"{best[i]:+.4f}", f"{lowest[i]:+.4f} to {highest[i]:+.4f}"]
        for i, name in enumerate(NAMES)
    ]
    rows = []
    for size, workers, syncs in (
        *((1e6, 4, syncs) for syncs in (1e2, 1e3, 1e4)),
        *((1e6, workers, 1e3) for workers in (2, 8)),
        *((size, 4, syncs) for size in (30e6, 124e6, 1e9) for syncs in (1e3, 1e4)),
    ):
        place = np.array([[size, workers, syncs]])
        with np.errstate(all="ignore"):  # Of few gaps some draws have no law.
            low, high = np.quantile([said(each, place)[0] for each in drawn], (0.025, 0.975))
        cells = [
            f"{size / 1e6:g}M",
            f"{workers}",
            f"{syncs:,.0f}",
            f"{said(best, place)[0][0]:.2%}",
        ]
        rows.append([*cells, f"{low:.2%} to {high:.2%}"])
    best_said = ", ".join(f"{each:.4f}" for each in best)
    covariance = ",\n".join(
        "    (" + ", ".join(f"{each:.4e}" for each in row) + ")" for row in np.cov(drawn.T)
    )
    heads = ["left out", "gaps", "mean (%)", "law of the others (%)", "off by (deviations)"]
    return "\n\n".join(
        [
            LAW,
            table(["constant", "", "95%"], constants),
            table(["parameters", "K", "syncs", "gap", "95%"], rows),
            table(heads, held_out(found)),
            f"src/adloco/plan/gap_law.py:\nCONSTANTS = ({best_said})\n"
            f"COVARIANCE = (\n{covariance},\n)",
        ]
    )


def picture(found: Sequence[Gap], file: Path) -> None:
    """Draw the gaps over the syncs, and over what the law says."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    by_syncs, by_law = figure.subplots(1, 2, sharey=True)
    used = of_several(found)
    best, _ = law(found)
    colours = {2: "C0", 4: "C1", 8: "C2"}
    markers = dict(zip(sorted({gap.place[0] for gap in used}), "osD^v", strict=False))
    for gap in used:
        size, _, workers, syncs = gap.place
        told = said(best, np.array([[size, workers, syncs]]))[0][0]
        for axes, x in ((by_syncs, syncs), (by_law, 100 * told)):
            axes.errorbar(
                x,
                100 * gap.relative,
                100 * (gap.difference.half_width or 0.0),
                color=colours[int(workers)],
                marker=markers[size],
                markersize=4,
                linewidth=0.6,
            )
    many = np.geomspace(6, 4000, 50)
    for workers, colour in colours.items():
        places = np.column_stack([np.full((50, 2), (1e6, workers)), many])
        by_syncs.plot(many, 100 * said(best, places)[0], color=colour, label=f"K = {workers}")
    for size, marker in markers.items():
        label = f"{size / 1e6:.2f}M parameters"
        by_law.plot([], [], color="gray", marker=marker, linestyle="", label=label)
    by_law.plot([0.1, 40], [0.1, 40], color="gray", linewidth=0.8)
    for axes in (by_syncs, by_law):
        axes.set(xscale="log", yscale="log", ylim=(0.07, 45))
        axes.legend(fontsize=7)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
    by_syncs.set(xlabel="syncs (lines: the law at 1M)", ylabel="loss above data-parallel, %")
    by_law.set(xlabel="what the law says, %")
    figure.savefig(file, dpi=110)


def main(words: Sequence[str] | None = None) -> None:
    parser = script_parser(__doc__)
    add = parser.add_argument
    add("--parallel", type=int, default=2, help="runs at once (default: 2)")
    add("--csv", type=Path, default=Path("benchmarks/gap.csv"), help="file of the runs")
    add("--run", nargs="+", help="train these runs alone: PARAMETERS,RATIO,METHOD,K,SEED,LR[,...]")
    for name, about in (("table", "the gaps"), ("fit", "the law"), ("picture", "a picture")):
        add(f"--{name}", action="store_true", help=f"make {about} from stored runs; train nothing")
    options = parser.parse_args(words)
    if options.run:
        runs = [run for run in map(run_of, options.run) if run.identity not in read(options.csv)]
        train(runs, options.csv, options.parallel)
        return
    if not (options.table or options.fit or options.picture):
        while runs := wanted(read(options.csv)):
            train(runs, options.csv, options.parallel)
        return
    found = gaps(read(options.csv))
    require(bool(found), f"no final runs in {options.csv} can be compared; train some first")
    if options.table:
        print(page(found))
    if options.fit:
        print(told_law(found))
    if options.picture:
        picture(found, options.csv.with_suffix(".png"))


if __name__ == "__main__":
    run_script("gap", main)
