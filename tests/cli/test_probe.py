"""`adloco probe` and max_micro_batch auto: what they find holds in training, is the same on all
ranks. With --throughput, the speed of an island gets into a cluster's description.
"""

import ctypes
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from adloco.cli.main import main
from adloco.plan.cluster import read_cluster
from adloco.run.memory_use import usage

NANO = ["--model.num_layers", "2", "--evaluation.windows", "8", "--run.trackers", "none"]


def answer(text: str) -> int:
    found = re.search(r"largest micro-batch: (\d+) samples", text)
    assert found, text
    return int(found.group(1))


def give_back() -> None:
    """Return memory that earlier tests freed in this process to the system; it would otherwise be
    available beyond the budget.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@pytest.mark.nightly
def test_a_larger_budget_fits_more(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*NANO, "--data.path", str(corpus), "--data.cache", str(tmp_path)]
    flags += shlex.split("--batch.maximum 128 --data.context_tokens 64")
    found = []
    for more in (1.2, 0.2):  # The larger one first, with which come the libraries.
        give_back()
        budget = f"{(usage(torch.device('cpu'))[1] or 0) / 2**30 + more:.2f}"
        assert main(["probe", "single", *flags, "--memory.gib", budget]) == 0
        said = capsys.readouterr().out
        found.append(answer(said))
        assert ("batch.maximum allows no larger one" in said) == (found[-1] == 128)
    assert 1 <= found[1] < found[0] <= 128


@pytest.mark.nightly
def test_ranks_agree_and_training_takes_it(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The ranks are two shards of one worker."""
    flags = [*NANO, "--data.path", str(corpus), "--data.cache", str(tmp_path)]
    flags += shlex.split("--memory.gib 1.2 --batch.maximum 16")
    assert main(["probe", "fsdp-norm", *flags, "--ranks", "2"]) == 0
    assert 1 <= answer(capfd.readouterr().out) <= 16
    run = tmp_path / "run"
    more = shlex.split("--switch.max_micro_batch auto --run.tokens 5000 --ranks 2")
    more += ["--run.folder", str(run)]
    assert main(["train", "fsdp-norm", *flags, *more]) == 0
    assert re.search(r"max_micro_batch = \d+\n", (run / "recipe.toml").read_text())
    peaks = [
        json.loads(line)["memory"]["inner_steps"]["peak_bytes"]
        for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    assert max(peaks) <= 1.2 * 2**30


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            [],
            (
                "the largest micro-batch cannot be found on a CPU without memory.gib, the memory "
                "that this process may take; set it, as in --memory.gib 4"
            ),
        ),
        (
            ["--memory.gib", "0.1"],
            "memory.gib 0.1 is less than the .* GiB that this process holds already; raise it",
        ),
        (["--memory.gib", "-1"], "memory.gib must be >= 0, got -1"),
        (["--memory.fraction", "1.5"], "memory.fraction must be in .*got 1.5"),
    ],
)
def test_refusals(
    flags: list[str], message: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--data.path", str(corpus), "--data.cache", str(tmp_path)]
    words += ["--switch.max_micro_batch", "auto"]
    assert main(["train", "single", *words, *flags]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_throughput_of_chosen_micro_batches(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "cluster.toml"
    flags = [*small, "--throughput", str(cluster)]
    assert main(["probe", "single", *flags, "--micro-batches", "2,1"]) == 0
    said = capsys.readouterr().out
    tried = [line for line in said.splitlines() if line.startswith("trying ")]
    assert tried == [f"trying micro-batches of {size} ..." for size in ("1 sample", "2 samples")]
    assert re.search(r"an island of 1 rank; 0\.\d{3} s of a step are its update; jitter", said)
    assert f"written to {cluster}" in said
    found = read_cluster(cluster)
    assert list(found.samples_per_second) == [1, 2]
    heading = cluster.read_text().splitlines()[0]
    assert re.search(r"on \d{4}-\d\d-\d\d with single --run.tokens 8000 .*; edit", heading)


@pytest.mark.nightly
def test_throughput_up_to_the_largest_that_fits_on_the_ranks_of_an_island(
    small: list[str], tmp_path: Path
) -> None:
    cluster = tmp_path / "cluster.toml"
    flags = [*small, "--throughput", str(cluster), "--memory.gib", "1.5", "--batch.maximum", "12"]
    ranks = ["--ranks", "2", "--placement.replica_size", "2"]
    assert main(["probe", "single", *flags, *ranks]) == 0
    found = read_cluster(cluster)
    assert (found.ranks, [*found.samples_per_second]) == (2, [2, 4, 8, 12])
    assert "--ranks 2; edit" in cluster.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--micro-batches", "1"], "--micro-batches needs --throughput CLUSTER.toml"),
        (
            ["--throughput", "c.toml", "--micro-batches", "1,0"],
            "--micro-batches must be > 0, as in 1,4,16, got 1,0",
        ),
        (["--throughput", "missing/c.toml"], "must be a file in a folder that exists"),
    ],
)
def test_refusals_of_throughput(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", "single", *words]) == 2
    assert message in capsys.readouterr().err
