"""Batches on a device, mixed precision, and what a device computes natively."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adloco.errors import require

STREAMS = 32
"""Streams of a GPU that torch has; a new one is the next of them, in turn."""


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """A context for mixed precision in this data type; without one, a context that does nothing."""
    return torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()


def new_stream(device: torch.device) -> Any:
    """A stream of a GPU: a queue of work that is computed beside that of other streams. None
    elsewhere.
    """
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """A context whose work is queued in this stream, after all that was queued before the context
    and before all that is queued after it. None: as without the context.
    """
    if stream is None:
        yield
        return
    outside = torch.cuda.current_stream(stream.device)
    stream.wait_stream(outside)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        outside.wait_stream(stream)


def used_here(tensors: Sequence[Tensor]) -> None:
    """Say that the current stream uses tensors that may have been made in another one, which would
    otherwise reuse their memory as soon as they are gone.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


def own_random_numbers() -> AbstractContextManager[None]:
    """A context in which torch's generators may be seeded: they are put back at its end."""
    begun = torch.cuda.is_initialized()
    devices = range(torch.cuda.device_count()) if begun else []
    return torch.random.fork_rng(devices)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move a batch to the device: any nesting of tuples, lists and dictionaries of tensors, and of
    objects that have a method `to`, such as a PackedSequence.
    """
    if isinstance(batch, Tensor):
        return (pinned(batch) if device.type == "cuda" else batch).to(device, non_blocking=True)
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        moved = [to_device(value, device) for value in batch]
        kind: Any = type(batch)
        return kind(*moved) if hasattr(batch, "_fields") else kind(moved)  # A named tuple.
    return batch


def require_samples(batch: Any, stream: int, position: int, count: int) -> None:
    """Raise ValueError if a source has given fewer samples than it was asked for, as far as it
    shows: all tensors have the same first size, which is less, and no size is the right one.
    """
    sizes = [*_sizes(batch)]
    first = {each[0] for each in sizes if each}
    require(
        len(first) != 1 or min(first) >= count or any(count in each for each in sizes),
        f"data.read(stream={stream}, position={position}, count={count}) must give {count} samples "
        f"(after the last one the first one again), got tensors with sizes of {sizes}",
    )


def _sizes(batch: Any) -> Iterator[tuple[int, ...]]:
    """The sizes of the tensors in a batch, and the length of a list of them; none of an object with
    its own `to`, which may keep samples in any way.
    """
    if isinstance(batch, Tensor):
        yield tuple(batch.shape)
    elif isinstance(batch, Mapping | tuple | list) and not hasattr(batch, "to"):
        if isinstance(batch, list):
            yield (len(batch),)
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _sizes(part)


def pinned(batch: Tensor) -> Tensor:
    """A batch for a copy to a GPU that waits for nothing: from pageable memory it would wait for
    all that the GPU has to do before. A copy of the batch, which its owner may write into again.
    """
    return batch if batch.is_cuda else torch.empty_like(batch, pin_memory=True).copy_(batch)


def read_later(numbers: Tensor) -> Callable[[], list[float]]:
    """Copy numbers to the host while their device goes on.

    Returns:
        A function that waits for the copy, and not for what the device is given meanwhile.
    """
    if not numbers.is_cuda:
        return numbers.tolist
    own = torch.empty_like(numbers, device="cpu", pin_memory=True)
    own.copy_(numbers, non_blocking=True)
    copied = torch.cuda.Event()
    # The current stream may be another device's.
    copied.record(torch.cuda.current_stream(numbers.device))

    def read() -> list[float]:
        copied.synchronize()
        return own.tolist()

    return read


@functools.cache
def native_bf16(device: torch.device) -> bool:
    """True if the device has instructions for bf16. Without them torch emulates it: on CPUs 3x
    slower than fp32, and products of matrices 60x (measured).
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and any(
        flag in cpuinfo.read_text() for flag in ("avx512_bf16", "amx_bf16")
    )
