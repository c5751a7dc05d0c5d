"""The description of a cluster: islands, their speed, the link between them, and how often they
fail. `adloco probe --throughput` writes one with what it measured.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from adloco.config.values import construct
from adloco.errors import require, require_range
from adloco.plan.link import BANDWIDTH, LATENCY, Link, Pattern, quantity

SECONDS_PER_DAY = 86400.0
BUSY = 0.2
"""Jitter above which something else has probably held up the steps that were measured."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Islands joined by slow links. Each serves one worker, or a part of the one of data-parallel
    training.
    """

    islands: int
    """Number of islands."""
    bandwidth: str
    """Bandwidth of the link between islands, each way, for instance 100mbit."""
    samples_per_second: Mapping[int, float]
    """Samples of a pass (the micro-batches of all ranks of an island) -> samples per second of one
    island that trains in such passes.
    """
    ranks: int = 0
    """Ranks of an island that trained a pass together, one on each of its GPUs; 0: not known."""
    latency: str = "0s"
    """One way, for instance 20ms."""
    pattern: Pattern = "ring"
    """Who sends to whom in a sync: in a ring, or all to all at once."""
    sync_seconds: float = 0.0
    """Seconds of a sync besides its transfer: encoding, adding up, the outer step. A step of
    data-parallel training has a sync, and in streaming each fragment has one."""
    update_seconds: float = 0.0
    """Seconds of an inner step besides its passes: of the optimizer above all. They are part of
    `samples_per_second`, which was measured with one pass in a step."""
    jitter: float = 0.0
    """Standard deviation of a step's seconds over their mean."""
    speeds: tuple[float, ...] = ()
    """Relative speed of each island; empty if all are alike."""
    failures_per_day: float = 0.0
    """Mean number of failures of one island in a day."""
    restart_seconds: float = 60.0
    """From a failure until training continues."""
    price_per_hour: float = 0.0
    """Price of one island in an hour."""
    memory_gib: float = 0.0
    """Memory of one island, over all its ranks, in GiB; 0: not known."""

    def __post_init__(self) -> None:
        require_range(self, "islands", at_least=1)
        require(
            bool(quantity(self.bandwidth, BANDWIDTH)),
            "bandwidth must be in kbit, mbit or gbit per second, for instance 100mbit, got "
            f"{self.bandwidth!r}",
        )
        require(
            quantity(self.latency, LATENCY) is not None,
            f"latency must be in us, ms or s, for instance 20ms, got {self.latency!r}",
        )
        require(
            bool(self.samples_per_second)
            and all(
                size >= 1 and 0 < rate < math.inf for size, rate in self.samples_per_second.items()
            ),
            "samples_per_second must have at least one line SAMPLES = RATE with both > 0, got "
            f"{dict(self.samples_per_second)}",
        )
        require_range(
            self,
            *("sync_seconds", "update_seconds", "jitter", "failures_per_day"),
            *("restart_seconds", "price_per_hour", "memory_gib", "ranks"),
            at_least=0,
            below=math.inf,
        )
        shortest = min(size / rate for size, rate in self.samples_per_second.items())
        require(
            self.update_seconds < shortest,
            f"update_seconds must be < {shortest:.3g}, the seconds of the shortest pass of "
            f"samples_per_second, got {self.update_seconds}",
        )
        require(
            len(self.speeds) in (0, self.islands)
            and all(0 < speed < math.inf for speed in self.speeds),
            f"speeds must have one finite number > 0 for each of the {self.islands} islands, got "
            f"{list(self.speeds)}",
        )

    @property
    def was_busy(self) -> str:
        """A sentence if something else seems to have computed while it was measured."""
        if self.jitter <= BUSY:
            return ""
        return (
            f"Steps were measured with a jitter of {self.jitter:.2g}, as on a busy machine: "
            "speeds, waiting and so the choice are not to be trusted; measure again on an idle one."
        )

    @property
    def link(self) -> Link:
        """The link between islands."""
        return Link.parse(f"{self.bandwidth},{self.latency}")

    @property
    def failures_per_second(self) -> float:
        """Mean number of failures of any island in a second."""
        return self.islands * self.failures_per_day / SECONDS_PER_DAY

    @property
    def all_speeds(self) -> tuple[float, ...]:
        """Relative speed of each island."""
        return self.speeds or (1.0,) * self.islands

    @property
    def fastest_pass(self) -> int:
        """The smallest pass with the most samples per second, in samples."""
        return max(sorted(self.samples_per_second), key=lambda size: self.samples_per_second[size])

    def pass_seconds(self, samples: float) -> float:
        """Mean seconds of a pass with an update, of an island of speed 1, by linear interpolation
        of what is known.

        Smaller passes than known ones take as long as the smallest, larger ones in proportion to
        their samples.
        """
        known = sorted(self.samples_per_second)
        seconds = [size / self.samples_per_second[size] for size in known]
        return float(np.interp(samples, known, seconds)) * max(1.0, samples / known[-1])

    def passes(self, worker_batch: float, largest_pass: int) -> int:
        """Passes of an inner step; the arguments are those of `step_seconds`."""
        return max(1, math.ceil(worker_batch / largest_pass))

    def step_seconds(self, batches: Sequence[float], largest_pass: int) -> tuple[float, ...]:
        """Mean seconds of an inner step of each island.

        Args:
            batches: Samples of each island's worker in a step; balanced passes are accumulated,
                with one update.
            largest_pass: Most samples of a pass.
        """
        passes = [self.passes(samples, largest_pass) for samples in batches]
        return tuple(
            (count * self.pass_seconds(samples / count) - (count - 1) * self.update_seconds) / speed
            for count, samples, speed in zip(passes, batches, self.all_speeds, strict=True)
        )


def read_cluster(path: Path) -> Cluster:
    """Read a cluster's description from a TOML file; ValueError if it is not one."""
    require(
        path.is_file(),
        f"there is no file {str(path)!r}; `adloco probe RECIPE --throughput {path}` writes one",
    )
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a TOML file: {error}") from error
    known = [field.name for field in fields(Cluster)]
    unknown = sorted({*values}.difference(known))
    require(
        not unknown, f"{path}: there is no entry {', '.join(unknown)}; known: {', '.join(known)}"
    )
    try:
        found: Cluster = construct(Cluster, values)
        return found
    except ValueError as error:
        inside = {*values.get("samples_per_second", ())}.intersection(known)
        hint = "; entries stand above the table [samples_per_second]" if inside else ""
        raise ValueError(f"{path}: {error}{hint}") from error
