"""Memory of a device: whether an error says that it ran out, and giving back what is cached."""

import contextlib
import ctypes
import gc
import sys

import torch


def ran_out_of_memory(error: RuntimeError) -> bool:
    """Whether an allocator of torch has raised this."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(
        error
    )  # The CPU's has no class of its own.


def free_memory(device: torch.device) -> None:
    """Give back what no tensor holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        trim_host_memory()


def trim_host_memory() -> None:
    """Give the system back what the C library keeps of freed host memory."""
    if sys.platform == "linux":
        with contextlib.suppress(
            OSError, AttributeError
        ):  # Other C libraries than glibc keep nothing, or cannot be asked.
            ctypes.CDLL(None).malloc_trim(0)
