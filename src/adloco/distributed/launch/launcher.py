"""From one command to a placement: joins the process group that torchrun prepared, or starts ranks
on this machine.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from adloco.distributed.launch.failures import report_failure, shared_failures
from adloco.distributed.placement.one_process import OneProcess
from adloco.distributed.placement.placement import Placement
from adloco.distributed.placement.ranks import TIMEOUT, Ranks

INTERRUPTED = 130
SAVING_SECONDS, FAILING_SECONDS = 120.0, 5.0
"""How long the other ranks may take to end after one was interrupted (all save together) or has
failed.
"""
CHOICES_SHOWN = 6
"""Numbers of ranks that a refusal names, the nearest ones."""


def num_ranks() -> int:
    """Ranks of this run, as torchrun (or `start_ranks`) says; 1 outside of it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def this_rank() -> int:
    """Number of this process among the ranks."""
    return int(os.environ.get("RANK", "0"))


@contextmanager
def process_group(end: Callable[[str], None] | None = None) -> Iterator[None]:
    """Join the other ranks for as long as the context lasts; nothing to do for a process on its
    own.

    If another rank fails, this one raises an OtherRankError with its message. end: given that
    message if this rank does not notice within seconds.
    """
    if num_ranks() == 1:
        yield
        return
    dist.init_process_group(timeout=TIMEOUT)  # gloo for tensors on the CPU, NCCL for those on GPUs.
    try:
        with shared_failures(end):
            yield
            dist.barrier()
    finally:
        dist.destroy_process_group()


def island_shape(
    count: int, num_workers: int, shard_size: int, replica_size: int
) -> tuple[int, int]:
    """(shards, replicas) of each island; a ValueError for a number of ranks that cannot hold the
    workers in such islands.

    A size of 0 takes as many ranks as there are for each worker.

    """
    shape = _shape(count, num_workers, shard_size, replica_size)
    if shape is None:
        most = (
            num_workers
            * max(shard_size, 1)
            * max(replica_size, 1)
            * (1 if shard_size and replica_size else max(4, count))
        )
        possible = [
            ranks
            for ranks in range(1, most + 1)
            if _shape(ranks, num_workers, shard_size, replica_size)
        ]
        nearest = sorted(sorted(possible, key=lambda ranks: abs(ranks - count))[:CHOICES_SHOWN])
        workers = f"{num_workers} workers" if num_workers > 1 else "1 worker"
        sizes = (
            f" with placement.shard_size {shard_size} and placement.replica_size {replica_size}"
            if (shard_size, replica_size) != (1, 1)
            else ""
        )
        raise ValueError(
            f"{count} ranks cannot share {workers}{sizes}; start {' or '.join(map(str, nearest))} ranks, or ask for more workers"
        )
    return shape


def _shape(
    count: int, num_workers: int, shard_size: int, replica_size: int
) -> tuple[int, int] | None:
    spare = max(1, count // (num_workers * max(shard_size, replica_size, 1)))
    shards, replicas = shard_size or spare, replica_size or spare
    fits = (
        count >= 1
        and count % (shards * replicas) == 0
        and count // (shards * replicas) <= num_workers
    )
    return (shards, replicas) if fits else None


def place(
    num_workers: int,
    device: str | torch.device = "cpu",
    threads: int = 0,
    shard_size: int = 1,
    replica_size: int = 1,
    must_agree: Mapping[str, str] | None = None,
) -> Placement:
    """All workers here, or a share of them if this process is one of several ranks, inside of
    `process_group`.

    device: "cuda" is the GPU of this rank. threads: workers that run at once; 0: one per core.
    shard_size, replica_size: ranks over which a worker is sharded (FSDP2), and copies of it whose
    gradients are summed (DDP, HSDP); 0: as many as there are ranks for each worker. ValueError for
    a number of ranks that cannot hold the workers in such islands, and for arguments or other
    settings (must_agree: by name) that differ between ranks.
    """
    shards, replicas = island_shape(num_ranks(), num_workers, shard_size, replica_size)
    device = torch.device(device)
    if not dist.is_initialized():
        if num_ranks() > 1:
            raise ValueError(
                "this process is one of several ranks; call place inside `with adloco.process_group():`"
            )
        return OneProcess(device, threads)
    sizes = {
        "num_workers": num_workers,
        "placement.shard_size": shard_size,
        "placement.replica_size": replica_size,
    }
    _check_agreement({name: str(size) for name, size in sizes.items()} | dict(must_agree or {}))
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if device.index >= torch.cuda.device_count():
            found = torch.cuda.device_count()
            raise ValueError(
                f"this is rank {device.index} of its machine, which has {found} GPUs; start at most {found} ranks on it, or use the device cpu"
            )
        torch.cuda.set_device(device)
    return Ranks(num_workers, device, threads, shards, replicas)


def _check_agreement(mine: dict[str, str]) -> None:
    box = [mine]
    dist.broadcast_object_list(box)
    differing = [name for name, value in box[0].items() if mine.get(name) != value]
    if differing:
        raise ValueError(
            f"{', '.join(differing)} differs between ranks; start all of them with the same recipe, flags and code"
        )


def start_ranks(count: int, words: Sequence[str]) -> int:
    """Run `python -m adloco WORDS` on that many ranks of this machine and return the exit code of
    the first that fails, or 0; INTERRUPTED if it was.

    Ctrl+C reaches every rank once; ranks that outlive a failed one are ended. No rank outlives this
    call.
    """
    # The store at which the ranks meet is kept here, so that it outlives any of them.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    meeting = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    shared = meeting | {"WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    ranks: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for rank in ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    before = {
        number: signal.signal(number, pass_on)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        for number in range(count):
            # Sessions of their own: the terminal's Ctrl+C reaches this process, which passes it on
            # once.
            environment = os.environ | shared | _numbers(number)
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "adloco", *words],
                    env=environment,
                    start_new_session=True,
                )
            )
        code = _wait(
            ranks,
            lambda rank, number: report_failure(store, f"rank {rank} was ended by signal {number}"),
        )
        return INTERRUPTED if code and received else code
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _numbers(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def _wait(ranks: Sequence[subprocess.Popen[bytes]], on_killed: Callable[[int, int], None]) -> int:
    """on_killed: given a rank and the signal that ended it, which it could not tell the others
    itself.
    """
    first_failure, deadline = 0, float("inf")
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        codes = [code for code in (rank.poll() for rank in ranks) if code]
        if codes and not first_failure:
            first_failure = codes[0]
            if first_failure < 0:
                on_killed(
                    next(
                        number for number, rank in enumerate(ranks) if rank.poll() == first_failure
                    ),
                    -first_failure,
                )
            deadline = time.monotonic() + (
                SAVING_SECONDS if first_failure == INTERRUPTED else FAILING_SECONDS
            )
        time.sleep(0.05)
    codes = [code for code in (rank.poll() for rank in ranks) if code]
    return first_failure or (codes[0] if codes else 0)
