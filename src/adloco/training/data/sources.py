"""Sources: samples by stream and position, from tensors in memory or from a file of tokens."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adloco.rules.checks import require
from adloco.training.data.order import StreamOrder


class TensorSource:
    """Samples that are rows of tensors; a batch is a tuple of them, or the tensor itself if there is one."""

    def __init__(self, *tensors: Tensor, num_streams: int, seed: int = 0) -> None:
        require(len(tensors) > 0, "TensorSource needs at least one tensor")
        require(len({len(tensor) for tensor in tensors}) == 1, f"tensors must have the same length, got {[len(tensor) for tensor in tensors]}")
        self.tensors = tensors
        self.num_streams = num_streams
        self._order = StreamOrder(num_samples=len(tensors[0]), num_streams=num_streams, seed=seed)

    def read(self, stream: int, position: int, count: int) -> Any:
        rows = torch.from_numpy(self._order.indices(stream, position, count))
        batch = tuple(tensor[rows] for tensor in self.tensors)
        return batch if len(batch) > 1 else batch[0]


class TokenSource:
    """Windows of context + 1 tokens from one long array; neighbours share one token, so that each token is predicted once an epoch."""

    def __init__(self, tokens: NDArray[Any], *, context_tokens: int, num_streams: int = 1, seed: int = 0) -> None:
        self.tokens = tokens
        self.context_tokens = context_tokens
        self.num_streams = num_streams
        self.num_windows = max(0, (len(tokens) - 1) // context_tokens)
        self._order = StreamOrder(num_samples=self.num_windows, num_streams=num_streams, seed=seed)

    def read(self, stream: int, position: int, count: int) -> Tensor:
        """Token ids, int64 [count, context + 1]."""
        return self.windows(self._order.indices(stream, position, count))

    def windows(self, indices: NDArray[np.int64]) -> Tensor:
        """These windows, int64 [len(indices), context + 1]."""
        starts = indices[:, None] * self.context_tokens + np.arange(self.context_tokens + 1)
        return torch.from_numpy(self.tokens[starts].astype(np.int64))
