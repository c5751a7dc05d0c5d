"""A helper for tests: runs a function on several gloo ranks of this machine."""

import faulthandler
import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes


def run_on_ranks(
    function: Callable[..., Any], num_ranks: int, *arguments: Any, timeout_seconds: float = 120.0
) -> list[Any]:
    """Run a function on several ranks, and return what it returned on each of them, in order.

    The ranks are forked from a server that has only imported torch. That takes a tenth of the time
    of a fresh interpreter, and the ranks inherit nothing from the caller. They meet at a file, so
    tests never compete for a port.

    Args:
        function: Must be importable by name.
        timeout_seconds: How long the ranks may take.

    Raises:
        ProcessRaisedException: A rank failed; the message has its traceback.
        ProcessExitedException: A rank was killed or crashed.
        TimeoutError: They did not end in time.
    """
    # The first optimizer of a process imports torch._dynamo, which takes half a second.
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        ["adloco", "torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo"]
    )
    with tempfile.TemporaryDirectory() as folder:
        given = (Path(folder), num_ranks, timeout_seconds, function, arguments)
        ranks = start_processes(
            _rank, given, num_ranks, join=False, daemon=True, start_method="forkserver"
        )
        deadline = time.monotonic() + timeout_seconds
        try:
            while not ranks.join(max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"the ranks did not end within {timeout_seconds} seconds")
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
        return [pickle.loads(_result(Path(folder), rank).read_bytes()) for rank in range(num_ranks)]


def _rank(
    rank: int,
    folder: Path,
    num_ranks: int,
    timeout_seconds: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    faulthandler.enable()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout_seconds),
    )
    try:
        result = function(*arguments)
    except Exception as error:
        if "by peer" in str(error):  # "Connection closed by peer", or reset.
            time.sleep(5)  # The rank that closed it has failed first, and is the one to be shown.
        raise
    except BaseException as error:  # torch shows Exceptions alone, and pytest's Failed is none.
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    dist.barrier()
    dist.destroy_process_group()
    # torch's own pickling would share memory of a process that has ended by then.
    _result(folder, rank).write_bytes(pickle.dumps(result))


def _result(folder: Path, rank: int) -> Path:
    """The file of what the function returned on a rank."""
    return folder / f"result-{rank}"
