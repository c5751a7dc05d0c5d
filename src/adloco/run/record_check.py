"""Finds damage in lines of a run's records, so that it is named where they are read and what uses
the numbers need not expect it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from adloco.metrics import PHASE, ROUND, SYNC, TRAINER, WORKER, Metric
from adloco.options import option_metrics

STEP = ("round", "trainer", "worker", "inner_step", "samples")
LARGEST, LARGEST_FLOAT = 2**62, 1e100
_OF_OPTIONS = {*option_metrics("trainer"), *option_metrics("worker")}


def record_fault(line: Any) -> str:
    """What is wrong with a line of metrics.jsonl; empty if nothing is."""
    if not isinstance(line, dict):
        return "no object"
    for name in ("trainers", "workers", "merges", "changes"):
        rows = line.get(name)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            return f"no {name}"
    for name in ("sync", "memory"):
        if not isinstance(line.get(name), dict):
            return f"no {name}"
    if not line["trainers"] or not all(isinstance(row, dict) for row in line["memory"].values()):
        return "no trainers or no memory"
    return (
        _fault([line], ROUND, ("val_loss",))
        or _fault([line["sync"]], SYNC)
        or _fault(line["trainers"], TRAINER, ("val_loss",))
        or _fault(line["workers"], WORKER)
        or _fault(list(line["memory"].values()), PHASE)
        or next(filter(None, map(_merge_fault, line["merges"])), "")
        or next(filter(None, map(_change_fault, line["changes"])), "")
    )


def round_fault(line: Any) -> str:
    """What is wrong with a line of which only the round counts; empty if nothing is."""
    return "" if isinstance(line, dict) and is_count(line.get("round")) else "round"


def step_fault(line: Any) -> str:
    """What is wrong with a line of steps.jsonl; empty if nothing is."""
    if not isinstance(line, dict):
        return "no object"
    wrong = [name for name in STEP if not is_count(line.get(name))]
    wrong += [] if is_number(line.get("loss", "")) else ["loss"]
    return wrong[0] if wrong else "inner_step" if line["inner_step"] == 0 else ""


def memory_fault(line: Any) -> str:
    """What is wrong with a line of out_of_memory.jsonl; empty if nothing is."""
    return "" if isinstance(line, dict) and is_count(line.get("pass_limit")) else "pass_limit"


def is_number(value: Any) -> bool:
    """True for a finite number of a usual size, and for null."""
    if type(value) is float:
        return abs(value) < LARGEST_FLOAT  # False for nan.
    return value is None or (type(value) is int and abs(value) < LARGEST)


def is_count(value: Any) -> bool:
    """True for a whole number of a usual size that is not negative."""
    return type(value) is int and 0 <= value < LARGEST


def _fault(
    rows: Sequence[Mapping[str, Any]], table: Mapping[str, Metric], others: Sequence[str] = ()
) -> str:
    """The first name of a table whose value in a row is not what it should be."""
    for row in rows:
        # A run may have been trained without an option that is there now.
        absent = {name for name in _OF_OPTIONS if name not in row}
        for name in (*table, *others):
            if name in absent:
                continue
            value, metric = row.get(name, ""), table.get(name)
            fits = is_count if metric and metric.whole else is_number
            if metric and metric.always if value is None else not fits(value):
                return name
        # A task has measures of its own.
        other = [name for name in row if name.startswith("val_") and not is_number(row[name])]
        if other:
            return other[0]
    return (
        "inner_steps" if table is ROUND and not rows[0]["inner_steps"] * rows[0]["samples"] else ""
    )


def _merge_fault(merge: Mapping[str, Any]) -> str:
    absorbed, weights = merge.get("absorbed"), merge.get("weights")
    fits = (
        is_count(merge.get("survivor"))
        and isinstance(absorbed, list)
        and all(map(is_count, absorbed))
        and isinstance(weights, dict)
        and all(value is not None and is_number(value) for value in weights.values())
    )
    return "" if fits else "merges"


def _change_fault(change: Mapping[str, Any]) -> str:
    fits = (
        change.get("setting") in ROUND
        and all(is_number(change.get(name, "")) for name in ("before", "after"))
        and isinstance(change.get("reason"), str)
    )
    return "" if fits else "changes"
