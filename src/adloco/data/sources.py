"""Sources of samples by stream and position: tensors, an array of tokens, a text being fetched."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adloco.data.data_settings import DataSettings
from adloco.errors import require


def hold_out_more(data: DataSettings) -> str:
    """Further advice if there is too little text to validate on."""
    own = "name another data.validation_split, take more of its rows (data.validation_samples)"
    part = "hold out more of it (data.validation_fraction, data.validation_samples)"
    return f", {own if data.validation_split else part} or lower data.context_tokens"


def check_one_window(data: DataSettings, tokens: int, use: str, advice: str) -> None:
    """Raise ValueError if there are too few tokens for one window.

    Args:
        use: A verb for the message, as in "train".
        advice: What to do besides giving more text.
    """
    # Each predicted token has one before it, so a window takes one token more.
    least = data.context_tokens + 1
    require(
        tokens >= least,
        f"{data.source} is too short for one window of {data.context_tokens} tokens: a window "
        f"takes {least}, and there are {tokens} to {use} on; give more text{advice}",
    )


class TensorSource:
    """A source whose samples are the rows of one or more tensors.

    Stream s of S owns the rows s, s + S, s + 2S, ...: shuffle rows whose kinds come in turns.
    """

    def __init__(self, *tensors: Tensor, num_streams: int, seed: int = 0) -> None:
        """Make a source.

        Args:
            tensors: Tensors with one row per sample, all of the same length.
            num_streams: Number of disjoint streams; a run needs one for each of its workers.
            seed: Seed of the order in each stream.

        Raises:
            ValueError: There is no tensor, lengths differ, or samples are fewer than streams.
        """
        lengths = [len(tensor) for tensor in tensors]
        require(
            len({*lengths}) == 1,
            f"TensorSource needs tensors, all of the same length, got lengths {lengths}",
        )
        self.tensors = tensors
        self.num_streams = num_streams
        self._order = StreamOrder(num_samples=len(tensors[0]), num_streams=num_streams, seed=seed)

    def read(self, stream: int, position: int, count: int) -> Any:
        """Read `count` samples.

        Returns:
            A tuple with `count` rows of each tensor, or only the rows if there is one tensor.
        """
        rows = torch.from_numpy(self._order.indices(stream, position, count))
        batch = tuple(tensor[rows] for tensor in self.tensors)
        return batch if len(batch) > 1 else batch[0]


class TokenSource:
    """A source whose samples are windows of context_tokens + 1 tokens of one array.

    Neighbouring windows share one token, so that each token is predicted once an epoch.
    """

    def __init__(
        self, tokens: NDArray[Any], *, context_tokens: int, num_streams: int = 1, seed: int = 0
    ) -> None:
        """Make a source; `TensorSource` says more of streams and seed.

        Args:
            tokens: Token ids, [tokens], of any integer type; may be a memory map.
            context_tokens: Tokens that a model sees of each sample.
        """
        self.tokens = tokens
        self.context_tokens = context_tokens
        self.num_streams = num_streams
        self.num_windows = max(0, (len(tokens) - 1) // context_tokens)
        self._order = StreamOrder(num_samples=self.num_windows, num_streams=num_streams, seed=seed)

    def read(self, stream: int, position: int, count: int) -> Tensor:
        """Read `count` windows: token ids, int64 [count, context_tokens + 1]."""
        return self.windows(self._order.indices(stream, position, count))

    def windows(self, indices: NDArray[np.int64]) -> Tensor:
        """The windows with these indices: token ids, int64 [len(indices), context_tokens + 1]."""
        return _windows(self.tokens, indices, self.context_tokens)


@dataclass(eq=False)
class StreamSource:
    """A source whose samples are windows of context_tokens + 1 tokens of a text as it is fetched.

    Stream s of S owns the windows s, s + S, ..., in the order of the text; once the text has ended,
    the stream begins again. Windows are not shuffled, because nobody knows where the text ends.
    """

    tokens_at_least: Callable[[int], NDArray[Any]]
    """Takes a number and returns all tokens so far, at least that many if the text has them."""
    context_tokens: int
    num_streams: int

    def read(self, stream: int, position: int, count: int) -> Tensor:
        """Read `count` windows: token ids, int64 [count, context_tokens + 1]."""
        wanted = stream + np.arange(position, position + count, dtype=np.int64) * self.num_streams
        tokens = self.tokens_at_least(int(wanted[-1] + 1) * self.context_tokens + 1)
        windows = (len(tokens) - 1) // self.context_tokens
        # A wanted window is missing only if the text has ended; `windows` is then final.
        own = len(range(stream, windows, self.num_streams))
        indices = np.where(
            wanted < windows, wanted, stream + (wanted // self.num_streams) % own * self.num_streams
        )
        return _windows(tokens, indices, self.context_tokens)


def _windows(tokens: NDArray[Any], indices: NDArray[np.int64], context_tokens: int) -> Tensor:
    starts = indices[:, None] * context_tokens + np.arange(context_tokens + 1)
    return torch.from_numpy(tokens[starts].astype(np.int64))


class StreamOrder:
    """The order of `num_samples` samples in `num_streams` disjoint streams.

    (seed, stream, position) alone determine the sample at that position.
    Stream s of S owns the samples s, s + S, s + 2S, ... Each pass over them (an epoch of that
    stream) has its own permutation. So no sample comes twice in an epoch, whatever the batch
    schedule; to resume, a checkpoint needs one integer per stream; and a merge moves a stream to
    another worker by that integer.
    """

    def __init__(self, *, num_samples: int, num_streams: int, seed: int) -> None:
        require(
            num_samples >= num_streams,
            f"the data has {num_samples} samples, fewer than one for each of {num_streams} streams",
        )
        self.num_samples = num_samples
        self.num_streams = num_streams
        self.seed = seed
        self._epoch = lru_cache(maxsize=2 * num_streams)(self._permutation)

    def indices(self, stream: int, position: int, count: int) -> NDArray[np.int64]:
        """Indices of the samples at position .. position + count - 1 of the stream, int64 [count].

        A position beyond the end of an epoch is in a later epoch.
        """
        length = len(range(stream, self.num_samples, self.num_streams))
        parts = []
        while count > 0:
            epoch, offset = divmod(position, length)
            taken = min(count, length - offset)
            parts.append(self._epoch(stream, epoch)[offset : offset + taken])
            position, count = position + taken, count - taken
        return np.concatenate(parts)

    def _permutation(self, stream: int, epoch: int) -> NDArray[np.int64]:
        own = np.arange(stream, self.num_samples, self.num_streams)
        return np.random.default_rng([self.seed, stream, epoch]).permutation(own)
