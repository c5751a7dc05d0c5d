"""Pictures of a run from its metrics: loss against tokens, rounds, bytes and seconds; batches, noise, trainers, syncs and memory over tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from adloco.run.memory_use import PHASES
from adloco.run.records import Record

COLOURS = ("#0b6e99", "#d9730d", "#2e8b57", "#ad1a72", "#6940a5", "#b8860b", "#c0392b", "#4a5568")


def draw_plots(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write every picture as PNG and return the paths, in the order in which to look at them."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Callable[[Sequence[Record]], Figure]] = {
        "loss": _loss,
        **({"accuracy": _accuracy} if any(record["val_accuracy"] is not None for record in records) else {}),
        "batch": _batch,
        **({"noise_scale": _noise_scale} if any(row["noise_scale"] for record in records for row in record["trainers"]) else {}),
        "trainers": _trainers,
        **({"workers": _workers} if len(records[0]["workers"]) > 1 else {}),
        "communication": _communication,
        **({"wire": _wire} if any(record["sync"]["bytes"] for record in records) else {}),
        "memory": _memory,
    }
    paths = []
    for name, draw in pictures.items():
        path = folder / f"{name}.png"
        draw(records).savefig(path, dpi=120)
        paths.append(path)
    return paths


def _loss(records: Sequence[Record]) -> Figure:
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    axes = figure.subplots(2, 2, sharey=True).flatten()
    against = [
        ("tokens", "tokens", 1.0),
        ("round", "rounds", 1.0),
        ("bytes_communicated", "bytes sent per worker", 1.0)
        if records[-1]["bytes_communicated"]
        else ("bytes_inside", "bytes sent per rank, inside", 1.0),
        ("seconds", "seconds", 1.0),
    ]
    for axis, (key, label, unit) in zip(axes, against, strict=True):
        evaluated = [record for record in records if record["val_loss"] is not None]
        x = [record[key] / unit for record in records]
        axis.plot(x, [record["train_loss"] for record in records], color="#b0b7c3", linewidth=1.2, label="train")
        axis.plot(
            [record[key] / unit for record in evaluated],
            [record["val_loss"] for record in evaluated],
            color=COLOURS[0],
            linewidth=2,
            label="validation",
        )
        _mark_merges(axis, records, key, unit)
        _label(axis, label, "loss (nats)")
    axes[0].legend(frameon=False)
    figure.suptitle("Loss (dotted: merges)", fontsize=12)
    return figure


def _accuracy(records: Sequence[Record]) -> Figure:
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    for axis, (key, label) in zip(figure.subplots(1, 2, sharey=True), (("tokens", "tokens"), ("round", "rounds")), strict=True):
        evaluated = [record for record in records if record["val_accuracy"] is not None]
        axis.plot([record[key] for record in evaluated], [record["val_accuracy"] for record in evaluated], color=COLOURS[0], linewidth=2)
        _mark_merges(axis, records, key, 1.0)
        _label(axis, label, "accuracy")
    figure.axes[0].set_ylim(0, 1)
    figure.axes[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    figure.suptitle("Validation accuracy of the trainer with the lowest loss", fontsize=12)
    return figure


def _steps(points: Sequence[tuple[float, float]], before: float) -> list[list[float]]:
    """A staircase of values that each held in the round that ends at their x. before: where the first of these rounds began."""
    x, y = [before], [points[0][1]] if points else [0.0]
    for at, value in points:
        x, y = [*x, x[-1], at], [*y, value, value]
    return [x, y]


def _per_trainer(axis: Axes, records: Sequence[Record], value: str, steps: bool = False, **style: Any) -> None:
    for trainer in sorted({row["trainer"] for record in records for row in record["trainers"]}):
        points = [(record["tokens"], row[value]) for record in records for row in record["trainers"] if row["trainer"] == trainer]
        points = [(x, y) for x, y in points if y is not None]
        colour = COLOURS[trainer % len(COLOURS)]
        if not points:
            continue
        # Equal curves of several trainers stay visible: those drawn first are wider.
        look: dict[str, Any] = {"color": colour, "label": f"trainer {trainer}", "linewidth": max(1.2, 3.6 - 0.8 * trainer)} | style
        if steps:
            axis.plot(*_steps(points, 0.0), **look)
        else:
            axis.plot(*zip(*points, strict=True), marker="o", markersize=2.5, **look)
    _mark_merges(axis, records, "tokens", 1.0)


def _batch(records: Sequence[Record]) -> Figure:
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    _per_trainer(left, records, "requested_batch", steps=True)
    _label(left, "tokens", "requested batch (samples)", whole=True)
    left.legend(frameon=False)
    _per_trainer(right, records, "accumulation_steps", steps=True)
    _label(right, "tokens", "accumulation steps", whole=True)
    figure.suptitle("Batch of each trainer, and micro-batches per inner step", fontsize=12)
    return figure


def _noise_scale(records: Sequence[Record]) -> Figure:
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    _per_trainer(left, records, "noise_scale")
    _label(left, "tokens", "noise scale S / |G|² (samples)")
    left.set_yscale("log")
    left.legend(frameon=False)
    _per_trainer(right, records, "grad_norm_sq")
    _per_trainer(right, records, "grad_variance", linestyle="--")
    _label(right, "tokens", "|G|² (solid), S (dashed)")
    right.set_yscale("log", nonpositive="mask")
    figure.suptitle("Gradient statistics, smoothed as the batch rule sees them (none where noise hides |G|²)", fontsize=12)
    return figure


def _trainers(records: Sequence[Record]) -> Figure:
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    _per_trainer(left, records, "val_loss")
    _label(left, "tokens", "validation loss")
    left.legend(frameon=False)
    _per_trainer(right, records, "workers", steps=True)
    _label(right, "tokens", "workers", whole=True)
    figure.suptitle("Trainers (dotted: merges)", fontsize=12)
    return figure


def _workers(records: Sequence[Record]) -> Figure:
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axis, value, label in ((left, "worker_batch", "samples per inner step"), (right, "wait_seconds", "waiting (seconds per round)")):
        for worker in range(len(records[0]["workers"])):
            rows = [(record["tokens"], record["workers"][worker][value]) for record in records]
            colour = COLOURS[worker % len(COLOURS)]
            axis.plot(*_steps(rows, 0.0), color=colour, linewidth=max(1.2, 3.6 - 0.8 * worker), label=f"worker {worker}")
        _label(axis, "tokens", label)
        axis.set_ylim(bottom=0)
    left.legend(frameon=False)
    figure.suptitle("Share of each worker, and how long it waited for the slowest", fontsize=12)
    return figure


def _communication(records: Sequence[Record]) -> Figure:
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    axis = figure.subplots()
    tokens = [record["tokens"] for record in records]
    axis.plot(
        tokens, [record["bytes_ddp_equivalent"] / 1e6 for record in records], color="#b0b7c3", linewidth=2, label="data-parallel, as many steps"
    )
    axis.plot(tokens, [record["bytes_communicated"] / 1e6 for record in records], color=COLOURS[0], linewidth=2, label="between workers")
    if records[-1]["bytes_inside"]:
        inside = [record["bytes_inside"] / 1e6 for record in records]
        axis.plot(tokens, inside, color=COLOURS[1], linewidth=2, label="inside an island, per rank")
    if records[-1]["bytes_communicated"]:
        axis.set_yscale("log")
    _label(axis, "tokens", "MB sent per worker")
    axis.legend(frameon=False)
    figure.suptitle("Communication", fontsize=12)
    return figure


def _wire(records: Sequence[Record]) -> Figure:
    lossy = any(row["wire_error"] for record in records for row in record["trainers"])
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    alike, *rest = figure.subplots(1, 3 if lossy else 2)
    _per_trainer(alike, records, "cosine_similarity")
    _label(alike, "tokens", "cosine of workers' pseudo-gradients")
    alike.axhline(0, color="#6b7280", linewidth=1)
    alike.set_ylim(bottom=min(alike.get_ylim()[0], -0.05), top=1.05)
    alike.legend(frameon=False)
    if lossy:
        _per_trainer(rest[0], records, "wire_error")
        _label(rest[0], "tokens", "lost by the wire format (relative norm)")
        rest[0].set_ylim(0, 1.2 * max(row["wire_error"] or 0.0 for record in records for row in record["trainers"]))
    for key, label, colour in (("exposed_seconds", "exposed: training waits", COLOURS[1]), ("hidden_seconds", "hidden: it goes on", COLOURS[2])):
        points = [(record["tokens"], record["sync"][key]) for record in records]
        rest[-1].plot(*_steps(points, 0.0), color=colour, linewidth=2, label=label)
    _label(rest[-1], "tokens", "seconds of syncs per round")
    # Room for the legend above the curves.
    rest[-1].set_ylim(0, 1.35 * max(max(record["sync"]["exposed_seconds"], record["sync"]["hidden_seconds"]) for record in records))
    rest[-1].legend(frameon=False, loc="upper right")
    figure.suptitle("Syncs: how alike workers are, what is lost, and what they take", fontsize=12)
    return figure


def _memory(records: Sequence[Record]) -> Figure:
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    tokens, peak = [record["tokens"] for record in records], [record["memory_bytes"] / 2**20 for record in records]
    axes[0].plot(tokens, peak, color="#b0b7c3", linewidth=5, label="whole run so far")
    for axis, value, label in zip(axes, ("peak_bytes", "current_bytes"), ("peak memory (MiB)", "held at the end of the phase (MiB)"), strict=True):
        for phase, colour in zip(PHASES, COLOURS, strict=False):
            points = [(record["tokens"], record["memory"][phase][value]) for record in records if phase in record["memory"]]
            known = [(x, y / 2**20) for x, y in points if y is not None]
            axis.plot([x for x, _ in known], [y for _, y in known], color=colour, marker="o", markersize=2.5, label=phase.replace("_", " "))
        _label(axis, "tokens", label)
    axes[0].set_ylim(0, 1.1 * max(peak))
    axes[0].legend(frameon=False, loc="lower right")
    figure.suptitle("Memory by phase of a round", fontsize=12)
    return figure


def _mark_merges(axis: Axes, records: Sequence[Record], key: str, unit: float) -> None:
    for record in records:
        if record["merges"]:
            axis.axvline(record[key] / unit, color="#6b7280", linestyle=":", linewidth=1)


def _label(axis: Axes, x: str, y: str, *, whole: bool = False) -> None:
    """whole: y is a count, of which nothing lies between two, shown from 0 on."""
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=x == "rounds"))
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    if axis.get_yscale() == "linear":
        axis.ticklabel_format(axis="y", useOffset=False)
    if whole:
        axis.set_ylim(bottom=0)
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
