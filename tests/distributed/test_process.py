"""Threads: all items run, together, and the first error comes out."""

import os
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from adloco.distributed.device import used_here
from adloco.distributed.launch import launcher
from adloco.distributed.launch.launcher import abort_nccl, group_backend, place
from adloco.distributed.placement import placement
from adloco.distributed.placement.placement import OneProcess
from adloco.distributed.testing import run_on_ranks


def nothing() -> None:
    pass


def test_map_keeps_the_order_and_runs_together() -> None:
    both = threading.Barrier(2, timeout=20)

    def wait_for_the_other(item: int) -> int:
        both.wait()  # Passes only if two items run at the same time.
        return item * 10

    assert OneProcess(threads=2).map(wait_for_the_other, [1, 2], nothing) == [10, 20]


def test_several_items_compute_with_one_thread_each() -> None:
    assert OneProcess(threads=1).map(lambda _: torch.get_num_threads(), [1, 2], nothing) == [1, 1]
    assert OneProcess(threads=2).map(lambda _: torch.get_num_threads(), [1, 2, 3], nothing) == [
        1,
        1,
        1,
    ]


def test_an_error_ends_the_others_early_and_comes_out_after_them() -> None:
    halted, ended = threading.Event(), []

    def work(item: int) -> None:
        if item == 0:
            raise RuntimeError("item 0 failed")
        assert halted.wait(20), "nobody said that an item failed"
        ended.append(item)

    with pytest.raises(RuntimeError, match="item 0 failed"):
        OneProcess(threads=2).map(work, [0, 1, 2], halted.set)
    assert sorted(ended) == [1, 2]


def test_an_interrupted_wait_leaves_no_thread_behind() -> None:
    halted, ended, both = threading.Event(), [], threading.Barrier(2, timeout=20)
    submitted = threading.Event()

    class Items(list[int]):
        """Tells when all items were submitted: the pool forgets a thread whose start an interrupt
        cuts off.
        """

        def __iter__(self) -> Iterator[int]:
            yield from super().__iter__()
            submitted.set()

    def work(item: int) -> None:
        both.wait()
        assert submitted.wait(20)
        if item == 0:
            os.kill(os.getpid(), signal.SIGINT)  # The kernel hands it to the main thread.
        assert halted.wait(20)
        ended.append(item)

    # A process started in the background of a shell ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            OneProcess(threads=2).map(work, Items([0, 1]), halted.set)
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(ended) == [0, 1]


def test_gather_orders_by_worker_and_counts() -> None:
    placement = OneProcess()
    assert list(placement.gather({3: [1.0, 2.0], 1: [3.0, 4.0]}).items()) == [
        (1, [3.0, 4.0]),
        (3, [1.0, 2.0]),
    ]
    assert placement.traffic.between == 2 * 2 * 8
    placement.gather({0: [1.0]})
    assert placement.traffic.between == 32


