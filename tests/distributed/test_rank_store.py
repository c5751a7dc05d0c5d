"""The store of ranks that torchrun starts again: what it sets in the environment decides what
works.
"""

import os
import socket
import time

import pytest
import torch
import torch.distributed as dist

from adloco.distributed.launch.launcher import process_group
from adloco.distributed.launch.rank_store import (
    check_restarts,
    check_store,
    local_store,
    meeting_point,
    of_this_start,
)
from adloco.distributed.testing import run_on_ranks
from adloco.errors import RankFailureError


@pytest.mark.parametrize(
    ("allowed", "machines", "shared", "works"),
    [
        ("0", "2", "True", True),
        ("3", "1", "True", True),
        ("3", "2", "True", False),
        ("3", "2", "False", True),
    ],
)
def test_restarts_over_machines_need_a_new_store_for_each_start(
    allowed: str, machines: str, shared: str, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", allowed)
    monkeypatch.setenv("GROUP_WORLD_SIZE", machines)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    if works:
        check_restarts()
        return
    with pytest.raises(ValueError, match="needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") as error:
        check_restarts()
    assert str(error.value).startswith("torchrun --max-restarts 3 over 2 machines needs ")


@pytest.mark.parametrize(("shared", "found"), [("True", False), ("False", True)])
def test_a_restart_does_not_read_what_ranks_before_it_wrote(
    shared: str, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that is not shared is new for each start, and machines count starts differently."""
    store = dist.HashStore()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    of_this_start(store).set("address", "old")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert of_this_start(store).check(["address"]) == found


def test_a_rank_whose_launcher_was_killed_before_they_met_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as launcher:
        port = launcher.getsockname()[1]
        for name, value in {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": "2",
            "RANK": "1",
        }.items():
            monkeypatch.setenv(name, value)
        check_store()
    with pytest.raises(RankFailureError, match="the process that started the ranks is gone"):
        process_group().__enter__()
    # Rank 0 keeps the store, and may not have started yet.
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    check_store()


def joined_again(port: int) -> list[float]:
    rank = dist.get_rank()
    dist.barrier()  # The other rank may still be connecting.
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    sums = []
    for group in range(6):
        if group and rank == group % 2:  # The other one must not take the address it had before.
            time.sleep(0.1)
        with process_group():
            one = torch.ones(1)
            dist.all_reduce(one)
        sums.append(one.item())
    dist.init_process_group("gloo")  # As it was.
    return sums


def test_ranks_may_join_again_after_they_have_left() -> None:
    store = local_store()
    assert run_on_ranks(joined_again, 2, store.port) == [[2.0] * 6] * 2


def test_people_read_where_the_run_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store itself may be at the end of a tunnel on this machine."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "4711")
    monkeypatch.delenv("ADLOCO_MEETING_POINT", raising=False)
    assert meeting_point() == "127.0.0.1:4711"
    monkeypatch.setenv("ADLOCO_MEETING_POINT", "10.0.0.1:29400")
    assert meeting_point() == "10.0.0.1:29400"
