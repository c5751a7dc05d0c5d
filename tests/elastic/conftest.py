"""A store without a launcher, and an address at which launchers can meet."""

import socket
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from adloco.distributed.launch.rank_store import of_this_start


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The store of a launcher that has started four ranks."""
    kept = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(kept.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("WORLD_SIZE", "4")
    return of_this_start(kept)


@pytest.fixture
def address() -> tuple[str, int]:
    """An address of this machine with a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        host, port = taken.getsockname()
    return host, port
