"""Numbers in words, and in the unit that makes them easy to read: 39.4 h, 100 Mbit/s, 3B."""

import math
from collections.abc import Mapping, Sequence

TIMES = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "y": 365.25 * 86400.0}
BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}
RATES = {"kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9, "Tbit/s": 1e12}
COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def unit_for(value: float, units: Mapping[str, float]) -> str:
    """The largest unit that the value has at least one of, or the smallest one."""
    smallest = next(iter(units))
    return next((name for name in reversed([*units]) if value >= units[name]), smallest)


def readable(value: float, units: Mapping[str, float]) -> str:
    """The value with three digits and its unit; `-` if it is not finite."""
    if not math.isfinite(value):
        return "-"
    unit = unit_for(value, units)
    number = value / units[unit]
    text = f"{number:.3g}" if number < 999.5 else f"{number:,.0f}" if number < 1e6 else "over 1e6"
    return f"{text}{'' if units is COUNTS else ' '}{unit}"


def counted(number: int, what: str) -> str:
    """A number of things: 1 round, 2 rounds."""
    return f"{number:,} {what}{'s' if number != 1 else ''}"


def span(numbers: Sequence[int]) -> str:
    """From the lowest to the highest number, or the only one."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
