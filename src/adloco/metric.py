"""A number of a run: its name, what people call it, and its unit."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

Record = dict[str, Any]
"""One line of metrics.jsonl; docs/run-folder.md lists its fields."""
Per = Literal["round", "sync", "trainer", "worker", "island", "phase"]
"""Owner of a number in a line: the round, its syncs, a trainer, a worker, an island with a text of
its own, or a phase (of memory_use.PHASES).
"""
Aggregation = Literal["last", "mean", "mean by bytes", "sum", "max"]
"""Way of combining the numbers of all rounds into one number of the run.

last: the last round that has a number (mean over trainers).
mean: the mean of the rounds where it is not 0.
mean by bytes: the mean weighted by the bytes of each round's syncs.
"""


@dataclass(frozen=True)
class Unit:
    """A unit, and how numbers in it are shown."""

    name: str
    """The unit in metrics.jsonl."""
    form: str = ","
    """Format specification with which a number is shown."""
    _: KW_ONLY
    shown: str = ""
    """The unit that is shown after a number."""
    scale: float = 1
    """A number is divided by this before it is shown: 1e6 for bytes shown as MB."""

    @property
    def least(self) -> float:
        """Smaller numbers have three digits, and so have those from 1e8 on, because `form` would
        show few or none, or too many, of a loss or of bytes; 0: all are shown by `form`.
        """
        return 0.1 if self.shown == "MB" else 0.01 if self.form in (".3f", ".4f") else 0.0


@dataclass(frozen=True)
class Metric:
    """A number of a run: its name in metrics.jsonl, what people call it, and its unit."""

    name: str
    label: str
    unit: Unit
    _: KW_ONLY
    per: Per = "round"
    aggregation: Aggregation = "last"
    better: Literal["lower", "higher"] = "lower"
    """Direction in which a measure is better."""
    always: bool = False
    """True if no line has null for it."""
    panel: str = ""
    """Name of the panel of the report that shows it; empty for none."""
    short: str = ""
    """Name of a measure in a line about a round; empty for its label."""
    of_loss: Callable[[float], float] | None = None
    """A measure as a function of the loss, by which it is also known in training; None if it needs
    more than the loss."""

    def text(self, value: float | None) -> str:
        """The value with its unit; `-` for None."""
        if value is not None and self.unit.shown == "MB" and 0 < value / 1e6 < self.unit.least:
            return f"{value / 1e3:.3g} kB"
        space = "" if self.unit.shown == "%" else " "
        return "-" if value is None else f"{self.number(value)}{space}{self.unit.shown}".rstrip()

    def number(self, value: float) -> str:
        """The value without its unit."""
        shown = value / self.unit.scale if self.unit.scale != 1 else value
        least, size = self.unit.least, abs(shown)
        far = least > 0 and size > 0 and not least <= size < 1e8
        return format(shown, ".3g" if far else self.unit.form)

    @property
    def axis(self) -> str:
        """Label of an axis that shows the metric."""
        unit = self.unit.shown or self.unit.name
        return f"{self.label} ({unit})" if unit not in ("", self.label) else self.label

    @property
    def leading(self) -> bool:
        """True for a measure that is shown with every round: it has a panel or a short name."""
        return bool(self.panel or self.short)

    @property
    def whole(self) -> bool:
        """True if the number is a count."""
        return self.unit.form == ","


COUNT, RATIO = Unit(""), Unit("", ",.1f", shown="x")
TOKENS, SAMPLES, NATS = Unit("tokens"), Unit("samples"), Unit("nats", ".4f")
SECONDS = Unit("seconds", ",.1f", shown="s")
MEMORY = Unit("bytes", ",.0f", shown="MiB", scale=2**20)
TRAFFIC = Unit("bytes", ",.1f", shown="MB", scale=1e6)
