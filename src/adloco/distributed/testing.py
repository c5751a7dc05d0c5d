"""A helper for tests: runs a function on several gloo ranks of this machine."""

import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_on_ranks(
    function: Callable[..., Any], num_ranks: int, *arguments: Any, timeout_seconds: float = 120.0
) -> list[Any]:
    """Run a function on several ranks, and return what it returned on each of them.

    The ranks are forked from a server that has only imported torch. That takes a tenth of the time
    of a fresh interpreter, and the ranks inherit nothing from the caller. They meet at a file, so
    tests never compete for a port.

    Args:
        function: Must be importable by name.
        num_ranks: How many ranks to start.
        arguments: Passed to the function.
        timeout_seconds: How long the ranks may take.

    Returns:
        The results in the order of the ranks.

    Raises:
        RuntimeError: A rank failed, with its traceback in the message, or did not end in time.
    """
    context = multiprocessing.get_context("forkserver")
    # The first optimizer of a process imports torch._dynamo, which takes half a second.
    context.set_forkserver_preload(
        ["adloco", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo"]
    )
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        rendezvous = str(Path(folder) / "rendezvous")
        ranks = [
            context.Process(
                target=_rank,
                args=(sender, rendezvous, rank, num_ranks, timeout_seconds, function, arguments),
                daemon=True,
            )
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process, (_, sender) in zip(ranks, pipes, strict=True):
            process.start()
            sender.close()  # So a rank that dies is noticed as the end of its pipe.
        try:
            return _results([receiver for receiver, _ in pipes], timeout_seconds, Path(folder))
        finally:
            for process in ranks:
                process.terminate()
                process.join()


def _results(receivers: Sequence[Connection], timeout_seconds: float, folder: Path) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        waiting = [receiver for rank, receiver in enumerate(receivers) if rank not in results]
        ready = multiprocessing.connection.wait(waiting, timeout_seconds)
        if not ready:
            missing = [rank for rank in range(len(receivers)) if rank not in results]
            raise RuntimeError(f"ranks {missing} did not end within {timeout_seconds} seconds")
        rank = receivers.index(ready[0])
        try:
            failed, results[rank] = pickle.loads(receivers[rank].recv_bytes())
        except EOFError:
            failed, results[rank] = (
                True,
                f"the process died\n{_crash_report(folder, rank).read_text()}",
            )
        if failed:
            raise RuntimeError(f"rank {rank} failed:\n{results[rank]}")
    return [results[rank] for rank in range(len(receivers))]


def _rank(
    sender: Connection,
    rendezvous: str,
    rank: int,
    num_ranks: int,
    timeout_seconds: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    faulthandler.enable(_crash_report(Path(rendezvous).parent, rank).open("w"))
    try:
        limit = timedelta(seconds=timeout_seconds)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=num_ranks,
            timeout=limit,
        )
        result = function(*arguments)
        dist.barrier()
        dist.destroy_process_group()
        # torch's own pickling would share memory of a process that has ended by then.
        sender.send_bytes(pickle.dumps((False, result)))
    except BaseException:
        sender.send_bytes(pickle.dumps((True, traceback.format_exc())))


def _crash_report(folder: Path, rank: int) -> Path:
    """The file for a rank's stack if its process crashes."""
    return folder / f"crash-{rank}"
