"""The cluster's file, and the seconds of a step that follow from measured speeds."""

from dataclasses import replace
from pathlib import Path

import pytest

from adloco.plan.cluster import Cluster, read_cluster

TEXT = """
islands = 2
bandwidth = "100mbit"
latency = "20ms"
speeds = [1.0, 0.5]

[samples_per_second]
1 = 1.0
4 = 2.0
8 = 2.0
"""


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(TEXT)
    found = read_cluster(path)
    assert (found.islands, found.speeds) == (2, (1.0, 0.5))
    assert (found.link.bytes_per_second, found.link.latency_seconds) == (12.5e6, 0.02)


def test_seconds_of_a_step() -> None:
    """Passes of 1, 4, 8 samples take 1, 2, 4 s; 2 samples lie a third of the way from 1 to 4."""
    one = Cluster(islands=2, bandwidth="1mbit", samples_per_second={1: 1.0, 4: 2.0, 8: 2.0})
    assert [one.pass_seconds(size) for size in (0.5, 1, 4, 8, 16)] == [1, 1, 2, 4, 8]
    assert one.pass_seconds(2) == pytest.approx(4 / 3)
    # 12 samples take two passes of 6, each halfway from 2 to 4 s.
    assert one.step_seconds([12, 12], 8) == (6.0, 6.0)
    # Six of 2.
    assert one.step_seconds([12, 12], 2) == pytest.approx((8.0, 8.0))
    assert (one.passes(8, 8), one.passes(9, 8), one.passes(9, 2)) == (1, 2, 5)
    # Half a second of each pass is the update: two passes of 8 samples take 3.5 + 3.5 + 0.5 s.
    updating = replace(one, update_seconds=0.5)
    assert updating.step_seconds([8, 8], 8) == (4.0, 4.0)
    assert updating.step_seconds([16, 16], 8) == (7.5, 7.5)
    slower = Cluster(islands=2, bandwidth="1mbit", samples_per_second={1: 1.0}, speeds=(1.0, 0.5))
    assert slower.step_seconds([1, 1], 1) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("islands = 2", "islands = 0", "islands must be >= 1"),
        ('"100mbit"', '"100"', "bandwidth must be in kbit"),
        ('"100mbit"', '"-5mbit"', "bandwidth must be in kbit"),
        ('"100mbit"', '"0mbit"', "bandwidth must be in kbit"),
        ('"100mbit"', '"100mbit,20ms"', "bandwidth must be in kbit"),
        ("islands = 2", "", "islands must be given"),
        ("islands = 2", "islnds = 2", "no entry islnds"),
        ("[1.0, 0.5]", "[1.0]", "speeds must have one finite number > 0 for each of the 2"),
        ("[1.0, 0.5]", "[1.0, inf]", "speeds must have one finite number > 0"),
        ("islands = 2", "islands = 2\nupdate_seconds = 1", "update_seconds must be < 1, the sec"),
        ("1 = 1.0", "0 = 1.0", "samples_per_second must have at least one line"),
        ("1 = 1.0", "1 = 0.0", "samples_per_second must have at least one line"),
        ("1 = 1.0", "1 = inf", "samples_per_second must have at least one line"),
        ('"20ms"', '"20"', "latency must be in us, ms or s"),
        ("1 = 1.0", "x = 1.0", "samples_per_second must be a table such as { 8 = 1 }, got {'x'"),
        ("islands = 2", "islands = ", "is not a TOML file"),
        ("islands = 2", "islands = 2\njitter = -1", r"jitter must be in \[0, inf\), got -1"),
        ("islands = 2", 'islands = "two"', "islands must be a whole number, got 'two'"),
        ("[1.0, 0.5]", "3", "speeds must be a list of numbers, got 3"),
    ],
)
def test_wrong_entries(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(TEXT.replace(old, new))
    with pytest.raises(ValueError, match=message):
        read_cluster(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="probe RECIPE --throughput"):
        read_cluster(tmp_path / "cluster.toml")
