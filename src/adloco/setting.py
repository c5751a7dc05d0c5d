"""Reads a setting's facts and meaning from its field: metadata, and the docstring below it, which
arguments of commands have too.
"""

import ast
import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, is_dataclass
from itertools import pairwise
from typing import Any, Literal

Resume = Literal["never", "free", "recorded", "grows"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a setting that commands need."""

    resume: Resume = "never"
    """Permission to change the setting on resume. free: yes, no number of the run depends on it;
    recorded: yes, and the change is kept in changes.jsonl; grows: likewise, but nothing that it
    names can be taken back.
    """
    of_rank: bool = False
    """True if it may differ between the ranks of one run. The kind of device, and the text behind
    paths, are compared instead.
    """
    traceless: bool = False
    """True if it changes no number of a run, and none that is recorded of it."""
    equal: str | None = None
    """Things that this setting decides and a comparison's runs must share, in words; empty:
    nothing; None: what its section says.
    """
    aliases: tuple[str, ...] = ()
    """Names of the setting in papers and other programs, in small letters."""
    code: bool = False
    """True if it may name code of the user's own, as package.module:Name."""


def setting(
    default: Any = MISSING,
    *,
    factory: Any = MISSING,
    resume: Resume = "never",
    of_rank: bool = False,
    traceless: bool = False,
    equal: str | None = None,
    aliases: tuple[str, ...] = (),
    code: bool = False,
) -> Any:
    """A field of a dataclass of settings, with its facts; see `Facts`.

    factory: Makes the default value, in the place of `default`.
    """
    facts = Facts(
        resume=resume, of_rank=of_rank, traceless=traceless, equal=equal, aliases=aliases, code=code
    )
    metadata: Mapping[str, Facts] = {"facts": facts}
    if factory is not MISSING:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


def facts_of(owner: Field[Any]) -> Facts:
    """The facts of a field; those of a plain setting if it states none."""
    found: Facts = owner.metadata.get("facts", Facts())
    return found


@functools.cache
def field_meanings(owner: type) -> dict[str, str]:
    """Docstrings under the fields of a dataclass, by field name, inherited fields included."""
    meanings: dict[str, str] = {}
    for kind in filter(is_dataclass, reversed(owner.__mro__)):
        body = _class_bodies(kind.__module__).get(kind.__qualname__, ())
        for statement, following in pairwise(body):
            match statement, following:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    meanings[name] = " ".join(text.split())
    return meanings


@functools.cache
def _class_bodies(module: str) -> dict[str, Sequence[ast.stmt]]:
    """The statements of each class of a module, by name; none if its source cannot be read."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):
        return {}
    return {
        each.name: each.body for each in ast.parse(source).body if isinstance(each, ast.ClassDef)
    }
