"""Registers: the classes among which a setting such as `batch.rule` chooses.

A register finds the classes of a package or module, and those of lab/, that declare a `key`, so a
new choice takes only a new file in the folder. A class of the user's own is named by a dotted path,
as in `batch.rule = "mypackage.rules:MyRule"`.
"""

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from adloco.discovery import classes_with_key
from adloco.dotted_path import load_object
from adloco.errors import require


@dataclass(frozen=True, kw_only=True)
class Register:
    """The classes among which a setting chooses."""

    package: str
    """Dotted name of the package or module in which the classes are."""
    protocol: type
    """Protocol that a class of the user's own must implement."""

    @property
    def classes(self) -> Mapping[str, type]:
        """The package's classes by their keys, in alphabetical order."""
        return classes_with_key(self.package)

    def find(self, name: str) -> type:
        """The class with this key or dotted path.

        Raises:
            ValueError: There is no such class, or the setting cannot take it. The message is the
                rest of a sentence that the caller begins with the name of the setting.
        """
        if ":" in name:
            return self._checked(name, load_object(name))
        allowed = list(self.classes)
        nearest = difflib.get_close_matches(name, allowed, n=1)
        suggestion = f" (did you mean {nearest[0]!r}?)" if nearest else ""
        require(
            name in self.classes,
            f"must be one of {', '.join(allowed)}, or a class of your own as package.module:Name, "
            f"got {name!r}{suggestion}",
        )
        return self.classes[name]

    def name_of(self, owner: type) -> str:
        """The key or dotted path by which `find` finds this class."""
        keys = (key for key, kind in self.classes.items() if kind is owner)
        return next(keys, f"{owner.__module__}:{owner.__qualname__}")

    def missing(self, kind: type) -> list[str]:
        """Members of the protocol that a class lacks."""
        return sorted(_members(self.protocol) - set(dir(kind)) - get_type_hints(kind).keys())

    def _checked(self, path: str, found: Any) -> type:
        # vars, not getattr: the fields of a subclass without the decorator would be ignored.
        parameters = vars(found).get("__dataclass_params__") if isinstance(found, type) else None
        require(
            parameters is not None and parameters.frozen,
            f"{path!r} must be a frozen dataclass, got {found!r}; write @dataclass(frozen=True, "
            "kw_only=True) above it",
        )
        try:
            missing = self.missing(found)
        except Exception as error:  # For instance an undefined name in an annotation.
            raise ValueError(
                f"{path!r} has type hints that cannot be read ({error}); correct them"
            ) from error
        require(
            not missing,
            f"{path!r} lacks {', '.join(missing)}, which {self.protocol.__name__} asks for; see "
            f"{self.protocol.__module__}",
        )
        return found  # type: ignore[no-any-return]


def summary(owner: type) -> str:
    """The first paragraph of a class's docstring on one line."""
    return " ".join((inspect.getdoc(owner) or "").partition("\n\n")[0].split())


def _members(protocol: type) -> set[str]:
    """Names of a protocol's members, as `typing.get_protocol_members` of Python 3.13 has them."""
    names = {*vars(protocol), *vars(protocol).get("__annotations__", {})}
    return {name for name in names if not name.startswith("_") or name == "__call__"}
