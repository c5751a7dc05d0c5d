"""No wire format: values cross as they are."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class PlainWire:
    """Differences cross in the parameters' own type, fp32 unless model.dtype says otherwise."""

    key: ClassVar[str] = "fp32"
