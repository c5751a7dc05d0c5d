"""The connections of a group can be cut, and nothing else is."""

import os
import socket
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist

from adloco.distributed.launch.rank_store import connect
from adloco.distributed.testing import run_on_ranks
from adloco.elastic.connections import cut_connections, open_sockets


def cut_and_use() -> tuple[str, bytes, float]:
    """The error of a group that is cut, what an unrelated connection still carries, and a sum in a
    group that was there before.
    """
    os.environ["MASTER_PORT"] = "29400"
    kept = open_sockets()
    group = dist.new_group([0, 1])
    dist.barrier()  # The other rank has all its connections too.
    with ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        near = opened.enter_context(socket.create_connection(server.getsockname()))
        far = opened.enter_context(server.accept()[0])
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        cut_connections(kept)
        with pytest.raises(RuntimeError) as error:
            dist.all_reduce(torch.ones(1), group=group)
        near.send(b"a")
        far.send(far.recv(1))
        carried = near.recv(1)
    total = torch.ones(1)
    dist.all_reduce(total)
    return str(error.value), carried, float(total)


def test_a_group_is_cut_and_other_connections_are_not() -> None:
    for error, carried, total in run_on_ranks(cut_and_use, 2):
        assert "onnection" in error
        assert (carried, total) == (b"a", 2.0)


def test_a_connection_by_which_a_group_waits_at_the_store_is_cut(store: Any) -> None:
    before = connect()
    kept = open_sockets()
    later = connect()
    cut_connections(kept)
    with pytest.raises(dist.DistError):
        later.get("never")
    before.set("key", "value")
    assert before.get("key") == b"value"


def test_a_connection_that_is_cut_can_still_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo waits for ever for what it cannot send, and ends if its listening socket is cut."""
    monkeypatch.setenv("MASTER_PORT", "29400")
    with ExitStack() as opened:
        server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        kept = open_sockets()
        near = opened.enter_context(socket.socket())
        near.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        near.set_inheritable(True)
        near.connect(server.getsockname())
        far = opened.enter_context(server.accept()[0])
        cut_connections(kept)
        assert near.recv(1) == b""
        near.send(b"b")
        assert far.recv(1) == b"b"
