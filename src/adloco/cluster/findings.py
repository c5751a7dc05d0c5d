"""Findings from the facts of all ranks and the measured links, each with what to change. Only
numbers and texts come in, so that every rank says the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from adloco.cluster.job import PORT
from adloco.cluster.network import LOOPBACK, VARIABLES
from adloco.cluster.rank_facts import RankFacts
from adloco.distributed.launch.link_probe import MeasuredLink
from adloco.plan.link import bandwidth_text, latency_text

MUST_AGREE = ("torch", "adloco", "the code of adloco")
"""Facts that must be equal on all ranks; else the run refuses to start, or its numbers change."""
LONGEST_VERSION = 40
CLOCK_SECONDS = 1.0
"""Clocks that differ by more make the records of machines hard to compare."""
SLOW = 2.0
"""A link that is so many times slower than the median is named."""
FULL = 0.2
"""Part of the free disk that should be left over."""


Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of `adloco doctor`."""

    check: str
    level: Level
    text: str
    """The finding, and what to change."""


def versions(facts: Sequence[RankFacts]) -> Finding:
    """Versions, the same on all ranks or not."""
    first = facts[0].versions
    differing: dict[str, str] = {}
    for rank, each in enumerate(facts):
        for key, version in each.versions.items():
            if version != first[key]:
                here = f"{key} is {_short(first[key])} on {facts[0].host}"
                there = f"{_short(version)} on {each.host} (rank {rank})"
                differing.setdefault(key, f"{here} and {there}")
    if differing:
        level: Level = "problem" if {*MUST_AGREE} & {*differing} else "warning"
        text = f"{'; '.join(differing.values())}; install the same on all machines"
        return Finding("versions", level, text)
    named = ", ".join(f"{key} {first[key]}" for key in ("python", "torch", "adloco"))
    same = f", the same on {len(facts)} ranks" if len(facts) > 1 else ""
    return Finding("versions", "ok", f"{named}{same}")


def devices(facts: Sequence[RankFacts]) -> Finding:
    """GPUs for all ranks, and all of one kind. Only islands of one rank may share one."""
    kinds = sorted({each.device for each in facts})
    few = next((each for each in facts if 0 < each.gpus < each.ranks_here), None)
    text = f"{len(facts)} {'ranks' if len(facts) > 1 else 'rank'} on {', '.join(kinds)}"
    if few:
        text = (
            f"{few.host} has {few.gpus} GPUs for {few.ranks_here} ranks; islands of one rank share "
            f"them, and larger ones cannot: start at most {few.gpus} there, or use --run.device cpu"
        )
        return Finding("devices", "warning", text)
    if len(kinds) > 1 and "cpu" in kinds:
        advice = "hide the GPUs, or start ranks only where there is one"
        return Finding("devices", "problem", f"{text}; {advice}")
    if len(kinds) > 1:
        advice = "the slowest decides; consider --placement.balance speed"
        return Finding("devices", "warning", f"{text}; {advice}")
    return Finding("devices", "ok", text)


def interface(facts: RankFacts, machines: int) -> Finding:
    """The network interface that a machine uses."""
    name = next((name for name, own in facts.addresses.items() if own == facts.address), "?")
    # The first machine reaches itself through its loopback, and no other machine does.
    others = {key: own for key, own in facts.addresses.items() if not own.startswith(LOOPBACK)}
    right = next((key for key, own in others.items() if own == facts.towards_first), None)
    best = right or (next(iter(others)) if len(others) == 1 else "NAME")
    advice = f"set {VARIABLES[0]}={best}" + (
        f" and {VARIABLES[1]}={best}" if facts.device != "cpu" else ""
    )
    text = f"{facts.host}: gloo listens on {name} ({facts.address})"
    unknown = [chosen for chosen in facts.chosen.values() if chosen not in facts.addresses]
    if facts.addresses and not facts.address:
        text = (
            f"{facts.host} has no interface {', '.join(unknown)} with an IPv4 address; it has "
            f"{', '.join(facts.addresses)}; {advice}"
        )
        return Finding("interface", "problem", text)
    if machines > 1 and facts.address.startswith(LOOPBACK):
        chosen = VARIABLES[0] in facts.chosen
        why = f"{VARIABLES[0]} or --meet names it" if chosen else "the host name resolves to that"
        text += f", where no other machine reaches it, because {why}; {advice} on {facts.host}"
        return Finding("interface", "problem", text)
    # The first machine reaches itself by any of its addresses, and nodes of one machine each other.
    here = facts.machine == 0 or facts.towards_first.startswith(LOOPBACK)
    if not here and facts.towards_first not in ("", facts.address):
        text += (
            f", but the way to the first machine leads through {right or '?'} "
            f"({facts.towards_first}); {advice} if that is the faster network"
        )
        return Finding("interface", "warning", text)
    return Finding("interface", "ok", text)


