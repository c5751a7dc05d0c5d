"""Actions of a worker whose numbers are not finite (docs/method.md)."""

from typing import Literal

OnNonFinite = Literal["stop", "skip", "restore"]
"""stop: the run ends with `NonFiniteLossError`. skip: an inner step whose loss or gradient is not
finite leaves the parameters as they are. restore: the worker starts again from the parameters of
the last sync, with fresh optimizer state.
"""
