"""Memory of a device: recognising errors that say it ran out, and freeing what is cached."""

import contextlib
import ctypes
import gc
import sys

import torch


def ran_out_of_memory(error: RuntimeError) -> bool:
    """True if an allocator of torch has raised the error."""
    # The error of the CPU's allocator has no class of its own.
    on_cpu = "can't allocate memory" in str(error)
    return isinstance(error, torch.OutOfMemoryError) or on_cpu


def free_memory(device: torch.device) -> None:
    """Return cached memory that no tensor uses any more to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        trim_host_memory()


def trim_host_memory() -> None:
    """Return freed host memory that the C library keeps to the operating system."""
    if sys.platform == "linux":
        # C libraries other than glibc have no malloc_trim.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