def ports(facts: Sequence[RankFacts]) -> Finding:
    """If ranks reach each other; for one rank, if a launcher could begin here."""
    if len(facts) > 1:
        return Finding("ports", "ok", f"all {len(facts)} ranks have reached each other")
    if facts[0].port_is_free:
        return Finding("ports", "ok", f"port {PORT}, where torchrun's agents meet, is free")
    text = f"port {PORT} is taken on {facts[0].host}; use another one in --rdzv-endpoint HOST:PORT"
    return Finding("ports", "warning", text)


def folder(facts: Sequence[RankFacts], seen: Sequence[bool]) -> Finding:
    """The folder for runs: writable, and seen by all machines or not.

    seen: For each rank, True if it sees what rank 0 writes.
    """
    there = facts[0].folder
    for each in facts:
        if each.writable:
            why = f"{each.host} cannot write into {each.folder} ({each.writable})"
            return Finding("folder", "problem", f"{why}; use another --run.folder")
    blind = sorted({each.host for each, sees in zip(facts, seen, strict=True) if not sees})
    if blind:
        text = (
            f"{there} of {facts[0].host} is not seen on {', '.join(blind)}: each machine "
            "keeps the checkpoints of its own workers, and a resume needs them all; a shared "
            "folder needs no care"
        )
        return Finding("folder", "warning", text)
    hosts = len({each.host for each in facts})
    return Finding("folder", "ok", f"{there}{f', seen by {hosts} machines' * (hosts > 1)}")


def disk(facts: Sequence[RankFacts], checkpoint_bytes: int | None, kept: int) -> Finding:
    """Room for a run's checkpoints.

    Args:
        checkpoint_bytes: About how large one is; None: not known.
        kept: How many are on disk at once.
    """
    least = min(facts, key=lambda each: each.free_bytes)
    free = f"{least.free_bytes / 1e9:,.1f} GB are free in {least.folder} on {least.host}"
    if checkpoint_bytes is None:
        return Finding("disk", "ok", f"{free}; name a RECIPE to compare with")
    needed = checkpoint_bytes * kept
    text = f"{free}; {kept} checkpoints take about {needed / 1e9:,.1f} GB"
    advice = "make room, or lower run.keep_checkpoints"
    if needed > least.free_bytes:
        return Finding("disk", "problem", f"{text}; {advice}")
    if needed > (1 - FULL) * least.free_bytes:
        return Finding("disk", "warning", f"{text}, which leaves little; {advice}")
    return Finding("disk", "ok", text)


def clock(links: Sequence[MeasuredLink], hosts: Mapping[int, str]) -> Finding:
    """By how much the clocks of machines differ, from the links of a ring."""
    ahead = {links[0].source: 0.0}
    for link in links[:-1]:
        ahead[link.target] = ahead[link.source] + link.clock_seconds
    extremes = [chosen(ahead, key=lambda rank: ahead[rank]) for chosen in (min, max)]
    seconds = ahead[extremes[1]] - ahead[extremes[0]]
    if seconds > CLOCK_SECONDS:
        one, other = sorted(extremes)
        text = (
            f"the clocks of {hosts[one]} and {hosts[other]} differ by "
            f"{seconds:,.1f} s; let NTP set them, or the times in their logs cannot be compared"
        )
        return Finding("clock", "warning", text)
    return Finding("clock", "ok", f"clocks differ by {latency_text(seconds)}")


def link(links: Sequence[MeasuredLink], hosts: Mapping[int, str]) -> Finding:
    """The slowest link between islands, which decides how long a sync takes."""
    slowest = min(links, key=lambda each: each.bytes_per_second)
    longest = max(links, key=lambda each: each.latency_seconds)
    middle = median(each.bytes_per_second for each in links)
    text = (
        f"{_rate(slowest.bytes_per_second)} at least, {latency_text(longest.latency_seconds)} one "
        f"way at most, on {len(links)} links between islands at once, over TCP"
    )
    if slowest.bytes_per_second * SLOW < middle:
        at, to = slowest.source, slowest.target
        text += (
            f"; the slowest is from {hosts[at]} (rank {at}) to {hosts[to]} ({to}), the median has "
            f"{_rate(middle)}: every sync waits for it; look at that machine's network"
        )
        return Finding("links", "warning", text)
    return Finding("links", "ok", text)


def cluster_lines(links: Sequence[MeasuredLink]) -> list[str]:
    """The lines of a cluster's description, for `adloco plan --cluster`, that these links give."""
    bandwidth = bandwidth_text(min(each.bytes_per_second for each in links))
    latency = latency_text(max(each.latency_seconds for each in links))
    return [f"islands = {len(links)}", f'bandwidth = "{bandwidth}"', f'latency = "{latency}"']


def _short(version: str) -> str:
    """The version, or the beginning of a checksum."""
    return version if len(version) < LONGEST_VERSION else f"{version[:8]}..."


def _rate(bytes_per_second: float) -> str:
    """Bits and bytes per second."""
    return f"{bandwidth_text(bytes_per_second)}/s ({bytes_per_second / 1e6:,.4g} MB/s)"
