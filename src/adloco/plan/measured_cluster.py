"""Writes what was measured of an island into a cluster's description (`plan.cluster`), and leaves
what else is in it as it is.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from adloco.errors import require
from adloco.plan.cluster import read_cluster
from adloco.whole_file import write_text

NEW = """\
# Measured by `adloco probe`
islands = 2                # workers that are joined by slow links
bandwidth = "100mbit"      # of the link between islands, each way
latency = "20ms"           # one way
jitter = 0.0               # standard deviation of a step's seconds over their mean, measured
failures_per_day = 0.0     # of one island
restart_seconds = 60.0     # from a failure until training goes on
price_per_hour = 0.0       # of one island

[samples_per_second]       # of one island, by micro-batch
"""
"""A description before anything is measured."""
HEADING = re.compile(r"^# Measured by `adloco probe`.*$", re.MULTILINE)
JITTER = re.compile(r"^([ \t]*jitter[ \t]*=[ \t]*)([^#\n]*)(.*)$", re.MULTILINE)
TABLE = re.compile(r"^([ \t]*\[samples_per_second\][^\n]*\n).*", re.MULTILINE | re.DOTALL)
"""The table is the last entry: a description has no other."""


def cluster_text(path: Path) -> str:
    """The text of a cluster's description that can be measured into; of a new one if there is no
    such file.

    Raises:
        ValueError: The file is something else, or its folder does not exist.
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
    text = path.read_text(encoding="utf-8")
    values = tomllib.loads(text) | {"jitter": 0.5, "samples_per_second": {"1": 1.5}}
    require(
        tomllib.loads(_with(text, {1: 1.5}, 0.5, "")) == values,
        f"{path} must have its samples_per_second below a line [samples_per_second]",
    )
    return text


def write_measured(
    path: Path, *, samples_per_second: Mapping[int, float], jitter: float, origin: str
) -> None:
    """Write a cluster's description, or replace what was measured in the one that is there.

    Args:
        path: The TOML file.
        samples_per_second: Micro-batch -> samples per second of one island.
        jitter: Standard deviation of a step's seconds over their mean.
        origin: When and with what it was measured, for the heading: "on DATE with RECIPE".

    Raises:
        ValueError: The file is something else, or its folder does not exist.
    """
    write_text(path, _with(cluster_text(path), samples_per_second, jitter, origin))


def _with(text: str, samples_per_second: Mapping[int, float], jitter: float, origin: str) -> str:
    """The text with these measurements, to 4 and 2 digits."""
    heading = (
        f"# Measured by `adloco probe` {' '.join(origin.split())}; edit what is below to describe "
        "your cluster."
    )
    rows = "".join(
        f"{size} = {float(f'{rate:.4g}')}\n" for size, rate in samples_per_second.items()
    )
    value = float(f"{jitter:.2g}")
    text = text.rstrip("\n") + "\n"
    if not JITTER.search(text):
        text = TABLE.sub(lambda found: f"jitter = 0.0\n\n{found[0]}", text, count=1)
    text = HEADING.sub(lambda found: heading, text, count=1)
    text = JITTER.sub(
        lambda found: f"{found[1]}{f'{value} '.ljust(len(found[2]))}{found[3]}".rstrip(),
        text,
        count=1,
    )
    return TABLE.sub(lambda found: f"{found[1]}{rows}", text, count=1)
