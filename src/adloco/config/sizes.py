"""Numbers as people write them: 600k, 1.5M, 1e6; and sizes of memory in GiB: 512MiB, 2GB."""

import re
from decimal import Decimal

COUNTS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
"""Factors by suffix. m is none: it is milli to some and million to others."""
BYTES = {
    "B": 1,
    **{f"{letter}B": 10**power for letter, power in zip("kMGT", (3, 6, 9, 12), strict=True)},
    **{f"{letter}iB": 2**power for letter, power in zip("KMGT", (10, 20, 30, 40), strict=True)},
}
"""Bytes by unit."""


def read_number(text: str) -> int | float | None:
    """The number that a text such as 600k or 1e6 stands for; None if it is none.

    A whole number is an int.
    """
    return _read(text, COUNTS)


def read_gib(text: str) -> int | float | None:
    """The GiB that a text such as 512MiB or 2GB stands for; None if it is none."""
    size = _read(text, BYTES)
    return None if size is None else size / 2**30


def _read(text: str, units: dict[str, int]) -> int | float | None:
    found = re.fullmatch(r"\s*([\d_]{0,30}\d(?:\.\d+)?(?:e\d{1,2})?)\s?([A-Za-z]*)\s*", text)
    if not found or found[2] not in units:
        return None
    number = Decimal(found[1]) * units[found[2]]
    return int(number) if number == number.to_integral_value() else float(number)
