"""torch for modules that hold settings, which commands such as `adloco config` import without it.

Importing torch takes seconds. Such a module writes `from adloco.late import torch` instead of
`import torch`, and torch is imported when a function first uses it. Its type hints are strings
(`from __future__ import annotations`), so that they do not use it.
"""

import importlib
from typing import TYPE_CHECKING, Any


class Late:
    """A module that is imported when one of its attributes is first read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


if TYPE_CHECKING:
    import torch as torch
else:
    torch = Late("torch")
