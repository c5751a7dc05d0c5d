"""A link between islands, and the time of an exchange among workers over it.

W workers exchange as in a ring: a sync in which B bytes leave each of them takes B / bandwidth, and
2 (W - 1) latencies one after another. If every worker sends to all others at once instead, the
bytes are the same, and there are two latencies (one until each has its part of the sum, one until
all have the whole).
"""

import re
from dataclasses import dataclass
from typing import Literal

BANDWIDTH = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
LATENCY = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
Pattern = Literal["ring", "all-to-all"]


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between islands."""

    name: str
    """The link as the user wrote it, for instance 100mbit,20ms."""
    bytes_per_second: float
    latency_seconds: float
    """One way."""

    @staticmethod
    def parse(text: str) -> "Link":
        """A link from BANDWIDTH[,LATENCY], for instance 100mbit,20ms.

        Raises:
            ValueError: A unit is missing or unknown.
        """
        bandwidth, _, latency = text.partition(",")
        rate = quantity(bandwidth, BANDWIDTH)
        delay = quantity(latency, LATENCY) if latency else 0.0
        if not rate or delay is None:
            raise ValueError(
                "--link must be a bandwidth in kbit, mbit or gbit per second and a latency in us, "
                f"ms or s, for instance 100mbit,20ms; got {text!r}"
            )
        return Link(name=text, bytes_per_second=rate / 8, latency_seconds=delay)

    def seconds(
        self, sent: float, workers: int, times: float = 1.0, pattern: Pattern = "ring"
    ) -> float:
        """Time of exchanges.

        Args:
            sent: Bytes that leave each worker, in all of them.
            workers: Workers that exchange, at least two.
            times: Number of exchanges.
        """
        hops = 2 * (workers - 1) if pattern == "ring" else 2
        return sent / self.bytes_per_second + times * hops * self.latency_seconds


def bandwidth_text(bytes_per_second: float) -> str:
    """A bandwidth as `Link.parse` and a cluster's description take it, for instance 940mbit."""
    return _text(8 * bytes_per_second, BANDWIDTH)


def latency_text(seconds: float) -> str:
    """A latency in the same way, for instance 1.2ms."""
    return _text(seconds, LATENCY)


def quantity(text: str, units: dict[str, float]) -> float | None:
    """A number with one of these units; None if it has none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]+)(?:/s)?", text.replace(" ", "").lower())
    return float(found[1]) * units[found[2]] if found and found[2] in units else None


def _text(amount: float, units: dict[str, float]) -> str:
    """The amount with three digits, in the largest of rising units of which it is at least one."""
    smallest = next(iter(units))
    unit = next((name for name in reversed(units) if amount >= units[name]), smallest)
    return f"{float(f'{amount / units[unit]:.3g}'):.12g}{unit}"
