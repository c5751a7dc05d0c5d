"""The choice of workers that a sync leaves out, because their pseudo-gradients are far from the
others'.

A worker whose memory, data or link has gone wrong can send a pseudo-gradient that is 100 times too
long or points the other way, and one of eight is enough to spoil the mean. Its norm is compared
with the median of all workers, which one worker cannot move, and its direction with the mean
direction of the others, in which each counts the same, however long its vector is.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, ClassVar

from adloco.algorithms.stage import Option
from adloco.errors import require_range
from adloco.metric import COUNT, Metric, Unit
from adloco.report.readable import counted
from adloco.rules.failure_signs import Sign
from adloco.setting import setting

SMALLEST = 3
"""Workers without whom nobody can tell which one is wrong."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A worker's pseudo-gradient compared with the others' at a sync."""

    relative_norm: float | None = None
    """The worker's norm over the median of all norms; None if the median is 0."""
    cosine: float | None = None
    """Cosine with the mean direction of the others; None if one of the two is 0, or for a worker
    whose norm is far from the others'."""
    left_out: bool = False
    """True if its weight in the sync is 0."""


@dataclass(frozen=True, kw_only=True)
class Gate(Option):
    """Leaves workers out of a sync whose pseudo-gradients are far from the others'."""

    key: ClassVar[str] = "gate"
    section: ClassVar[str] = "outer"
    stage: ClassVar[str] = "adloco.lab.gate.stage:GateStage"
    worker_metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("syncs_left_out", "left out of syncs", COUNT, aggregation="sum", always=True),
        Metric("relative_norm", "norm relative to the median", Unit("", ".3g")),
        Metric("cosine_with_others", "cosine with the other workers", Unit("", ".2f")),
    )

    gate: bool = setting(False, resume="recorded")
    """Compare the pseudo-gradients of a trainer's workers before each sync, if it has at least
    three, and leave out of the sync those that are far from the others. If that were half of them
    or more, none is left out.
    """
    gate_factor: float = setting(10.0, resume="recorded")
    """With gate: a norm that is more than this many times the median of the workers' norms, or less
    than the median divided by it, is far.
    """
    gate_cosine: float = setting(-0.2, resume="recorded")
    """With gate: a lower cosine with the mean direction of the other workers is far. It is measured
    with a standard error of 0.06; healthy workers have positive ones.
    """

    def __post_init__(self) -> None:
        require_range(self, "gate_factor", above=1)
        require_range(self, "gate_cosine", at_least=-1, below=0)

    @property
    def active(self) -> bool:
        return self.gate

    def unused(self, largest: int) -> str:
        if self.gate and largest < SMALLEST:
            return "outer.gate changes nothing: no trainer ever has three workers to compare"
        if not self.gate and self != Gate():
            return "outer.gate_factor and outer.gate_cosine change nothing without outer.gate"
        return ""

    @staticmethod
    def events(record: Mapping[str, Any]) -> Iterator[str]:
        for row in record["workers"]:
            if row.get("syncs_left_out"):
                norm, cosine = (
                    METRICS[name].text(row[name])
                    for name in ("relative_norm", "cosine_with_others")
                )
                yield (
                    f"worker {row['worker']} of trainer {row['trainer']} was left out of "
                    f"{counted(row['syncs_left_out'], 'sync')}, because its pseudo-gradient was "
                    f"far from the others': norm {norm} times the median, cosine {cosine}"
                )

    @staticmethod
    def signs(record: Mapping[str, Any]) -> Iterator[Sign]:
        for row in record.get("workers", ()):
            if row.get("syncs_left_out"):
                cosine = row["cosine_with_others"]
                against = "" if cosine is None else f", its cosine with the others {cosine:.2f}"
                yield Sign(
                    kind=f"worker {row['worker']} left out",
                    trainer=row["trainer"],
                    since=record["round"],
                    # Those of its island alone, if islands have texts of their own.
                    seen=f"the norm of its pseudo-gradient is {row['relative_norm']:.3g} times the "
                    f"median of the workers that it is compared with{against}",
                    meaning="Its memory, its data or its link may be broken, or its optimizer "
                    "state spoilt",
                    advice="Look at its losses in steps.jsonl and at its machine; if it is sound, "
                    "raise outer.gate_factor or lower outer.gate_cosine",
                )

    def judge(self, vectors: Mapping[int, Sequence[float]]) -> dict[int, Verdict]:
        """A verdict on each worker of a trainer.

        vectors: The workers' pseudo-gradients, or sketches of them, by worker id.
        """
        if len(vectors) < SMALLEST:
            return dict.fromkeys(vectors, Verdict())
        norms = {worker: math.hypot(*vector) for worker, vector in vectors.items()}
        middle = median(norms.values())
        if middle == 0:
            return dict.fromkeys(vectors, Verdict())
        ratios = {worker: norm / middle for worker, norm in norms.items()}
        usual = {
            worker: vectors[worker]
            for worker, ratio in ratios.items()
            if 1 / self.gate_factor <= ratio <= self.gate_factor
        }
        cosines = cosines_with_others(usual)
        verdicts = {
            worker: Verdict(
                relative_norm=ratio,
                cosine=cosines.get(worker),
                left_out=worker not in usual
                or (len(usual) >= SMALLEST and (cosines[worker] or 0.0) < self.gate_cosine),
            )
            for worker, ratio in ratios.items()
        }
        if 2 * sum(verdict.left_out for verdict in verdicts.values()) < len(verdicts):
            return verdicts
        return {worker: replace(verdict, left_out=False) for worker, verdict in verdicts.items()}


METRICS = {metric.name: metric for metric in Gate.worker_metrics}


def cosines_with_others(vectors: Mapping[int, Sequence[float]]) -> dict[int, float | None]:
    """The cosine of each vector with the mean direction (of unit vectors) of the others, by id;
    None if the vector or the mean of the others is 0.
    """
    units = {
        key: [value / norm for value in vector] if (norm := math.hypot(*vector)) else list(vector)
        for key, vector in vectors.items()
    }
    total = [sum(column) for column in zip(*units.values(), strict=True)]
    found: dict[int, float | None] = {}
    for key, unit in units.items():
        others = [whole - own for whole, own in zip(total, unit, strict=True)]
        norm = math.hypot(*others)
        known = norm > 1e-9 and any(unit)
        product = sum(own * other for own, other in zip(unit, others, strict=True))
        found[key] = product / norm if known else None
    return found
