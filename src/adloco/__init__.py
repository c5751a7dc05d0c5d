"""adloco: train language models with little communication.

The public names are those of `adloco.public` and `adloco.api`; everything else may change. `train`
trains a recipe and `load` reads its run back; `AdLoCo` is a run without a folder, `DiLoCo` the
outer step for a loop of your own, the rest are what they are made with.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adloco.api import *  # noqa: F403
    from adloco.public import *  # noqa: F403

    __all__: list[str]
    __version__: str

PUBLIC = ("adloco.public", "adloco.api")
"""The modules with the public names; the second also imports what draws and reads settings."""

if not TYPE_CHECKING:  # Type checkers would take every name for one of the package's.

    def __getattr__(name: str) -> Any:
        """Import the public names, and torch with them, when one is first asked for: the command
        line answers `adloco --help` without them.
        """
        if name == "__version__":
            return importlib.import_module("importlib.metadata").version("adloco")
        for path in PUBLIC:
            module = importlib.import_module(path)
            if name in _names(module):
                return getattr(module, name)
        if name == "__all__":
            return [each for path in PUBLIC for each in _names(importlib.import_module(path))]
        raise AttributeError(f"module 'adloco' has no attribute {name!r}")

    def _names(module: ModuleType) -> list[str]:
        """The names of one of `PUBLIC`; its package holds its own modules too."""
        return [
            name
            for name, found in vars(module).items()
            if not name.startswith("_") and not isinstance(found, ModuleType)
        ]

    def __dir__() -> list[str]:
        return [*globals(), "__version__", *__getattr__("__all__")]
