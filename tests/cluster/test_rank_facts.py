"""What a rank knows of its machine, and which ranks see a folder."""

import socket
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch.distributed as dist

from adloco.cluster import rank_facts
from adloco.cluster.findings import versions
from adloco.cluster.network import gloo_address, interfaces, port_is_free
from adloco.cluster.rank_facts import all_facts, look, who_sees
from adloco.distributed.testing import run_on_ranks


def seen(folder: str) -> list[bool]:
    if dist.get_rank() == 1:
        Path.exists = lambda *_, **__: False  # type: ignore[method-assign]
    rank_facts.SEEN_SECONDS = 0.2
    return who_sees(Path(folder) if dist.get_rank() == 0 else Path("elsewhere"))


def test_a_folder_that_a_rank_does_not_see(tmp_path: Path) -> None:
    assert run_on_ranks(seen, 3, str(tmp_path)) == [[True, False, True]] * 3
    assert list(tmp_path.iterdir()) == []


def test_facts_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = look(tmp_path / "not" / "there", "cpu")
    assert all_facts(facts) == [facts]
    assert (facts.folder, facts.writable, facts.device) == (str(tmp_path), "", "cpu")
    assert facts.free_bytes > 0 and facts.addresses.get("lo", "127.0.0.1") == "127.0.0.1"
    with socket.create_server(("", 0)) as server:
        assert not port_is_free(server.getsockname()[1])
    name = next(iter(interfaces()), None)
    if name:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        assert gloo_address() == interfaces()[name]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none7")
    assert gloo_address() == ""


def test_facts_of_a_rank_with_another_version_of_adloco(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not know a fact, and says another one; its version is what differs."""
    mine = look(tmp_path, "cpu")
    other = {**asdict(mine), "host": "there", "versions": {"adloco": "0.0.9"}, "unheard": 1}
    del other["port_is_free"]
    monkeypatch.setattr(rank_facts, "all_states", lambda state: [state, other])
    first, second = all_facts(mine)
    assert first == mine
    assert second == replace(mine, host="there", versions={"adloco": "0.0.9"})
    found = versions([first, second])
    assert found.level == "problem" and "0.0.9 on there (rank 1)" in found.text
