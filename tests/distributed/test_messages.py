"""States sent between ranks: they arrive bit for bit, and no rank unpickles what another sent."""

import ast
import json
import math
import re
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import adloco
from adloco.distributed.dtensor import gather_shards
from adloco.distributed.messages import broadcast_state, receive_state, send_state
from adloco.distributed.plain_state import join_state, split_state
from adloco.distributed.testing import run_on_ranks

FLOATS = [0.1 + 0.2, 5e-324, -0.0, 1.7976931348623157e308, math.pi / 3, math.inf, -math.inf]

OF_OBJECTS = re.compile(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?")
"""torch's collectives that pickle."""


def state_of(rank: int) -> dict[str, Any]:
    torch.manual_seed(rank)
    return {
        "numbers": FLOATS,
        "none": [None, True, 2**70, "\u00e9\ud800\x1b"],
        "keys": {0: (1, [2]), "1": ()},
        "tensors": [
            torch.randn(3, 4).t(),
            torch.tensor(7.0, dtype=torch.float64),
            torch.randn(5, dtype=torch.bfloat16),
            torch.empty(0, 3),
            torch.tensor([True, False]),
            torch.tensor([[2**60], [-1]]),
        ],
    }


def same(left: Any, right: Any) -> bool:
    """Equal in kind, value and sign of zero, tensors too."""
    (plain, tensors), (others, other_tensors) = split_state(left), split_state(right)
    return (
        json.dumps(plain) == json.dumps(others)
        and tensors.keys() == other_tensors.keys()
        and all(
            tensor.dtype == other_tensors[path].dtype and torch.equal(tensor, other_tensors[path])
            for path, tensor in tensors.items()
        )
    )


def exchanged() -> list[bool]:
    rank = dist.get_rank()
    found = [
        same(broadcast_state(state_of(rank)), state_of(0)),
        same(broadcast_state(state_of(rank), 1), state_of(1)),
    ]
    if rank == 1:
        send_state(state_of(1), 0)
    else:
        found.append(same(receive_state(1), state_of(1)))
    return found


def test_states_arrive_bit_for_bit() -> None:
    assert run_on_ranks(exchanged, 2) == [[True, True, True], [True, True]]


def test_a_split_state_is_joined_again() -> None:
    plain, tensors = split_state({"a": [torch.ones(2)], "b": (math.nan, {3: "x"})})
    assert plain["items"][0] == ["a", {"list": [{"tensor": "a.0"}]}]
    assert list(tensors) == ["a.0"]
    state = join_state(json.loads(json.dumps(plain)), tensors)
    assert state["a"][0] is tensors["a.0"]
    assert math.isnan(state["b"][0])
    assert state["b"][1] == {3: "x"}


def test_a_state_of_an_optimizer_of_ones_own_keeps_its_names_and_kinds() -> None:
    ones, zeros, shape = torch.ones(2), torch.zeros(3), torch.Size([2, 3])
    before = {"a.b": ones, "a": {"b": zeros}, "m": {1: ones, "1": zeros}, "shape": shape}
    plain, tensors = split_state(before)
    after = join_state(json.loads(json.dumps(plain)), tensors)
    assert after["a.b"] is after["m"][1] is ones
    assert after["a"]["b"] is after["m"]["1"] is zeros
    assert after["shape"] == shape


def test_a_named_tuple_is_gathered_as_a_tuple() -> None:
    pair = namedtuple("pair", "a b")
    gathered = gather_shards({"state": [pair(1, torch.ones(2)), torch.Size([2, 3])]})
    assert gathered["state"][0][1].equal(torch.ones(2))
    assert gathered["state"][1] == torch.Size([2, 3])


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"a": {"b": {1}}}, "a.b is of the type set, which a checkpoint cannot hold"),
        ({"a": torch.float32}, "a is of the type dtype, which"),
        ({"a": {(0, 1): 2}}, "a key in a is of the type tuple, which"),
        ({torch.ones(1): 2}, "a key in a state is of the type Tensor, which"),
    ],
)
def test_what_could_not_be_read_back_is_refused(state: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        split_state(state)


def test_no_pickle_between_ranks() -> None:
    """torch's collectives on objects unpickle what they receive; `testing` reads its own pipes."""
    source = Path(adloco.__file__).parent
    for path in source.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else ""
            assert not OF_OBJECTS.fullmatch(name), f"{path}: {name}"
            if isinstance(node, (ast.Import, ast.ImportFrom)) and path.name != "testing.py":
                names = [alias.name for alias in node.names]
                module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                pickling = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
                assert not pickling & {module, *names}, f"{path} imports {names}"
