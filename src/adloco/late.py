"""torch for modules that hold settings, which commands such as `adloco config` import without it.

Importing torch takes seconds. Such a module writes `from adloco.late import torch` instead of
`import torch`, and torch is imported when a function first uses it. Its type hints are strings
(`from __future__ import annotations`), so that they do not use it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        def __getattr__(self, attribute: str) -> Any:
            return getattr(importlib.import_module("torch"), attribute)

    torch = _Torch()
