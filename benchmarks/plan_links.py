"""How well does a plan predict the rounds of real runs over slow links? Trains DiLoCo with several
H and wire formats, and data-parallel training, over links of several bandwidths (`links.py`), and
compares the time of their rounds with two predictions.

    .venv/bin/python benchmarks/plan_links.py --stage stored    # of the rounds in links*.json
    .venv/bin/python benchmarks/plan_links.py --stage losses    # 72 short runs, without links
    .venv/bin/python benchmarks/plan_links.py [--bandwidths 10mbit,30mbit,100mbit]
        [--every 5,10,20,40] [--formats fp32,int4] [--islands 2]

- closed form, before (`adloco plan --cluster`): from the bytes, the bandwidth, and two times on an
  unlimited link: that of a step, and what a sync takes besides steps (`sync_seconds`). For
  data-parallel training the step is that of DiLoCo, because its own contains exchanges.
- fitted (`adloco plan --measured`): constants fitted to the method's other rows. Each H, and each
  bandwidth, is left out of the fit once, and then predicted.

Then the choice: a law of the loss is fitted to the runs of 100k and 200k tokens and says which H
and format reach a loss first on each link (`adloco plan --target-loss`). The loss is the highest
with which a run of 500k tokens ends. What is the fastest is measured: the tokens to that loss in
these runs times the measured seconds of their rounds.

The stage `stored` measures nothing: it takes the rounds in links.json and links_latency.json (H =
20; evaluations are part of them). The seconds that a round takes besides steps and transfers are
fitted to three formats on each link; the other formats and data-parallel training are predicted.

Rounds that are in the CSV already are not measured again. The first round of each run is left out.
Settings of adloco may be given, as for links.py.
"""

import argparse
import csv
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from links_network import parse_bandwidth
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from adloco.cli.main import main as main_of_adloco
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.recipe_text import named_settings
from adloco.plan.calibration import LEAST_ROWS, calibrate
from adloco.plan.candidates import Candidate
from adloco.plan.cluster import Cluster
from adloco.plan.loss_law import fit_loss_law
from adloco.plan.measured_rows import Row, Rows
from adloco.plan.prediction import Workload, predict
from adloco.plan.short_runs import method_of, read_short_runs
from adloco.plan.target import Target
from adloco.run.recipe_probe import count_parameters

