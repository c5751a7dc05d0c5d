"""The same numbers on every placement: one process, and 2, 3 and 4 gloo ranks with several workers on each."""

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from adloco.placement.testing import run_on_ranks
from tests.placement import scenarios


def assert_same(left: Any, right: Any, where: str = "") -> None:
    """Equal to 1e-6 relative for floats and tensors, exactly for everything else."""
    if isinstance(left, torch.Tensor):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7, msg=lambda text: f"{where}: {text}")
    elif isinstance(left, dict):
        assert list(left) == list(right), where
        for key in left:
            assert_same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    elif isinstance(left, float):
        assert left == pytest.approx(right, rel=1e-5, abs=1e-9), where
    else:
        assert left == right, where


@pytest.fixture(scope="module")
def one_process() -> dict[str, dict[str, Any]]:
    return scenarios.all_scenarios(list(scenarios.SCENARIOS))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_scenario_on_several_ranks(num_ranks: int, one_process: dict[str, dict[str, Any]]) -> None:
    """Parameters, optimizer states, requests, merges, reports, step losses and byte counts; in one start of the ranks, which takes seconds."""
    results = run_on_ranks(scenarios.all_scenarios, num_ranks, list(scenarios.SCENARIOS))
    assert any(report["merges"] for report in one_process["fates: default"]["reports"])
    for name, expected in one_process.items():
        assert_same(results[0][name], expected, name)
        reports = [[{**report, "steps": ()} for report in result[name]["reports"]] for result in results]
        assert all(others == reports[0] for others in reports), "every rank reports the same, to the last bit"


def test_a_checkpoint_of_two_ranks_goes_on_anywhere() -> None:
    """Stopped within a round on 2 ranks; goes on in one process and on 4 ranks as if it had never stopped."""
    whole = scenarios.result(scenarios.run_here(), 5)
    state = run_on_ranks(scenarios.stopped, 2)[0]["state"]
    for going_on in (scenarios.go_on(state, 3), run_on_ranks(scenarios.go_on, 4, state, 3)[0]):
        assert_same(going_on["reports"], whole["reports"][2:])
        assert_same(going_on["state"], whole["state"])


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise LookupError("rank one cannot")
    dist.barrier()


def die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang() -> None:
    time.sleep(60)


def test_the_helper_shows_the_failing_rank() -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 failed:\n[\s\S]*LookupError: rank one cannot"):
        run_on_ranks(fail_on_rank_one, 2, timeout_seconds=60)
    with pytest.raises(RuntimeError, match="failed"):
        run_on_ranks(die_on_rank_one, 2, timeout_seconds=60)
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] did not end within 12"):
        run_on_ranks(hang, 2, timeout_seconds=12)