@pytest.mark.parametrize(
    ("device", "workers", "threads", "together", "apart", "expected"),
    [
        ("cpu", 2, 0, False, False, 5),
        ("cuda", 2, 0, False, False, 1),
        ("cuda", 2, 0, True, False, 5),
        ("cuda", 2, 3, True, False, 3),
        ("cuda", 2, 3, True, True, 1),
        # Each has a stream of its own, and so have transfers, of 32 that there are.
        ("cuda", 31, 0, True, False, 5),
        ("cuda", 32, 40, True, False, 1),
        ("cpu", 32, 0, False, False, 5),
    ],
)
def test_how_many_workers_run_at_once(
    device: str,
    workers: int,
    threads: int,
    together: bool,
    apart: bool,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU trains them one after another, unless all are small or a number is given."""
    monkeypatch.setattr(placement, "num_cores", lambda: 5)
    called: list[int] = []

    def noted(function: Any, items: Any, on_failure: Any, at_once: int, where: Any) -> list[Any]:
        called.append(at_once)
        return []

    monkeypatch.setattr(placement, "map_in_threads", noted)
    on_it = OneProcess(threads=threads)
    on_it.device = torch.device(device)
    on_it.map(abs, range(workers), nothing, together=together, apart=apart)
    assert called == [expected]


@pytest.mark.parametrize(
    ("device", "apart", "same"),
    [("cpu", True, True), ("cuda", False, True), ("cuda", True, False)],
)
def test_one_compiled_worker_has_a_thread_on_a_gpu_as_several_do(
    device: str, apart: bool, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled would be compiled again in a thread with other intra-operator threads. A
    thread has the caller's GPU where the device has no number.
    """
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    on_it = OneProcess()
    on_it.device = torch.device(device)
    (thread,) = on_it.map(lambda _: threading.current_thread(), [1], nothing, apart=apart)
    assert (thread is threading.current_thread()) is same
    assert chosen == ([] if same else [3])


@pytest.mark.parametrize("gpus", [False, True])
def test_gloo_joins_the_ranks_beside_nccl(gpus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: gpus)
    assert group_backend() == ("cpu:gloo,cuda:nccl" if gpus else "gloo")


def test_what_nccl_does_is_ended_in_all_groups_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    class Nccl:
        def __init__(self, name: str) -> None:
            self.name = name

        def _group_start(self) -> None:
            called.append("start")

        def abort(self) -> None:
            called.append(self.name)

        def _group_end(self) -> None:
            called.append("end")

    class Group:
        def __init__(self, backend: object) -> None:
            self.backend = backend

        def _get_backend(self, device: torch.device) -> object:
            if self.backend is None:
                raise RuntimeError(f"No backend type associated with device type {device.type}")
            return self.backend

    groups = [Group(Nccl("all")), Group(None), Group("gloo"), Group(Nccl("island"))]
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(distributed_c10d, "ProcessGroupNCCL", Nccl, raising=False)
    for found, expected in ((groups[1:3], []), (groups, ["start", "all", "island", "end"])):
        world = SimpleNamespace(pg_map=dict.fromkeys(found))
        monkeypatch.setattr(distributed_c10d, "_world", world)
        abort_nccl()
        assert called == expected


def test_a_group_of_gloo_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says that gloo joins its GPUs, too, and torch for CPUs has no NCCL."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(distributed_c10d, "ProcessGroupNCCL", type("Nccl", (), {}), raising=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        abort_nccl()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def placed_on(seen: int, gpus: int, shard_size: int) -> tuple[str, int | str]:
    """The device of this rank, and the ranks that share it: of so many GPUs it sees some, the first
    of which is the one with its own number.
    """
    rank = dist.get_rank()

    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"GPU-{(rank + device.index if seen < gpus else device.index)}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: seen)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(torch.cuda, "get_device_properties", properties)
        patch.setattr(launcher, "Placement", lambda *given: SimpleNamespace(given=given))
        try:
            given = place(3, "cuda", shard_size=shard_size).given  # type: ignore[attr-defined]
        except ValueError as error:
            return "", str(error)
    return str(given[1]), given[-1]


@pytest.mark.parametrize(
    ("seen", "gpus", "shard_size", "expected"),
    [
        (3, 3, 1, [("cuda:0", 1), ("cuda:1", 1), ("cuda:2", 1)]),
        (2, 2, 1, [("cuda:0", 2), ("cuda:1", 1), ("cuda:0", 2)]),
        (1, 3, 3, [("cuda:0", 1)] * 3),  # Each rank sees its own, as with srun --gpus-per-task 1.
    ],
)
def test_ranks_that_share_a_gpu_are_counted(
    seen: int, gpus: int, shard_size: int, expected: list[tuple[str, int]]
) -> None:
    assert run_on_ranks(placed_on, 3, seen, gpus, shard_size) == expected


def test_ranks_of_an_island_have_a_gpu_each() -> None:
    for device, message in run_on_ranks(placed_on, 3, 2, 2, 3):
        assert not device
        assert str(message).startswith("ranks 0, 2 would share a GPU, and each rank of an island")


def some_without_a_gpu() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: int(dist.get_rank() == 0))
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-0")
        )
        with pytest.raises(ValueError, match="rank 1 sees no GPU; use the device cpu") as refused:
            place(3, "cuda")
    return str(refused.value)


def test_a_rank_without_a_gpu_lets_no_other_wait() -> None:
    assert len({*run_on_ranks(some_without_a_gpu, 3)}) == 1


def test_memory_that_another_stream_made_is_kept_for_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    on_gpu = SimpleNamespace(is_cuda=True, device="cuda:1", record_stream=noted.append)
    used_here([torch.ones(1), on_gpu])  # type: ignore[list-item]
    assert noted == ["stream of cuda:1"]
