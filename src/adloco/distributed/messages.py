"""States that ranks send each other: plain values as JSON, tensors as their bytes; no pickle.

A rank that unpickled what another one sent would run whatever code is in it.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from adloco.distributed.plain_state import join_state, split_state

State = TypeVar("State")


def broadcast_state(state: State, source: int = 0) -> State:
    """Return the state of rank `source` on every rank; its tensors are on the CPU elsewhere.

    Args:
        state: What `plain_state` can split; only that of `source` is read.
        source: A rank of the default group, whose ranks all call this.
    """
    if dist.get_rank() == source:
        _give(state, lambda part: dist.broadcast(part, source))
    else:
        state = _take(lambda part: dist.broadcast(part, source))
    return state


def all_states(state: State) -> list[State]:
    """The states of all ranks, in the order of the ranks, on every rank; for small ones."""
    if not dist.is_initialized():
        return [state]
    return [broadcast_state(state, rank) for rank in range(dist.get_world_size())]


def send_state(state: Any, receiver: int) -> None:
    """Send a state to a rank that calls `receive_state`."""
    _give(state, lambda part: dist.send(part, receiver))


def receive_state(sender: int) -> Any:
    """Receive the state that a rank sends by `send_state`; its tensors are on the CPU."""
    return _take(lambda part: dist.recv(part, sender))


def _give(state: Any, transfer: Callable[[Tensor], Any]) -> None:
    """Hand the parts of a message to a collective: size of the text, text, each tensor."""
    plain, tensors = split_state(state)
    shapes = [
        [path, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for path, tensor in tensors.items()
    ]
    text = json.dumps([plain, shapes]).encode()
    device = message_device()
    transfer(torch.tensor([len(text)], device=device))
    transfer(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device))
    for tensor in tensors.values():
        if tensor.numel():
            transfer(as_bytes(tensor.detach().to(device)))


def _take(transfer: Callable[[Tensor], Any]) -> Any:
    """Let a collective fill the parts of a message, and return the state in it."""
    device = message_device()
    size = torch.zeros(1, dtype=torch.int64, device=device)
    transfer(size)
    text = torch.empty(int(size), dtype=torch.uint8, device=device)
    transfer(text)
    plain, shapes = json.loads(text.cpu().numpy().tobytes())
    tensors = {}
    for path, dtype, shape in shapes:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        if tensor.numel():
            transfer(as_bytes(tensor))
        tensors[path] = tensor.cpu()
    return join_state(plain, tensors)


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a tensor, as a row of bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def message_device() -> torch.device:
    """The CPU if the default group reaches it, else this rank's GPU."""
    reaches_cpu = "cpu:" in dist.get_backend_config()
    return torch.device("cpu") if reaches_cpu else torch.device("cuda", torch.cuda.current_device())
