"""The tables of benchmarks/performance.md, from benchmarks/bench.json alone."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import table

from adloco.whole_file import write_text

BEGIN, END = "<!-- {}: written by benchmarks/bench.py -->", "<!-- end of {} -->"
METHODS = {"ddp": "data-parallel", "local-sgd": "LocalSGD", "diloco": "DiLoCo"}

Parts = Mapping[str, Any]
"""What bench.json holds: the parts by name, with their rows and where they were measured."""


def write_tables(parts: Parts, page: Path) -> None:
    """Replace the tables of the page by those of the measurements."""
    write_text(page, with_tables(parts, page.read_text(encoding="utf-8")))


def with_tables(parts: Parts, text: str) -> str:
    """The text of the page with these tables in it."""
    for name, rows_of in (("ratios", ratios), ("peers", peers), ("measured", measured)):
        begin, end = BEGIN.format(name), END.format(name)
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        assert found, f"the page has no {begin} ... {end}"
        text = f"{before}{begin}\n{rows_of(parts)}\n{end}{after}"
    return text


def ratios(parts: Parts) -> str:
    """What was compared in pairs, and what was counted."""
    rows = [row for name, part in parts.items() if name != "peers" for row in part["rows"]]
    return table(
        ("", "compared with", "ratio of seconds", "half of the pairs", "pairs", "seconds", "goal"),
        (_counted(row) if "count" in row else _compared(row) for row in rows),
    )


def peers(parts: Parts) -> str:
    """The other libraries, beside adloco with the same method."""
    return table(
        (
            *("method", "library", "steps/s", "of adloco's"),
            *("a sync, s", "start, s", "MB a round", "final loss"),
        ),
        (_peer(row) for row in parts.get("peers", {"rows": []})["rows"]),
    )


def measured(parts: Parts) -> str:
    """When, where and at which commit each part was measured."""
    return table(
        ("part", "date", "commit", "machine", "torch", "load before and after", "took"),
        (
            (
                f"`{name}`" + (", quick" if part["quick"] else ""),
                part["date"],
                part["commit"],
                part["machine"],
                part["torch"],
                " and ".join(f"{load:.1f}" for load in part["load"]),
                f"{part['seconds']} s",
            )
            for name, part in parts.items()
        ),
    )


def _compared(row: Mapping[str, Any]) -> tuple[str, ...]:
    goal = "" if row["goal"] is None else f"{row['goal']:.2f}"
    met = row["goal"] is None or row["ratio"] <= row["goal"]
    return (
        row["what"],
        row["against"],
        f"**{row['ratio']:.3f}**",
        f"{row['low']:.3f} to {row['high']:.3f}",
        str(row["pairs"]),
        f"{_seconds(row['seconds'])} / {_seconds(row['against_seconds'])}",
        goal if met else f"{goal}, missed",
    )


def _counted(row: Mapping[str, Any]) -> tuple[str, ...]:
    met = row["count"] <= row["goal"]
    goal = f"{row['goal']}" if met else f"{row['goal']}, missed"
    return (row["what"], row["of"], f"**{row['count']}** (a count)", "", "", "", goal)


def _peer(row: Mapping[str, Any]) -> tuple[str, ...]:
    method = METHODS[row["method"]]
    if row["failed"]:
        return (method, row["library"], row["failed"], *[""] * 5)
    half = f" ({row['low']:.2f} to {row['high']:.2f})" if row["library"] != "adloco" else ""
    sync = "" if row["method"] == "ddp" else f"{row['sync_seconds']:.3f}"
    return (
        method,
        f"{row['library']} {row['version']}",
        f"{row['steps_per_second']:.1f}",
        f"{row['ratio']:.2f}{half}",
        sync,
        f"{row['start_seconds']:.1f}",
        f"{row['round_megabytes']:.1f}",
        f"{row['loss']:.3f}",
    )


def _seconds(value: float) -> str:
    """Three digits of a time, in seconds or milliseconds."""
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
