"""What a device needs of a batch and of a forward pass."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def autocast(
    device: torch.device, dtype: torch.dtype | None
) -> contextlib.AbstractContextManager[Any]:
    """Mixed precision in this data type, or none."""
    return torch.autocast(device.type, dtype) if dtype else contextlib.nullcontext()


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch of tensors, in any nesting of tuples, lists and dictionaries, on the device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return type(batch)(to_device(value, device) for value in batch)  # type: ignore[call-arg]
    return batch
