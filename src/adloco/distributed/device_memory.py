"""Memory of a device: recognising errors that say it ran out, and freeing what is cached."""

import contextlib
import ctypes
import gc
import sys

import torch


def ran_out_of_memory(error: RuntimeError) -> bool:
    """True if an allocator has raised the error."""
    # Only torch's own allocator for GPUs has a class of errors.
    return isinstance(error, torch.OutOfMemoryError) or any(
        sign in str(error)
        for sign in (
            "can't allocate memory",
            "CUDA error: out of memory",
            "CUBLAS_STATUS_ALLOC_FAILED",
        )
    )


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
