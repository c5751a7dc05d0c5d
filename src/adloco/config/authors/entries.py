"""The keys of a YAML file, with the lines they are on."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from adloco.errors import require

NESTED = "model_config"
"""The key that holds keys and values of its own."""
LONGEST_VALUE = 60


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A key of the file, and its value."""

    line: int
    """Line of the file, from 1; 0 for a key that the file leaves out."""
    key: str
    """One inside `model_config` is model_config.name."""
    value: Any
    text: str
    """The value as it is shown."""


def read_entries(path: Path) -> list[Entry]:
    """Read the keys of a YAML file, in their order.

    Raises:
        ValueError: The file does not exist, is not valid YAML, or does not consist of keys.
    """
    require(path.is_file(), f"there is no file {str(path)!r}; name a configuration in YAML")
    try:
        loader = yaml.SafeLoader(path.read_bytes())
        return list(_entries(path, loader, loader.get_single_node(), ""))
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or " ".join(str(error).split())
        raise ValueError(f"{path} is not valid YAML{where} ({problem}); correct it") from error


def _entries(path: Path, loader: Any, node: Any, inside: str) -> Iterator[Entry]:
    what = inside.rstrip(".") or "the file"
    require(
        isinstance(node, yaml.MappingNode),
        f"{path} must be a configuration of keys and values, as `ETA: 0.8`, but {what} holds none",
    )
    loader.flatten_mapping(node)
    for key, value in node.value:
        name = inside + _printable(key)
        if name == NESTED:
            yield from _entries(path, loader, value, f"{NESTED}.")
        else:
            yield Entry(
                line=key.start_mark.line + 1,
                key=name,
                value=loader.construct_object(value, deep=True),
                text=_printable(value),
            )


def _printable(node: Any) -> str:
    """A value on one line, as a comment of TOML may hold it."""
    text = node.value if isinstance(node, yaml.ScalarNode) else "..."
    line = textwrap.shorten(text, LONGEST_VALUE)
    return line if line.isprintable() else repr(line)
