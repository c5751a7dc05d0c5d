"""The order of samples: (seed, stream, position) alone determine the sample at that position
(docs/method.md).

Stream s of S owns the samples s, s + S, s + 2S, ... Each pass over them (an epoch of that stream)
has its own permutation. So no sample comes twice in an epoch, whatever the batch schedule; to
resume, a checkpoint needs one integer per stream; and a merge moves a stream to another worker by
that integer.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from adloco.errors import require


class StreamOrder:
    """The order of `num_samples` samples in `num_streams` disjoint streams."""

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
