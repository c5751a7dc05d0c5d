"""Writes what was measured of an island into a cluster's description (`plan.cluster`), and leaves
what else is in it as it is.
"""

from collections.abc import Mapping
from pathlib import Path

import tomlkit
from tomlkit.items import AbstractTable

from adloco.errors import require
from adloco.plan.cluster import read_cluster
from adloco.whole_file import write_text

MEASURED_BY = "Measured by `adloco probe`"
NEW = f"""\
# {MEASURED_BY}
islands = 2  # workers that are joined by slow links
ranks = 1  # of an island that train a pass together, measured
bandwidth = "100mbit"  # of the link between islands, each way
latency = "20ms"  # one way
sync_seconds = 0.0  # of a sync, besides its transfer
update_seconds = 0.0  # of an inner step, besides its passes, measured
jitter = 0.0  # standard deviation of a step's seconds over their mean, measured
failures_per_day = 0.0  # of one island
restart_seconds = 60.0  # from a failure until training continues
price_per_hour = 0.0  # of one island

[samples_per_second]  # of one island, by the samples of all its ranks in one pass
"""
"""A description before anything is measured."""


def cluster_text(path: Path) -> str:
    """The text of a cluster's description that can be measured into, a new one if there is no such
    file; ValueError if it is something else, or its folder does not exist.
    """
    require(
        path.parent.is_dir() and not path.is_dir(),
        f"{str(path)!r} must be a file in a folder that exists; make the folder, or name another",
    )
    if not path.exists():
        return NEW
    try:
        read_cluster(path)
    except ValueError as error:
        raise ValueError(
            f"{error}; correct it, or name a file that is a cluster's description or not there yet"
        ) from error
    return path.read_text(encoding="utf-8-sig")


def write_measured(
    path: Path,
    *,
    samples_per_second: Mapping[int, float],
    ranks: int,
    update_seconds: float,
    jitter: float,
    origin: str,
) -> None:
    """Write a cluster's description, or replace what was measured in the one that is there; see
    `Cluster` for the numbers, and `cluster_text` for errors.

    origin: When and with what it was measured, for the heading: "on DATE with RECIPE".
    """
    first, rest = cluster_text(path).split("\n", 1)
    if first.startswith(f"# {MEASURED_BY}"):
        measured = f"{MEASURED_BY} {' '.join(origin.split())}"
        first = f"# {measured}; edit what is below to describe your cluster."
    document = tomlkit.parse(f"{first}\n{rest}")
    document["ranks"] = ranks
    document["update_seconds"] = float(f"{update_seconds:.2g}")
    document["jitter"] = float(f"{jitter:.2g}")
    table = document["samples_per_second"]
    assert isinstance(table, AbstractTable)
    table.clear()
    for size, rate in samples_per_second.items():
        table[str(size)] = float(f"{rate:.4g}")
    write_text(path, tomlkit.dumps(document))
