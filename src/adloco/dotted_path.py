"""Loads objects of the user's own code by a dotted path such as `mypackage.rules:MyRule`."""

import importlib
import sys
from pathlib import Path
from typing import Any

from adloco.errors import require


def load_object(path: str) -> Any:
    """Import the object that a dotted path names, from a package or a file in the working folder.

    A run's folder is not searched: it may be somebody else's, and be read by any command.

    path: `module:name`, for instance `mypackage.rules:MyRule`.

    Raises:
        ValueError: The path has another form, or the module or the name cannot be found.
    """
    module, colon, name = path.partition(":")
    words = [*module.split("."), name]
    require(
        bool(colon) and all(word.isidentifier() for word in words),
        f"{path!r} is not a dotted path; write it as package.module:Name",
    )
    # A program that pip installs, as `adloco` is, does not look there by itself. Last, so that no
    # file there hides an installed package.
    here = str(Path.cwd())
    # The file with which each run's folder begins.
    searched = not Path(here, "environment.json").exists()
    if searched and not sys.flags.safe_path and not {here, ""}.intersection(sys.path):
        sys.path.append(here)
    try:
        found = importlib.import_module(module)
    except Exception as error:  # The user's module may raise anything.
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(
            f"{path!r} cannot be imported ({reason}); install its package, start in its folder, or "
            "put that on PYTHONPATH"
        ) from error
    require(
        hasattr(found, name),
        f"{path!r} cannot be found: module {module} has no {name}; check the spelling",
    )
    return getattr(found, name)
