"""The choice of no wire format: values are sent uncompressed."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class PlainWire:
    """Uncompressed float32, also for models in half precision (float64 for those in float64)."""

    key: ClassVar[str] = "fp32"
