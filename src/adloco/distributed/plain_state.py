"""Splits a state into plain values, which JSON can hold, and its tensors; no pickle.

A state is any nesting of dictionaries, lists and tuples with tensors and plain values in it. Each
tensor is known by its path in the nesting (`trainers.0.outer.params`, for instance), and the plain
values have that path in its place. Python writes floats into JSON with all their digits, and nan
and infinity as such, so numbers come back bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adloco.errors import require
from adloco.late import torch


def split_state(state: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """The state as plain values with paths in place of its tensors, and the tensors by path.

    Raises:
        ValueError: Something else is in it.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _split(state, "", tensors), tensors


def join_state(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The state that `split_state` split."""
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "items":
        return {key: join_state(item, tensors) for key, item in content}
    items = [join_state(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items


def state_bytes(state: Any) -> int:
    """Bytes of the tensors of a state."""
    return sum(each.numel() * each.element_size() for each in split_state(state)[1].values())


def _split(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        while path in tensors:  # The keys 1 and "1", or "a.b" beside a "b" in "a", have one path.
            path += "'"
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, Mapping):
        return {
            "items": [
                [
                    _plain(key, f"a key in {path or 'a state'}"),
                    _split(item, f"{path}.{key}" if path else str(key), tensors),
                ]
                for key, item in value.items()
            ]
        }
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"  # A torch.Size is a tuple, too.
        return {
            kind: [_split(item, f"{path}.{index}", tensors) for index, item in enumerate(value)]
        }
    return _plain(value, path)


def _plain(value: Any, path: str) -> Any:
    """The value, which is neither a collection nor a tensor."""
    require(
        value is None or isinstance(value, (bool, int, float, str)),
        f"{path} is of the type {type(value).__name__}, which a checkpoint cannot hold; let states "
        "of optimizers be tensors, numbers, texts, and lists, tuples and dictionaries of these",
    )
    return value
