"""How well does a plan predict the rounds of real runs over slow links? Trains DiLoCo with several
H and wire formats, and data-parallel training, over links of several bandwidths (`links.py`), and
compares the time of their rounds with two predictions.

    .venv/bin/python benchmarks/plan_links.py --stage stored    # of the rounds in links*.json
    .venv/bin/python benchmarks/plan_links.py                   # of the rows of plan_links.csv

- closed form, before (`adloco plan --cluster`): from the bytes, the bandwidth, and two times on an
  unlimited link: that of a step, and what a sync takes besides steps (`sync_seconds`). For
  data-parallel training the step is that of DiLoCo, because its own contains exchanges.
- fitted (`adloco plan --measured`): constants fitted to the method's other rows. Each H, and each
  bandwidth, is left out of the fit once, and then predicted.

The stage `stored` measures nothing: it takes the rounds in links.json and links_latency.json (H =
20; evaluations are part of them). The seconds that a round takes besides steps and transfers are
fitted to three formats on each link; the other formats and data-parallel training are predicted.

Rounds that are in the CSV already are not measured again. The first round of each run is left out.
Settings of adloco may be given, as for links.py.
"""

import csv
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import script_parser
from links_network import parse_bandwidth
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from adloco.config.recipe import build_recipe, override, read_values
from adloco.plan.calibration import LEAST_ROWS, Errors, calibrate
from adloco.plan.candidates import Candidate
from adloco.plan.cluster import Cluster
from adloco.plan.measured_rows import Row, Rows
from adloco.plan.prediction import Workload, predict
from adloco.plan.target import Target

HERE = Path(__file__).parent
ISLANDS, PARAMETERS, BANDWIDTHS = 2, 869_504, ("0bit", "10mbit", "30mbit", "100mbit")
"""The parameters are those of the default model; 0bit: unlimited."""
ARMS = [("ddp", 1), *itertools.product(("diloco-fp32", "diloco-int4"), (5, 10, 20, 40))]
"""The methods with their H."""
FITTED = ("diloco-fp32", "diloco-int2", "diloco-topk")
HELD_OUT = ("ddp", "diloco-bf16", "diloco-int8", "diloco-int4")
KEY = ("method", "workers", "parameters", "sync_every", "bandwidth_bits_per_second")
COLUMNS = (*KEY, "compute_utilisation", "round_seconds", "rounds")
BATCH_PER_ISLAND, CONTEXT, STEPS_PER_ROUND_OF_DDP = 4, 128, 20
LEAST_ROUNDS, LEAST_STEPS = 5, 80
PAYLOAD = 1448 / 1514
"""Part of a full packet on the link that is not headers."""


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--stage", choices=("rounds", "stored"), default="rounds")
    parser.add_argument("--csv", type=Path, default=HERE / "plan_links.csv")
    parser.add_argument("--png", type=Path)
    known, settings = parser.parse_known_args()
    if known.stage == "stored":
        compare_stored(known.png or HERE / "plan_links.png")
    else:
        measure_all(known.csv, settings)
        compare(known.csv, known.png or HERE / "plan_links_grid.png")


def measure_all(file: Path, settings: Sequence[str]) -> None:
    """Append the rows that the CSV lacks."""
    for bandwidth, (arm, steps) in itertools.product(BANDWIDTHS, ARMS):
        have = read(file) if file.exists() else {}
        cells = (arm, ISLANDS, PARAMETERS, steps, parse_bandwidth(bandwidth))
        if row_of(*cells) not in [replace(row, value=None) for row in have]:
            row = [*cells, *measure(arm, steps, bandwidth, settings)]
            with file.open("a", newline="") as opened:
                writer = csv.writer(opened, lineterminator="\n")
                writer.writerows([row] if have else [COLUMNS, row])


