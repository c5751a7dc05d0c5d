"""The same numbers on every placement: one process, and gloo ranks with several workers on each.

By default every scenario is compared on 2 ranks, where it is cheap, and the norm test on an island
that is sharded and replicated at once. The other placements run in the nightly job.
"""

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, ProcessRaisedException

from adloco.distributed.testing import run_on_ranks
from tests.distributed import scenarios
from tests.problems import cases


def assert_same(left: Any, right: Any, where: str = "", exact: bool = False) -> None:
    """Equal to 1e-6 relative for floats and tensors, exactly for everything else.

    exact: Tensors are equal to the last bit.
    """
    if isinstance(left, torch.Tensor):
        rtol, atol = (0.0, 0.0) if exact else (1e-6, 1e-7)
        torch.testing.assert_close(
            left, right, rtol=rtol, atol=atol, msg=lambda text: f"{where}: {text}"
        )
    elif isinstance(left, dict):
        assert list(left) == list(right), where
        for key in left:
            assert_same(left[key], right[key], f"{where}.{key}", exact)
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_same(*pair, f"{where}[{index}]", exact)
    elif isinstance(left, float):
        assert left == pytest.approx(right, rel=1e-6, abs=1e-9), where
    else:
        assert left == right, where


PLACEMENTS = {
    "2 ranks": (2, 1, 1),
    "3 ranks": (3, 1, 1),
    "4 ranks": (4, 1, 1),
    "2 replicas": (2, 1, 2),
    "2 shards": (2, 2, 1),
    "2 islands x 2 replicas": (4, 1, 2),
    "2 islands x 2 shards": (4, 2, 1),
    "2 x 2 HSDP": (4, 2, 2),
    "2 islands x 2 x 2 HSDP": (8, 2, 2),
}
"""Ranks, shards and replicas."""
OF_HSDP = (
    "fates: survivor",
    "plain mean",
    "language model",
    "padded: bf16, residual in parameters",
)
"""Shards and replicas each have all scenarios; together, where every step takes long, these."""
ONE_ISLAND = {
    "one island: 2 replicas": (2, 1, 2),
    "one island: 2 shards": (2, 2, 1),
    "one island: 2 x 2 HSDP": (4, 2, 2),
    "one island: 4 shards": (4, 4, 1),
}
CUT = (
    "micro_batch",
    "accumulation_steps",
    "bytes_inside",
    "bytes",
    "busy_seconds",
    "rank_seconds",
    "ranks",
    "wait_seconds",
    "sync",
)
"""What says how the work was cut, which depends on the ranks of an island, or what was measured."""


PADDED = ("bytes_communicated", "bytes_sent")
"""What depends on where shards end, in a wire format."""


def same_anywhere(value: Any, without: tuple[str, ...] = ()) -> Any:
    """A result without the numbers that may differ between placements."""
    if isinstance(value, dict):
        return {
            key: same_anywhere(item, without)
            for key, item in value.items()
            if key not in (*CUT, "bits", *without)
        }
    if isinstance(value, (list, tuple)):
        return type(value)(same_anywhere(item, without) for item in value)
    return value


def assert_same_bits(results: list[dict[str, Any]], shards: int) -> None:
    """All islands with workers of a trainer have the same global parameters, to the last bit."""
    seen: dict[tuple[int, int], list[torch.Tensor]] = {}
    for rank, result in enumerate(results):
        for trainer, tensors in result["bits"].items():
            first = seen.setdefault((trainer, rank % shards), tensors)
            assert all(mine.equal(other) for mine, other in zip(tensors, first, strict=True)), (
                f"trainer {trainer} on rank {rank}"
            )


@pytest.fixture(scope="module")
def one_process() -> dict[str, dict[str, Any]]:
    scenarios.ISLAND[:] = 1, 1
    return scenarios.all_scenarios(list(scenarios.SCENARIOS)) | scenarios.one_worker()


