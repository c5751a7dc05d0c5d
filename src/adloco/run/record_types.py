"""Types of the lines of a run's records, made from the tables of `adloco.metrics`. Damage is named
where a line is read, so that code that uses the numbers need not expect it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError, create_model

from adloco.config.values import adapter
from adloco.metrics import PHASE, ROUND, SYNC, TRAINER, WORKER, Metric
from adloco.options import option_metrics

Count = Annotated[int, Field(strict=True, ge=0, lt=2**62)]
Positive = Annotated[Count, Field(gt=0)]
Number = Annotated[float, Field(strict=True, gt=-1e100, lt=1e100, allow_inf_nan=False)]
Text = Annotated[str, Field(strict=True)]


@dataclass(frozen=True, kw_only=True)
class OfRound:
    """A line of which only the round counts."""

    round: Count


@dataclass(frozen=True, kw_only=True)
class StepLine:
    """A line of steps.jsonl."""

    round: Count
    trainer: Count
    worker: Count
    inner_step: Positive
    samples: Count
    loss: Number | None


@dataclass(frozen=True, kw_only=True)
class MemoryLine:
    """A line of out_of_memory.jsonl."""

    pass_limit: Count


@dataclass(frozen=True, kw_only=True)
class _MergeLine:
    survivor: Count
    absorbed: list[Count]
    weights: dict[str, Number]


@dataclass(frozen=True, kw_only=True)
class _ChangeLine:
    setting: Text
    before: Count
    after: Count
    reason: Text


class _Numbers(BaseModel, extra="allow"):
    # A task has measures of its own.
    __pydantic_extra__: dict[str, Number | None] = Field(init=False)


@cache
def metrics_line() -> type:
    """The type of a line of metrics.jsonl."""
    loss = (Number | None, ...)
    sections = {
        "sync": _numbers(SYNC),
        "trainers": Annotated[list[_numbers(TRAINER, val_loss=loss)], Field(min_length=1)],  # type: ignore[misc]
        "workers": Annotated[list[_numbers(WORKER)], Field(min_length=1)],  # type: ignore[misc]
        "memory": dict[str, _numbers(PHASE)],  # type: ignore[misc]
        "merges": list[_MergeLine],
        "changes": list[_ChangeLine],
    }
    more: dict[str, Any] = {name: (kind, ...) for name, kind in sections.items()}
    # Runs from before islands had texts of their own have none.
    island = _numbers({}, island=(Text, ...), val_loss=loss)
    more["islands"] = (list[island], [])  # type: ignore[valid-type]
    trained = dict.fromkeys(("samples", "inner_steps"), (Positive, ...))
    return _numbers(ROUND, val_loss=loss, **trained, **more)


def _numbers(table: Mapping[str, Metric], **others: Any) -> type:
    """The type of what has the numbers of a table, and others."""
    # A run may have been trained without an option that is there now.
    optional = option_metrics()
    kinds: dict[str, Any] = {}
    for name, metric in table.items():
        kind: Any = Count if metric.whole else Number
        kinds[name] = (kind if metric.always else kind | None, None if name in optional else ...)
    return create_model("Numbers", __base__=_Numbers, **(kinds | others))


def fault(line: Any, kind: type) -> str:
    """The place of the first fault in a line that should be of a type; empty if there is none."""
    try:
        adapter(kind).validate_python(line)
    except ValidationError as error:
        place = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return ".".join(map(str, place["loc"])) or "no object"
    return ""