def measure(arm: str, every: int, bandwidth: str, settings: Sequence[str]) -> tuple[str, str, int]:
    """Compute utilisation, seconds of a round, and the number of rounds."""
    steps = STEPS_PER_ROUND_OF_DDP if arm == "ddp" else every
    rounds = max(LEAST_ROUNDS, -(-LEAST_STEPS // steps)) + 1
    tokens = rounds * steps * ISLANDS * BATCH_PER_ISLAND * CONTEXT
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "links.json"
        command = [sys.executable, str(HERE / "links.py"), "--bandwidth", bandwidth, "--arms", arm]
        command += ["--islands", str(ISLANDS), "--tokens", str(tokens)]
        command += ["--json", str(file), "--png", str(file.with_suffix(".png"))]
        command += ["--method.sync_every", str(steps), "--evaluation.every", "1000000", *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = json.loads(file.read_text())["arms"][arm]["rounds"]
    # Medians, because a machine of two cores is disturbed now and then.
    whole = median_seconds(lines)
    busy = statistics.median(line["busy_seconds"] for line in lines[1:])
    if arm == "ddp":  # Its exchanges are part of its steps, so its utilisation is not known here.
        whole = busy = whole / steps
    print(f"{arm}, H = {every}, {bandwidth}: {whole:.3f} s a round", flush=True)
    return f"{busy / whole:.5f}", f"{whole:.5f}", len(lines) - 1


def median_seconds(lines: Sequence[Mapping[str, Any]]) -> float:
    """Median seconds of the rounds, without the first one."""
    return statistics.median(
        after["seconds"] - before["seconds"] for before, after in itertools.pairwise(lines)
    )


def row_of(method: str, *numbers: float, value: float | None = None) -> Row:
    """A row from a method, and islands, parameters, H and bandwidth; perhaps with its seconds."""
    islands, parameters, every, bits = map(float, numbers)
    group = (method, islands, parameters)
    return Row(group=group, sync_every=every, bits_per_second=bits, value=value)


def read(file: Path) -> dict[Row, float]:
    """The rows of the CSV, and the utilisation of each."""
    with file.open() as opened:
        return {
            row_of(*(row[name] for name in KEY), value=float(row["round_seconds"])): float(
                row["compute_utilisation"]
            )
            for row in csv.DictReader(opened)
        }


def compare(file: Path, png: Path) -> None:
    """Print and draw measured rounds beside predicted ones."""
    table = read(file)
    limited = [row for row in table if row.bits_per_second]
    closed = [closed_form(row, *without_link(table, row.group[0])) for row in limited]
    predictions: dict[str, Sequence[float | None]] = {
        "closed form, before": closed,
        "fitted without its H": left_out(limited, lambda row: row.sync_every),
        "fitted without its bandwidth": left_out(limited, lambda row: row.bits_per_second),
    }
    for name, predicted in predictions.items():
        print(f"{name}: {errors(limited, predicted)} rows)")
    draw(limited, predictions, png)


def errors(rows: Sequence[Row], predicted: Sequence[float | None]) -> str:
    """The median and the worst error of predictions, in words."""
    pairs = [(guess, row.value) for guess, row in zip(predicted, rows, strict=True)]
    found = Errors.of([abs(guess / value - 1) for guess, value in pairs if guess and value])
    assert found
    return f"off by {found.median:.1%} (median), {found.worst:.1%} (worst of {found.count}"


def compare_stored(png: Path) -> None:
    """Print and draw stored rounds beside predicted ones; the formats of the fit are marked."""
    rows: list[Row] = []
    predicted: list[float] = []
    for name in ("links.json", "links_latency.json"):
        results = json.loads((HERE / name).read_text())
        link, arms = results["link"], results["arms"]
        measured = {arm: arms[arm]["rounds"] for arm in arms if arm in FITTED + HELD_OUT}
        local = [lines for arm, lines in measured.items() if arm != "ddp"]
        busy = statistics.median(line["busy_seconds"] for lines in local for line in lines[1:])
        here: dict[Row, float] = {}
        for arm, lines in measured.items():
            rounds, every = (20, 1) if arm == "ddp" else (1, 20)
            about = (results["islands"], PARAMETERS, every, link["bits_per_second"])
            row = row_of(arm, *about, value=median_seconds(lines))
            here[row] = rounds * closed_form(row, busy / 20, latency=link["latency_seconds"])
        rest = statistics.mean(row.value - here[row] for row in here if row.group[0] in FITTED)
        formats = ", ".join(arm.removeprefix("diloco-") for arm in FITTED)
        print(f"{name}: {rest:.2f} s a round besides steps and transfers, by {formats}")
        for row, time in here.items():
            kind = "fitted" if row.group[0] in FITTED else "predicted"
            print(
                f"  {row.group[0]}: {row.value:.2f} s measured, {time + rest:.2f} s {kind} "
                f"({(time + rest) / row.value - 1:+.1%})"
            )
        rows += here
        predicted += [time + rest for time in here.values()]
    held = [pair for pair in zip(rows, predicted, strict=True) if pair[0].group[0] in HELD_OUT]
    print(f"held out: {errors(*zip(*held, strict=True))})")
    draw(rows, {"closed form and one constant a link": predicted}, png)


def closed_form(row: Row, step: float, sync_seconds: float = 0.0, latency: float = 0.0) -> float:
    """Seconds of a round by the closed form.

    Args:
        row: What was measured.
        step: Seconds of an inner step.
        sync_seconds: What a sync takes besides its transfer.
        latency: One way, in seconds.
    """
    method, workers, size = row.group
    islands = int(workers)
    name, _, wire = method.partition("-")
    flags = {
        "wire.format": wire,
        "method.sync_every": f"{row.sync_every:g}",
        "method.workers_per_trainer": str(islands),
        "batch.initial": str(islands * BATCH_PER_ISLAND),
    }
    values = override(read_values(name), list(flags.items()) if wire else [])
    cluster = Cluster(
        islands=islands,
        bandwidth=f"{PAYLOAD * row.bits_per_second / 1e3:.6f}kbit",
        latency=f"{1e3 * latency:.3f}ms",
        sync_seconds=sync_seconds,
        samples_per_second={BATCH_PER_ISLAND: BATCH_PER_ISLAND / step},
    )
    found = predict(
        Candidate(name=method, settings=(), recipe=build_recipe(values)),
        Workload(parameters=size, tokens_per_sample=CONTEXT, noise_scale=None),
        cluster,
        Target(name="any", tokens=lambda recipe, batch: 1e6),
    )
    return found.round.total


def without_link(table: Mapping[Row, float], method: str) -> tuple[float, float]:
    """(seconds of an inner step, seconds of a sync besides its transfer), on an unlimited link."""
    names = {row.group[0] for row in table} - {"ddp"} if method == "ddp" else {method}
    rows = [row for row in table if not row.bits_per_second and row.group[0] in names]
    steps = statistics.median(row.value * table[row] / row.sync_every for row in rows)
    # A sync encodes and takes the outer step, which data-parallel training does not.
    besides = statistics.median(row.value * (1 - table[row]) for row in rows)
    return steps, 0.0 if method == "ddp" else besides


def left_out(rows: Sequence[Row], column: Callable[[Row], float]) -> list[float | None]:
    """Seconds of each row's round, by constants fitted to the method's rows with other values in a
    column; None where too few are left.
    """
    found: list[float | None] = []
    for row in rows:
        of_method = [other for other in rows if other.group == row.group]
        others = [other for other in of_method if column(other) != column(row)]
        found.append(None)
        if len(others) >= LEAST_ROWS:
            fit = calibrate(Rows(rows=others, measure="round_seconds", cells=[]))
            found[-1] = fit[row.group].constants.value(row)
    return found


def draw(
    limited: Sequence[Row], predictions: Mapping[str, Sequence[float | None]], png: Path
) -> None:
    """Draw predicted against measured seconds, a panel for each kind of prediction."""
    figure = Figure(figsize=(max(5.5, 4.2 * len(predictions)), 4.8), layout="constrained")
    panels = figure.subplots(1, len(predictions), sharex=True, sharey=True, squeeze=False)[0]
    measured = [row.value for row in limited]
    ends = [min(measured) * 0.8, max(measured) * 1.25]
    for panel, (name, predicted) in zip(panels, predictions.items(), strict=True):
        panel.plot(ends, ends, color="#b0b7c3", linewidth=1)
        panel.fill_between(ends, *([part * end for end in ends] for part in (0.9, 1.1)), alpha=0.1)
        for method in dict.fromkeys(row.group[0] for row in limited):
            points = [
                (value, guess)
                for row, value, guess in zip(limited, measured, predicted, strict=True)
                if row.group[0] == method and guess is not None
            ]
            panel.plot(*(zip(*points, strict=True) if points else ([], [])), "o", label=method)
        panel.set(xscale="log", yscale="log", title=name, xlabel="measured seconds of a round")
        panel.grid(alpha=0.25)
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_locator(FixedLocator([0.5, 1, 2, 3, 5, 10, 20, 40]))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_locator(NullLocator())
    panels[0].set_ylabel("predicted seconds (band: 10%)")
    panels[0].legend(frameon=False)
    figure.savefig(png, dpi=110)
    print(png)


if __name__ == "__main__":
    main()
