"""adloco: train language models with little communication.

The public names are those of `adloco.public`; everything else may change. `AdLoCo` is the run,
`DiLoCo` the outer step for a loop of your own, the rest are what they are made with.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adloco.public import *  # noqa: F403

    __version__: str


def __getattr__(name: str) -> Any:
    """Import the public names, and torch with them, when one is first asked for: the command line
    answers `adloco --help` without them.
    """
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("adloco")
    public = importlib.import_module("adloco.public")
    if name != "__all__" and name not in public.__all__:
        raise AttributeError(f"module 'adloco' has no attribute {name!r}")
    return getattr(public, name)


def __dir__() -> list[str]:
    return [*globals(), "__version__", *importlib.import_module("adloco.public").__all__]