@pytest.mark.parametrize(
    ("num_ranks", "shards", "replicas"), cases(PLACEMENTS, default=("2 ranks",))
)
def test_every_scenario_on_every_placement(
    num_ranks: int, shards: int, replicas: int, one_process: dict[str, dict[str, Any]]
) -> None:
    """Parameters, optimizer states, requests, merges, reports, step losses and byte counts; in one
    start of the ranks, which takes seconds.
    """
    # Blocks end where shards do, and optimizers of one's own are refused there.
    unlike = ("lossy", "own") if shards > 1 else ()
    names = [name for name in scenarios.SCENARIOS if not name.startswith(unlike)]
    names = [name for name in names if 1 in (shards, replicas) or name in OF_HSDP]
    assert any(report["merges"] for report in one_process["fates: survivor"]["reports"])
    results = run_on_ranks(scenarios.all_scenarios, num_ranks, names, shards, replicas)
    for name in names:
        without = PADDED if shards > 1 and name.startswith("padded") else ()
        assert_same(
            same_anywhere(results[0][name], without),
            same_anywhere(one_process[name], without),
            name,
            exact=shards == replicas == 1,
        )
        assert (
            without
            or results[0][name]["state"]["run"]["bytes"][0]
            == one_process[name]["state"]["run"]["bytes"][0]
        ), "bytes between workers"
        assert_same_bits([result[name] for result in results], shards)
        reports = [result[name]["reports"] for result in results]
        assert all(others == reports[0] for others in reports), (
            "every rank reports the same, to the last bit"
        )


@pytest.mark.parametrize(
    ("num_ranks", "shards", "replicas"),
    cases(ONE_ISLAND, default=("one island: 2 replicas", "one island: 2 x 2 HSDP")),
)
def test_fsdp_norm_is_ddp_norm_is_accumulation(
    num_ranks: int, shards: int, replicas: int, one_process: dict[str, dict[str, Any]]
) -> None:
    """Losses, statistics, requested batches and parameters are equal step by step."""
    results = run_on_ranks(scenarios.one_island, num_ranks, shards, replicas)[0]
    for name, result in results.items():
        assert_same(same_anywhere(result), same_anywhere(one_process[name]), name)
        requests = [report["trainers"][0]["requested_batch"] for report in result["reports"]]
        assert len(set(requests)) > 1, "a batch that never changes would show nothing"


MOVES = {
    f"{name}, {kind}": (source, target, kind)
    for name, source, target in (
        ("2 ranks to 4", (2, 1, 1), (4, 1, 1)),
        ("4 ranks to 2, sharded", (4, 2, 1), (2, 2, 1)),
        ("2 replicas to HSDP", (2, 1, 2), (4, 2, 2)),
    )
    for kind in ("plain", "streaming")
}


@pytest.mark.parametrize(
    ("source", "target", "kind"),
    cases(MOVES, default=("4 ranks to 2, sharded, plain",)),
)
def test_a_checkpoint_resumes_anywhere(
    source: tuple[int, int, int], target: tuple[int, int, int], kind: str
) -> None:
    """A run that stopped within a round, sharded or not, continues in one process and on other
    ranks as if it had never stopped.
    """
    scenarios.ISLAND[:] = 1, 1
    whole = same_anywhere(scenarios.result(scenarios.RUNS[kind](), 5), PADDED)
    state = run_on_ranks(scenarios.stopped, source[0], *source[1:], kind)[0]["state"]
    for going_on in (
        scenarios.go_on(state, 3, kind=kind),
        run_on_ranks(scenarios.go_on, target[0], state, 3, *target[1:], kind)[0],
    ):
        assert_same(same_anywhere(going_on["reports"], PADDED), whole["reports"][2:])
        assert_same(same_anywhere(going_on["state"], PADDED), whole["state"])


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise LookupError("rank one cannot")
    dist.barrier()


def expect_in_vain() -> None:
    with pytest.raises(LookupError):
        dist.barrier()


def die_on_rank_one() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang() -> None:
    time.sleep(60)


def test_the_helper_shows_the_failing_rank() -> None:
    with pytest.raises(
        ProcessRaisedException, match=r"(?s)Process 1 .*LookupError: rank one cannot"
    ):
        run_on_ranks(fail_on_rank_one, 2, timeout_seconds=60)
    with pytest.raises(ProcessRaisedException, match="DID NOT RAISE"):
        run_on_ranks(expect_in_vain, 2, timeout_seconds=60)
    with pytest.raises(ProcessException):
        run_on_ranks(die_on_rank_one, 2, timeout_seconds=60)
    with pytest.raises(TimeoutError, match="the ranks did not end within 4"):
        run_on_ranks(hang, 2, timeout_seconds=4)
