"""Joining the process group that torchrun or `start_ranks` prepared, and placing workers."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import rendezvous

from adloco.distributed.launch.failures import Watch, shared_failures, wait_for_members
from adloco.distributed.launch.rank_store import (
    Quorum,
    check_restarts,
    connect,
    store_outlives_ranks,
)
from adloco.distributed.messages import all_states, broadcast_state
from adloco.distributed.placement.islands import island_shape
from adloco.distributed.placement.placement import (
    TIMEOUT_SECONDS,
    OneProcess,
    Placement,
    longest_wait,
)
from adloco.errors import require

START_SECONDS = 30.0
"""Seconds that ranks started together may come after each other, even if timeout_seconds is
shorter: imports alone take seconds.
"""
LATE_SECONDS = 3.0
"""Seconds that the members of a later group may come after each other, besides timeout_seconds."""


def num_ranks() -> int:
    """Number of ranks in this run: those that torchrun (or `start_ranks`) has started, or that are
    left of them; else 1.
    """
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def this_rank() -> int:
    """This process's rank among those that `num_ranks` counts; else 0."""
    if dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def started_again() -> bool:
    """True if torchrun has started the ranks of this machine again, after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def speaks_for_machine() -> bool:
    """True for the first rank of a machine but the first one, whose terminal shows the view."""
    first_here = os.environ.get("LOCAL_RANK") == "0" and os.environ.get("GROUP_RANK") != "0"
    return first_here and this_rank() != 0


@contextmanager
def process_group(
    timeout_seconds: float = TIMEOUT_SECONDS,
    *,
    watch: Watch | None = None,
    quorum: Quorum | None = None,
) -> Iterator[None]:
    """Join the other ranks of a run while the context is open; one process alone does nothing.

    Args:
        timeout_seconds: How long to wait for ranks that have not started. Collectives wait ten
            times as long.
        watch: Notices ranks that are stopped or cut off; None: a rank that is stopped is noticed
            only by the longest wait of a collective.
        quorum: The processes that make up the group; None: all that were started together.

    Raises:
        ValueError: torchrun would restart the ranks in a way that cannot work.
        RankFailureError: Another rank was killed, is stopped or cannot be reached.
        OtherRankError: Another rank failed; it has that rank's message.
    """
    if quorum is None and num_ranks() == 1:
        yield
        return
    check_restarts()
    timeout = longest_wait(timeout_seconds)
    # Rank 0 keeps the store if no launcher does.
    kept_store = None if store_outlives_ranks() else next(rendezvous("env://", timeout=timeout))
    quorum = quorum or Quorum.of_all(connect())

    late_seconds = timeout_seconds + LATE_SECONDS
    # The members of a later quorum were all there when it was decided.
    wait_for_members(quorum, late_seconds if quorum.number else max(late_seconds, START_SECONDS))
    try:
        with shared_failures(quorum, watch):
            dist.init_process_group(
                group_backend(),
                store=quorum.keys(connect()),
                rank=quorum.rank,
                world_size=len(quorum.members),
                timeout=timeout,
            )
            yield
            dist.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        # torch counts the groups that it could not make, and ranks with other counts do not meet.
        distributed_c10d._world.group_count = 0
        del kept_store


def group_backend() -> str:
    """What joins the ranks, for `torch.distributed.init_process_group`.

    With GPUs gloo must be named: torch then takes NCCL alone, which cannot send from the CPU.
    """
    return (
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    )


def abort_nccl() -> None:
    """End what NCCL does in the groups of this process, so that its GPU waits for no other one.

    Called from another thread than the one that waits. What the kernels in flight leave is
    worthless, and the next collective of these groups raises. Does nothing without NCCL.
    """
    if not dist.is_nccl_available():
        return
    found: list[Any] = []
    for group in [*distributed_c10d._world.pg_map]:
        with suppress(RuntimeError):  # Nothing joins the GPUs of this group.
            found.append(group._get_backend(torch.device("cuda")))
    # gloo joins GPUs, too, where it was named alone.
    found = [each for each in found if isinstance(each, distributed_c10d.ProcessGroupNCCL)]
    if not found:
        return
    # As one, like torch's own: one after another, they may wait for each other.
    found[0]._group_start()
    for backend in found:
        backend.abort()
    found[0]._group_end()


def place(
    workers: int | Sequence[int],
    device: str | torch.device = "cpu",
    threads: int = 0,
    shard_size: int = 1,
    replica_size: int = 1,
    must_agree: Mapping[str, str] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Placement:
    """Place workers in this process, or over all ranks if called inside `process_group`.

    Args:
        workers: The number of workers of all trainers together, or their ids in rising order.
        device: Where they compute; "cuda" is the GPU of this rank.
        threads: Workers of a process that run at once. 0: one per core.
        shard_size: Ranks over which a worker is sharded (FSDP2). 0: as many as there are for each
            worker.
        replica_size: Replicas of a worker whose gradients are summed (DDP, or HSDP with shards).
            0: as many as there are for each worker.
        must_agree: Other settings, by name, that must be the same on all ranks.
        timeout_seconds: As given to `process_group`.

    Returns:
        The placement, for `AdLoCo` or `DiLoCo`.

    Raises:
        ValueError: That many ranks cannot share the workers in islands of these sizes, a setting
            differs between ranks, this machine has too few GPUs, or this process is one of several
            ranks and not inside `process_group`.
    """
    ids = range(workers) if isinstance(workers, int) else workers
    require(
        len(ids) > 0 and [*ids] == sorted({*ids}),
        f"workers {workers} cannot be placed; give one or more, as their number or as their ids in "
        "rising order",
    )
    require(
        min(shard_size, replica_size) >= 0 and max(shard_size, replica_size) > 0,
        "shard_size and replica_size must be >= 0, and one of them > 0, got "
        f"{shard_size} and {replica_size}",
    )
    shards, replicas = island_shape(num_ranks(), len(ids), shard_size, replica_size)
    device = torch.device(device)
    if not dist.is_initialized():
        require(
            num_ranks() == 1,
            "this process is one of several ranks; "
            "call place inside `with adloco.process_group():`",
        )
        return OneProcess(device, threads)
    mine = {
        "num_workers": str(len(ids)),
        "placement.shard_size": str(shard_size),
        "placement.replica_size": str(replica_size),
        **(must_agree or {}),
    }
    differing = [name for name, value in broadcast_state(mine).items() if mine.get(name) != value]
    require(
        not differing,
        f"{', '.join(differing)} differs between ranks; start all of them with the same recipe, "
        "flags and code",
    )
    if device.type == "cuda":
        # The next one of those that this rank sees, which may be one that no other rank sees.
        own = int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count())
        device = torch.device("cuda", own)
    sharing = _ranks_sharing(device, shards * replicas)
    return Placement(ids, device, threads, shards, replicas, timeout_seconds, sharing)


def alone() -> OneProcess:
    """All workers in this process, where it is not one of several ranks: without a placement each
    would train alone, and nothing would show it.

    Raises:
        ValueError: It is one of several.
    """
    require(
        num_ranks() == 1,
        "this process is one of several ranks; give placement=adloco.place(number of workers), "
        "called inside `with adloco.process_group():`, or placement=adloco.OneProcess() to train "
        "on this rank alone",
    )
    return OneProcess()


def _ranks_sharing(device: torch.device, ranks_per_worker: int) -> int:
    """Ranks that compute on this rank's GPU; 1 on a CPU. Only islands of one rank may share one,
    because NCCL, which joins the ranks of an island, wants a GPU for each. Called on all ranks,
    whatever their devices, and all raise the same error.
    """
    own = "cpu"
    if device.type == "cuda":
        own = ""
        if torch.cuda.device_count() > 0:
            torch.cuda.set_device(device)  # First, or a context could be made on another GPU.
            own = str(torch.cuda.get_device_properties(device).uuid)
    gpus = all_states(own)
    blind = [rank for rank, gpu in enumerate(gpus) if not gpu]
    require(not blind, f"rank {blind and blind[0]} sees no GPU; use the device cpu")
    shared = [gpu for gpu in gpus if gpu != "cpu" and gpus.count(gpu) > 1]
    ranks = [rank for rank, gpu in enumerate(gpus) if gpu in shared[:1]]
    require(
        not shared or ranks_per_worker == 1,
        f"ranks {', '.join(map(str, ranks))} would share a GPU, and each rank of an island needs "
        "one of its own; start fewer ranks there, or use the device cpu",
    )
    return 1 if own == "cpu" else gpus.count(own)
