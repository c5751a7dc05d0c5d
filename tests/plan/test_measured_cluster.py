"""Writing measurements into a cluster's description keeps what its user wrote."""

from pathlib import Path

import pytest

from adloco.plan.cluster import read_cluster
from adloco.plan.measured_cluster import cluster_text, write_measured


def write(path: Path, rates: dict[int, float], jitter: float) -> None:
    write_measured(
        path,
        samples_per_second=rates,
        ranks=2,
        update_seconds=0.00123,
        jitter=jitter,
        origin="on 2026-01-02 with\nsingle",
    )


def test_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    write(path, {1: 11.1999, 16: 12345.6}, 0.03091)
    assert path.read_text() == (
        "# Measured by `adloco probe` on 2026-01-02 with single; edit what is below to describe "
        "your cluster.\n"
        "islands = 2  # workers that are joined by slow links\n"
        "ranks = 2  # of an island that train a pass together, measured\n"
        'bandwidth = "100mbit"  # of the link between islands, each way\n'
        'latency = "20ms"  # one way\n'
        "sync_seconds = 0.0  # of a sync, besides its transfer\n"
        "update_seconds = 0.0012  # of an inner step, besides its passes, measured\n"
        "jitter = 0.031  # standard deviation of a step's seconds over their mean, "
        "measured\n"
        "failures_per_day = 0.0  # of one island\n"
        "restart_seconds = 60.0  # from a failure until training continues\n"
        "price_per_hour = 0.0  # of one island\n"
        "\n"
        "[samples_per_second]  # of one island, by the samples of all its ranks in one pass\n"
        "1 = 11.2\n"
        "16 = 12350.0\n"
    )
    found = read_cluster(path)
    assert (found.jitter, found.ranks) == (0.031, 2)
    assert found.samples_per_second == {1: 11.2, 16: 12350.0}


def test_only_what_was_measured_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    write(path, {1: 1.0, 2: 2.0}, 0.5)
    edited = path.read_text().replace('"100mbit"', '"1gbit"').replace("islands = 2", "islands = 8")
    path.write_text(f"# Our two sites.\n{edited}")
    before = path.read_text()
    write(path, {4: 3.0}, 0.25)
    assert path.read_text() == before.replace("jitter = 0.5 ", "jitter = 0.25 ").replace(
        "1 = 1.0\n2 = 2.0\n", "4 = 3.0\n"
    )
    assert not list(tmp_path.glob(".*"))


def test_a_file_of_the_users_own_gets_what_it_lacks(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    text = 'islands = 3\nbandwidth = "1gbit"\n[samples_per_second] # guessed\n1 = 1'
    path.write_text(text, encoding="utf-8-sig")  # As editors on Windows save it.
    write(path, {4: 3.0}, 0.25)
    assert path.read_text() == (
        'islands = 3\nbandwidth = "1gbit"\nranks = 2\nupdate_seconds = 0.0012\njitter = 0.25\n\n'
        "[samples_per_second] # guessed\n4 = 3.0\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a letter to a friend", "is not a TOML file.*; correct it, or name a file"),
        ("[run]\ntokens = 5\n", "there is no entry run"),
    ],
)
def test_another_file_is_refused_and_stays(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        write(path, {1: 1.0}, 0.1)
    assert path.read_text() == text


def test_a_place_where_no_file_can_be(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "cluster.toml"):
        with pytest.raises(ValueError, match="must be a file in a folder that exists"):
            cluster_text(path)
