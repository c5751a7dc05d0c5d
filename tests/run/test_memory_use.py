"""Memory by phase: a phase's peak is its own, a run records every phase, and PyTorch's snapshot is
asked for and written where it is promised.
"""

import json
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from adloco.algorithms.adloco import AdLoCo
from adloco.cli.main import main
from adloco.run.memory_use import PHASES, Memory
from tests.problems import make_run

MEBIBYTE = 2**20


def fresh(size: int) -> torch.Tensor:
    """New resident pages from the system; torch's allocator could reuse memory that earlier tests
    freed.
    """
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).fill_(1)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forgets a process's peak")
def test_a_phase_has_its_own_peak() -> None:
    """64 MiB are in use only within the first phase and 48 MiB from the second on; each phase
    reports its own peak.
    """
    memory = Memory(torch.device("cpu"))
    before = memory.peak_bytes
    with memory.phase("inner_steps"):
        fresh(64 * MEBIBYTE)
    with memory.phase("sync"):
        held = fresh(48 * MEBIBYTE)
    overall, taken = memory.peak_bytes, memory.take()
    inner, sync = taken["inner_steps"], taken["sync"]
    assert inner["peak_bytes"] is not None and inner["current_bytes"] is not None
    assert sync["peak_bytes"] is not None and sync["current_bytes"] is not None
    assert inner["peak_bytes"] - inner["current_bytes"] == pytest.approx(64 * MEBIBYTE, rel=0.1)
    assert sync["current_bytes"] - inner["current_bytes"] == pytest.approx(held.nbytes, rel=0.1)
    assert sync["peak_bytes"] - sync["current_bytes"] < MEBIBYTE
    assert overall == max(before, inner["peak_bytes"])
    assert memory.take() == {}


def test_a_phase_that_comes_twice_keeps_the_larger_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's allocator reports peaks of 7, then 5 since the last reset: the phase's peak is 7, and
    its memory in use is the last value.
    """
    resets = []
    readings = iter([(0, 0), (7, 3), (7, 3), (5, 4), (5, 4)])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    monkeypatch.setattr("adloco.run.memory_use.usage", lambda device: next(readings))
    memory = Memory(torch.device("cuda", 1))
    for _ in range(2):
        with memory.phase("checkpoint"):
            pass
    assert memory.take() == {"checkpoint": {"peak_bytes": 7, "current_bytes": 4}}
    assert memory.peak_bytes == 7
    assert resets == [torch.device("cuda", 1)] * 2


def test_metrics_hold_every_phase(small: list[str], tmp_path: Path) -> None:
    """The run evaluates every second round, and saves before the first and after every third; the
    memory of a checkpoint is in the line of the next round.
    """
    assert (
        main(["train", "diloco", *small, "--evaluation.every", "2", "--run.checkpoint_every", "3"])
        == 0
    )
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(lines) >= 5
    for line in lines:
        evaluated, saved = line["round"] % 2 == 0 or line is lines[-1], line["round"] % 3 == 1
        expected = {
            "inner_steps",
            "sync",
            *(["evaluation"] if evaluated else []),
            *(["checkpoint"] if saved else []),
        }
        assert list(line["memory"]) == [phase for phase in PHASES if phase in expected]
        assert all(
            0 < row["current_bytes"] <= row["peak_bytes"] <= line["memory_bytes"]
            for row in line["memory"].values()
        )


def test_a_round_enters_its_phases_in_order() -> None:
    entered: list[str] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        entered.append(name)
        yield
        entered.append(f"{name} ended")

    run: AdLoCo = make_run()
    run.round(phase=phase)
    # Once for each event of the sync, and once for the round's end.
    training, syncing = ["inner_steps", "inner_steps ended"], ["sync", "sync ended"]
    assert entered == [*training, *syncing, *syncing]
    run.stop()
    assert run.round(phase=phase) is None
    assert entered[6:] == [*training, *syncing]  # Whether to stop is agreed on before a sync.