DILOCO = str(Path(__file__).parents[1] / "reproduce" / "diloco.toml")
FITTED, HELD_OUT = ("fp32", "int2", "topk"), ("bf16", "int8", "int4")
STUDIES, SHORT, LONG = Path("runs/benchmarks/plan-links"), (100_000, 200_000), 500_000
LINKS = Path(__file__).with_name("links.py")
COLUMNS = (
    "method",
    "workers",
    "parameters",
    "sync_every",
    "bandwidth_bits_per_second",
    "compute_utilisation",
    "round_seconds",
    "rounds",
)
BATCH_PER_ISLAND, CONTEXT, STEPS_PER_ROUND_OF_DDP = 4, 128, 20
LEAST_ROUNDS, LEAST_STEPS = 5, 80
PAYLOAD = 1448 / 1514
"""Part of a full packet on the link that is not headers."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bandwidths", default="10mbit,30mbit,100mbit")
    parser.add_argument("--every", default="5,10,20,40", help="values of H")
    parser.add_argument("--formats", default="fp32,int4", help="wire formats")
    parser.add_argument("--stage", choices=("losses", "rounds", "stored"), default="rounds")
    parser.add_argument("--islands", type=int, default=2)
    parser.add_argument("--csv", type=Path, default=Path("benchmarks/plan_links.csv"))
    parser.add_argument("--png", type=Path)
    known, settings = parser.parse_known_args()
    if known.stage == "stored":
        compare_stored(known.png or Path("benchmarks/plan_links.png"))
        return
    if known.stage == "losses":
        train_for_losses(known, settings)
        return
    parameters = count_parameters(build_recipe(read_values("diloco")))
    arms = [("ddp", 1)] + [
        (f"diloco-{wire}", int(every))
        for wire in known.formats.split(",")
        for every in known.every.split(",")
    ]
    for bandwidth in ["0bit", *known.bandwidths.split(",")]:  # 0bit: unlimited.
        for arm, every in arms:
            measure(arm, every, bandwidth, parameters, known, settings)
    compare(known.csv, known.png or Path("benchmarks/plan_links_grid.png"))
    if all((STUDIES / f"{tokens}" / "compare.json").is_file() for tokens in (*SHORT, LONG)):
        choose(known)


def train_for_losses(known: argparse.Namespace, settings: Sequence[str]) -> None:
    """Train DiLoCo with every H and format on three budgets."""
    workers = ["--method.workers_per_trainer", str(known.islands)]
    workers += ["--batch.initial", str(known.islands * BATCH_PER_ISLAND)]
    for tokens in (*SHORT, LONG):
        words = ["sweep", DILOCO, "--run.tokens", str(tokens), *workers]
        words += ["--method.sync_every", *known.every.split(",")]
        words += ["--wire.format", *known.formats.split(","), "--seeds", "3", "--parallel", "2"]
        words += ["--outer.options", "{ momentum = 0.6, nesterov = true }", "--inner.lr", "2e-3"]
        main_of_adloco([*words, "--run.folder", str(STUDIES / f"{tokens}"), *settings])


def measure(
    arm: str,
    every: int,
    bandwidth: str,
    parameters: int,
    known: argparse.Namespace,
    settings: Sequence[str],
) -> None:
    """Append a row to the CSV, unless it has it."""
    bits = parse_bandwidth(bandwidth)
    have = list(csv.DictReader(known.csv.open())) if known.csv.exists() else []
    key = (arm, str(known.islands), str(parameters), str(every), str(bits))
    if any(tuple(row[name] for name in COLUMNS[:5]) == key for row in have):
        return
    steps = STEPS_PER_ROUND_OF_DDP if arm == "ddp" else every
    rounds = max(LEAST_ROUNDS, -(-LEAST_STEPS // steps)) + 1
    tokens = rounds * steps * known.islands * BATCH_PER_ISLAND * CONTEXT
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "links.json"
        command = [sys.executable, str(LINKS), "--bandwidth", bandwidth, "--arms", arm]
        command += ["--islands", str(known.islands), "--tokens", str(tokens)]
        command += ["--json", str(file), "--png", str(file.with_suffix(".png"))]
        command += ["--method.sync_every", str(steps), "--evaluation.every", "1000000", *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = json.loads(file.read_text())["arms"][arm]["rounds"]
    seconds = [after["seconds"] - before["seconds"] for before, after in itertools.pairwise(lines)]
    # Medians, because a machine of two cores is disturbed now and then.
    whole, busy = (
        statistics.median(seconds),
        statistics.median(line["busy_seconds"] for line in lines[1:]),
    )
    if arm == "ddp":  # Its exchanges are part of its steps, so its utilisation is not known here.
        whole, busy = whole / steps, whole / steps
    new = not known.csv.exists()
    with known.csv.open("a", newline="") as file_of_rows:
        writer = csv.writer(file_of_rows, lineterminator="\n")
        if new:
            writer.writerow(COLUMNS)
        writer.writerow([*key, f"{busy / whole:.5f}", f"{whole:.5f}", len(seconds)])
    print(f"{arm}, H = {every}, {bandwidth}: {whole:.3f} s a round", flush=True)


def compare(file: Path, png: Path) -> None:
    """Print and draw measured rounds beside predicted ones."""
    table = list(csv.DictReader(file.open()))
    limited = [row for row in table if row["bandwidth_bits_per_second"] != "0"]
    predictions: dict[str, Sequence[float | None]] = {
        "closed form, before": [
            closed_form(row, *without_link(table, row["method"])) for row in limited
        ],
        "fitted without its H": left_out(limited, "sync_every"),
        "fitted without its bandwidth": left_out(limited, "bandwidth_bits_per_second"),
    }
    for name, predicted in predictions.items():
        errors = [
            abs(guess / float(row["round_seconds"]) - 1)
            for guess, row in zip(predicted, limited, strict=True)
            if guess is not None
        ]
        print(
            f"{name}: off by {statistics.median(errors):.1%} (median), {max(errors):.1%} "
            f"(worst of {len(errors)} rows)"
        )
    draw(limited, predictions, png)
    print(png)


def compare_stored(png: Path) -> None:
    """Print and draw stored rounds beside predicted ones; the formats of the fit are marked."""
    rows, predicted = [], []
    parameters = count_parameters(build_recipe(read_values("diloco")))
    for file in ("links.json", "links_latency.json"):
        results = json.loads(LINKS.with_name(file).read_text())
        link = results["link"]
        measured = {
            arm: found["rounds"]
            for arm, found in results["arms"].items()
            if arm == "ddp" or arm.removeprefix("diloco-") in (*FITTED, *HELD_OUT)
        }
        busy = statistics.median(
            line["busy_seconds"]
            for arm, lines in measured.items()
            if arm != "ddp"
            for line in lines[1:]
        )
        here, times = [], []
        for arm, lines in measured.items():
            row = {
                "method": arm,
                "workers": str(results["islands"]),
                "parameters": str(parameters),
                "sync_every": "1" if arm == "ddp" else "20",
                "bandwidth_bits_per_second": str(link["bits_per_second"]),
            }
            seconds = [
                after["seconds"] - before["seconds"] for before, after in itertools.pairwise(lines)
            ]
            rounds = 20 if arm == "ddp" else 1
            here.append(row | {"round_seconds": str(statistics.median(seconds))})
            times.append(rounds * closed_form(row, busy / 20, latency=link["latency_seconds"]))
        rest = statistics.mean(
            float(row["round_seconds"]) - time
            for row, time in zip(here, times, strict=True)
            if row["method"].removeprefix("diloco-") in FITTED
        )
        print(f"{file}: {rest:.2f} s a round besides steps and transfers, by {', '.join(FITTED)}")
        for row, time in zip(here, times, strict=True):
            value = float(row["round_seconds"])
            kind = "fitted" if row["method"].removeprefix("diloco-") in FITTED else "predicted"
            print(
                f"  {row['method']}: {value:.2f} s measured, {time + rest:.2f} s {kind} "
                f"({(time + rest) / value - 1:+.1%})"
            )
        rows += here
        predicted += [time + rest for time in times]
    errors = [
        abs(guess / float(row["round_seconds"]) - 1)
        for row, guess in zip(rows, predicted, strict=True)
        if row["method"].removeprefix("diloco-") not in FITTED
    ]
    print(
        f"held out: off by {statistics.median(errors):.1%} (median), {max(errors):.1%} "
        f"(worst of {len(errors)})"
    )
    draw(rows, {"closed form and one constant a link": predicted}, png)
    print(png)


def closed_form(
    row: dict[str, str], step: float, sync_seconds: float = 0.0, latency: float = 0.0
) -> float:
    """Seconds of a round by the closed form.

    Args:
        row: What was measured.
        step: Seconds of an inner step.
        sync_seconds: What a sync takes besides its transfer.
        latency: One way, in seconds.
    """
    parallel = row["method"] == "ddp"
    islands = int(row["workers"])
    name, _, wire = row["method"].partition("-")
    values = read_values(name)
    if not parallel:
        flags = {
            "wire.format": wire,
            "method.sync_every": row["sync_every"],
            "method.workers_per_trainer": row["workers"],
            "batch.initial": str(islands * BATCH_PER_ISLAND),
        }
        values = override(values, list(flags.items()))
    cluster = Cluster(
        islands=islands,
        bandwidth=f"{PAYLOAD * int(row['bandwidth_bits_per_second']) / 1e3:.6f}kbit",
        latency=f"{1e3 * latency:.3f}ms",
        sync_seconds=sync_seconds,
        samples_per_second={BATCH_PER_ISLAND: BATCH_PER_ISLAND / step},
    )
    found = predict(
        Candidate(name=row["method"], settings=(), recipe=build_recipe(values)),
        Workload(parameters=float(row["parameters"]), tokens_per_sample=CONTEXT, noise_scale=None),
        cluster,
        Target(name="any", tokens=lambda recipe, batch: 1e6),
    )
    return found.round.total


def choose(known: argparse.Namespace) -> None:
    """Print, for each link, the fastest H and format by the plan and by measurement."""
    studies = {
        tokens: json.loads((STUDIES / f"{tokens}" / "compare.json").read_text())
        for tokens in (*SHORT, LONG)
    }
    short = [
        Path(run["folder"])
        for tokens in SHORT
        for arm in studies[tokens]["arms"]
        for run in arm["runs"]
    ]
    fit = fit_loss_law(read_short_runs(short).points)
    (target,) = studies[LONG]["targets"]
    table = list(csv.DictReader(known.csv.open()))
    per_step = known.islands * BATCH_PER_ISLAND * CONTEXT
    for bandwidth in map(parse_bandwidth, known.bandwidths.split(",")):
        measured, predicted = {}, {}
        for arm in studies[LONG]["arms"]:
            folder = Path(arm["runs"][0]["folder"])
            recipe = build_recipe(read_values(str(folder / "recipe.toml")))
            wire = named_settings(recipe)["wire.format"]
            every = recipe.method.given_sync_every
            found = [
                row
                for row in table
                if (row["method"], row["sync_every"], row["bandwidth_bits_per_second"])
                == (f"diloco-{wire}", str(every), str(bandwidth))
            ]
            tokens = arm["to_target"][f"{target:g}"]["tokens"]["mean"]
            if not found or tokens is None:
                continue
            name = (wire, every)
            seconds = float(found[0]["round_seconds"])
            measured[name] = tokens / per_step / every * seconds
            wanted = fit.law.tokens_to(
                target,
                method=method_of(recipe),
                batch=known.islands * BATCH_PER_ISLAND,
                sync_every=every,
            )
            round_seconds = closed_form(found[0], *without_link(table, f"diloco-{wire}"))
            predicted[name] = wanted / per_step / every * round_seconds
        fastest, chosen = (
            min(measured, key=measured.__getitem__),
            min(predicted, key=predicted.__getitem__),
        )
        print(
            f"{bandwidth / 1e6:g} Mbit/s, loss {target:g}: the plan chooses {chosen[0]}, "
            f"H = {chosen[1]} ({predicted[chosen]:.0f} s predicted, {measured[chosen]:.0f} s "
            f"measured); fastest is {fastest[0]}, H = {fastest[1]} ({measured[fastest]:.0f} s); "
            f"{measured[chosen] / measured[fastest] - 1:.1%} longer"
        )


def without_link(table: Sequence[dict[str, str]], method: str) -> tuple[float, float]:
    """(seconds of an inner step, seconds of a sync besides its transfer), on an unlimited link."""
    parallel = method == "ddp"
    rows = [
        (float(row["round_seconds"]), float(row["compute_utilisation"]), int(row["sync_every"]))
        for row in table
        if row["bandwidth_bits_per_second"] == "0"
        and (row["method"] != "ddp" if parallel else row["method"] == method)
    ]
    steps = statistics.median(seconds * busy / every for seconds, busy, every in rows)
    # A sync encodes and takes the outer step, which data-parallel training does not.
    besides = statistics.median(seconds * (1 - busy) for seconds, busy, _ in rows)
    return steps, 0.0 if parallel else besides


def left_out(limited: Sequence[dict[str, str]], column: str) -> list[float | None]:
    """Seconds of each row's round, by constants fitted to the method's rows with other values in a
    column; None where too few are left.
    """
    rows = [as_row(row) for row in limited]
    found: list[float | None] = []
    for row, cells in zip(rows, limited, strict=True):
        others = [
            other
            for other, theirs in zip(rows, limited, strict=True)
            if other.group == row.group and theirs[column] != cells[column]
        ]
        if len(others) < LEAST_ROWS:
            found.append(None)
            continue
        fit = calibrate(Rows(rows=others, measure="round_seconds", cells=[]))
        found.append(fit[row.group].constants.value(row))
    return found


def as_row(row: dict[str, str]) -> Row:
    return Row(
        group=(row["method"], float(row["workers"]), float(row["parameters"])),
        sync_every=float(row["sync_every"]),
        bits_per_second=float(row["bandwidth_bits_per_second"]),
        value=float(row["round_seconds"]),
    )


def draw(
    limited: Sequence[dict[str, str]],
    predictions: Mapping[str, Sequence[float | None]],
    png: Path,
) -> None:
    """Draw predicted against measured seconds, a panel for each kind of prediction."""
    figure = Figure(figsize=(max(5.5, 4.2 * len(predictions)), 4.8), layout="constrained")
    panels = figure.subplots(1, len(predictions), sharex=True, sharey=True, squeeze=False)[0]
    measured = [float(row["round_seconds"]) for row in limited]
    ends = [min(measured) * 0.8, max(measured) * 1.25]
    for panel, (name, predicted) in zip(panels, predictions.items(), strict=True):
        panel.plot(ends, ends, color="#b0b7c3", linewidth=1)
        panel.fill_between(
            ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color="#eef1f5"
        )
        for index, method in enumerate(dict.fromkeys(row["method"] for row in limited)):
            points = [
                (value, guess)
                for row, value, guess in zip(limited, measured, predicted, strict=True)
                if row["method"] == method and guess is not None
            ]
            if points:
                panel.plot(
                    *zip(*points, strict=True), "o", color=f"C{index}", markersize=4, label=method
                )
        panel.set_xscale("log")
        panel.set_yscale("log")
        panel.set_title(name)
        panel.set_xlabel("measured seconds of a round")
        panel.grid(alpha=0.25)
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_locator(FixedLocator([0.5, 1, 2, 3, 5, 10, 20, 40]))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_locator(NullLocator())
    panels[0].set_ylabel("predicted seconds (band: 10%)")
    panels[0].legend(frameon=False)
    figure.savefig(png, dpi=110)


if __name__ == "__main__":
    main()
