"""Finds the classes that a folder brings by declaring a `key`, so that a new one takes only a file.

A folder of lab/ extends the rest by modules of known names: `option.py` has its settings, and a
module named after a folder of the core (`batch_rules.py`) has more of what is in that one.
`command.py` has a command of the line, `records.py` checks its files before a run resumes, and
`page.py` shows them in the report. Without lab/, or without one of its folders, they are not there.
"""

import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping
from types import ModuleType

LAB = "adloco.lab"


@functools.cache
def classes_with_key(package: str) -> Mapping[str, type]:
    """The classes of a package or module that declare a `key`, and those that lab/ adds to it, by
    key in alphabetical order.

    package: Dotted name, for instance adloco.rules.batch_rules.
    """
    top = importlib.import_module(package)
    inside = pkgutil.iter_modules(top.__path__) if hasattr(top, "__path__") else ()
    own = [top, *(importlib.import_module(f"{package}.{module.name}") for module in inside)]
    return _keyed([*own, *lab_modules(package.rpartition(".")[2])])


@functools.cache
def lab_classes(name: str) -> Mapping[str, type]:
    """The classes with a `key` in the modules of this name in the folders of lab/, by key."""
    return _keyed(lab_modules(name))


def lab_modules(name: str) -> list[ModuleType]:
    """The modules of this name in the folders of lab/, in the alphabetical order of the folders."""
    if importlib.util.find_spec(LAB) is None:
        return []
    folders = pkgutil.iter_modules(importlib.import_module(LAB).__path__)
    paths = [f"{LAB}.{folder.name}.{name}" for folder in folders if folder.ispkg]
    return [importlib.import_module(path) for path in paths if importlib.util.find_spec(path)]


def _keyed(modules: list[ModuleType]) -> dict[str, type]:
    found: dict[str, type] = {}
    for module in modules:
        for kind in vars(module).values():
            # Skip imported classes, and classes that only inherit a key.
            if (
                isinstance(kind, type)
                and kind.__module__ == module.__name__
                and "key" in vars(kind)
            ):
                key = vars(kind)["key"]
                assert key not in found, f"{kind} and {found[key]} both have the key {key!r}"
                found[key] = kind
    return dict(sorted(found.items()))
