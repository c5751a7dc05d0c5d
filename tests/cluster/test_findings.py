"""What `adloco doctor` concludes from the facts of ranks and from measured links."""

from dataclasses import replace

import pytest

from adloco.cluster import findings
from adloco.cluster.rank_facts import RankFacts, first_of_islands
from adloco.config.recipe import build_recipe, override, read_values
from adloco.distributed.launch.link_probe import MeasuredLink

VERSIONS = {"python": "3.12.1", "torch": "2.13.0", "adloco": "1.0", "the code of adloco": "a" * 64}
FACTS = RankFacts(
    host="node0",
    machine=0,
    versions=VERSIONS,
    device="H100",
    gpus=2,
    ranks_here=2,
    address="10.0.0.5",
    towards_first="10.0.0.5",
    addresses={"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "10.1.0.5"},
    chosen={},
    port_is_free=True,
    folder="/shared/runs",
    writable="",
    free_bytes=10**12,
)
OTHER = replace(FACTS, host="node1", machine=1)
HOSTS = {0: "node0", 2: "node1", 4: "node2"}


def links(*rates: float, ahead: float = 0.0) -> list[MeasuredLink]:
    """A ring of three; the clock of rank 2 is ahead."""
    pairs = [(0, 2, ahead), (2, 4, -ahead), (4, 0, 0.0)]
    return [
        MeasuredLink(
            source=source,
            target=target,
            bytes_per_second=rate,
            latency_seconds=0.01 + 0.01 * (source == 2),
            clock_seconds=clock,
        )
        for (source, target, clock), rate in zip(pairs, rates, strict=True)
    ]


def check(found: findings.Finding, level: str, *texts: str) -> None:
    assert found.level == level, found
    for text in texts:
        assert text in found.text


def test_nothing_is_wrong() -> None:
    both = [FACTS, FACTS, OTHER, OTHER]
    check(findings.versions(both), "ok", "torch 2.13.0", "the same on 4 ranks")
    check(findings.devices(both), "ok", "4 ranks on H100")
    check(findings.interface(OTHER, 2), "ok", "node1: gloo listens on eth0 (10.0.0.5)")
    check(findings.ports(both), "ok", "all 4 ranks")
    check(findings.folder(both, [True] * 4), "ok", "/shared/runs, seen by 2 machines")
    check(findings.disk(both, 10**11, 3), "ok", "1,000.0 GB are free", "take about 300.0 GB")
    check(findings.clock(links(1e8, 1e8, 1e8, ahead=0.02), HOSTS), "ok", "differ by 20ms")


@pytest.mark.parametrize(
    ("key", "level"),
    [("python", "warning"), ("torch", "problem"), ("the code of adloco", "problem")],
)
def test_other_versions(key: str, level: str) -> None:
    other = replace(OTHER, versions=VERSIONS | {key: "b" * 64})
    found = findings.versions([FACTS, FACTS, other])
    check(found, level, f"{key} is ", "on node0 and bbbbbbbb... on node1 (rank 2)")


def test_devices() -> None:
    few = replace(OTHER, ranks_here=4)
    check(
        findings.devices([FACTS, few]),
        "warning",
        "node1 has 2 GPUs for 4 ranks; islands of one rank share them",
        "start at most 2",
    )
    check(findings.devices([FACTS, replace(OTHER, device="A100")]), "warning", "A100, H100")
    check(findings.devices([FACTS, replace(OTHER, device="cpu", gpus=0)]), "problem", "hide")


def test_interfaces() -> None:
    lost = replace(OTHER, address="127.0.1.1")
    advice = "set GLOO_SOCKET_IFNAME=eth0 and NCCL_SOCKET_IFNAME=eth0 on node1"
    check(findings.interface(lost, 2), "problem", "no other machine reaches it", advice)
    check(findings.interface(replace(lost, machine=0), 1), "ok")
    missing = replace(OTHER, address="", chosen={"GLOO_SOCKET_IFNAME": "eth7"}, device="cpu")
    wrong = "no interface eth7 with an IPv4 address; it has lo, eth0, ib0"
    check(findings.interface(missing, 2), "problem", wrong)
    assert findings.interface(missing, 2).text.endswith("; set GLOO_SOCKET_IFNAME=eth0")
    elsewhere = replace(OTHER, towards_first="10.1.0.5")
    text = "the way to the first machine leads through ib0 (10.1.0.5); set GLOO_SOCKET_IFNAME=ib0"
    check(findings.interface(elsewhere, 2), "warning", text)
    check(findings.interface(replace(elsewhere, machine=0), 2), "ok")
    check(findings.interface(replace(OTHER, towards_first="127.0.0.1"), 2), "ok")  # Of one machine.


def test_advice_for_the_first_machine_never_names_its_loopback() -> None:
    """It reaches itself there, and the others do not reach it."""
    first = replace(FACTS, address="127.0.0.1", towards_first="127.0.0.1", device="cpu")
    one = replace(first, addresses={"lo": "127.0.0.1", "eth0": "10.0.0.5"})
    resolved = "because the host name resolves to that; set GLOO_SOCKET_IFNAME=eth0 on node0"
    check(findings.interface(one, 2), "problem", resolved)
    named = replace(first, chosen={"GLOO_SOCKET_IFNAME": "lo"})
    chosen = "because GLOO_SOCKET_IFNAME or --meet names it; set GLOO_SOCKET_IFNAME=NAME on node0"
    check(findings.interface(named, 2), "problem", chosen)


def test_a_port_that_is_taken() -> None:
    check(findings.ports([FACTS]), "ok", "port 29400")
    check(findings.ports([replace(FACTS, port_is_free=False)]), "warning", "29400 is taken")


def test_folders_and_disks() -> None:
    shut = replace(OTHER, writable="Read-only file system")
    check(
        findings.folder([FACTS, shut], [True, True]), "problem", "node1 cannot write", "Read-only"
    )
    blind = findings.folder([FACTS, OTHER, OTHER], [True, False, False])
    check(blind, "warning", "/shared/runs of node0 is not seen on node1:")
    small = replace(OTHER, free_bytes=10**9)
    check(findings.disk([FACTS, small], None, 0), "ok", "1.0 GB are free", "node1", "RECIPE")
    check(findings.disk([FACTS, small], 3 * 10**8, 3), "warning", "leaves little")
    check(findings.disk([FACTS, small], 4 * 10**8, 3), "problem", "about 1.2 GB; make room")


def test_clocks_add_up_along_the_ring() -> None:
    found = findings.clock(links(1e8, 1e8, 1e8, ahead=-3.25), HOSTS)
    check(found, "warning", "clocks of node0 and node1 differ by 3.2 s")
    first, second, last = links(1e8, 1e8, 1e8, ahead=0.9)
    second = replace(second, clock_seconds=-1.8)  # One is 0.9 s ahead of the first, one behind.
    found = findings.clock([first, second, last], HOSTS)
    check(found, "warning", "clocks of node1 and node2 differ by 1.8 s")


def test_the_slowest_link_counts() -> None:
    """1.25e8 bytes in a second are 1 gbit; 2.5e6 are 20 mbit."""
    even = findings.link(links(1.25e8, 1.3e8, 1.5e8), HOSTS)
    check(even, "ok", "1gbit/s (125 MB/s) at least, 20ms one way at most")
    found = findings.link(links(1.25e8, 2.5e6, 1.25e8), HOSTS)
    check(found, "warning", "20mbit/s (2.5 MB/s)", "from node1 (rank 2) to node2 (4)")
    assert findings.cluster_lines(links(1.25e8, 2.5e6, 1.25e8)) == [
        "islands = 3",
        'bandwidth = "20mbit"',
        'latency = "20ms"',
    ]


@pytest.mark.parametrize(
    ("recipe", "machines", "expected"),
    [
        (None, [0, 0, 0, 0], [0, 1, 2, 3]),
        (None, [0, 0, 1, 1], [0, 2]),
        ("diloco", [0, 0, 0, 0], [0, 2]),  # shard_size 2
        ("ddp", [0, 0, 1, 1], [0, 2]),
    ],
)
def test_the_first_ranks_of_islands(
    recipe: str | None, machines: list[int], expected: list[int]
) -> None:
    facts = [replace(FACTS, machine=machine) for machine in machines]
    flags = [("placement.shard_size", "2")] if recipe == "diloco" else []
    built = build_recipe(override(read_values(recipe), flags)) if recipe else None
    assert first_of_islands(facts, built) == expected
