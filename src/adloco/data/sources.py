"""Sources: samples by stream and position, from tensors in memory, from a file of tokens, or from a
text that is still being fetched.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adloco.data.order import StreamOrder
from adloco.errors import require


class TensorSource:
    """Samples that are rows of tensors; a batch is a tuple of them, or the tensor itself if there
    is one.
    """

    def __init__(self, *tensors: Tensor, num_streams: int, seed: int = 0) -> None:
        require(len(tensors) > 0, "TensorSource needs at least one tensor")
        require(
            len({len(tensor) for tensor in tensors}) == 1,
            f"tensors must have the same length, got {[len(tensor) for tensor in tensors]}",
        )
        self.tensors = tensors
        self.num_streams = num_streams
        self._order = StreamOrder(num_samples=len(tensors[0]), num_streams=num_streams, seed=seed)

    def read(self, stream: int, position: int, count: int) -> Any:
        rows = torch.from_numpy(self._order.indices(stream, position, count))
        batch = tuple(tensor[rows] for tensor in self.tensors)
        return batch if len(batch) > 1 else batch[0]


class TokenSource:
    """Windows of context + 1 tokens from one long array; neighbours share one token, so that each
    token is predicted once an epoch.
    """

    def __init__(
        self, tokens: NDArray[Any], *, context_tokens: int, num_streams: int = 1, seed: int = 0
    ) -> None:
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
        return _windows(self.tokens, indices, self.context_tokens)


class StreamSource:
    """Windows of context + 1 tokens in the order of a text that is still being fetched; where it
    has ended, its streams begin again.

    Stream s of S owns the windows s, s + S, ... There is no permutation, as nobody knows the end.

    """

    def __init__(
        self,
        tokens_at_least: Callable[[int], NDArray[Any]],
        *,
        context_tokens: int,
        num_streams: int,
    ) -> None:
        """tokens_at_least: count -> the tokens so far, that many at least, unless the text ends
        before.
        """
        self.context_tokens = context_tokens
        self.num_streams = num_streams
        self._tokens_at_least = tokens_at_least

    def read(self, stream: int, position: int, count: int) -> Tensor:
        """Token ids, int64 [count, context + 1]."""
        wanted = stream + np.arange(position, position + count, dtype=np.int64) * self.num_streams
        tokens = self._tokens_at_least(int(wanted[-1] + 1) * self.context_tokens + 1)
        windows = (len(tokens) - 1) // self.context_tokens
        # Beyond the last window the text has ended, so that their number is final.
        own = len(range(stream, windows, self.num_streams))
        indices = np.where(
            wanted < windows, wanted, stream + (wanted // self.num_streams) % own * self.num_streams
        )
        return _windows(tokens, indices, self.context_tokens)


def _windows(tokens: NDArray[Any], indices: NDArray[np.int64], context_tokens: int) -> Tensor:
    starts = indices[:, None] * context_tokens + np.arange(context_tokens + 1)
    return torch.from_numpy(tokens[starts].astype(np.int64))
