"""Labelled texts as token ids, and batches of them by stream and position."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adloco.data.data_settings import DataSettings
from adloco.data.rows import Split, read_rows
from adloco.data.tokenizers import Tokenizer
from adloco.errors import require

TEXTS_AT_ONCE = 64
"""Texts that are tokenised together."""


class LabelledSource:
    """Batches of labelled texts, by stream and position.

    Args:
        texts: The texts.
        pad: Token id that fills shorter texts.
        num_streams: Number of streams.
        numbers: (stream, position, count) -> the numbers of the texts there.
    """

    def __init__(
        self,
        texts: "LabelledTexts",
        pad: int,
        num_streams: int,
        numbers: Callable[[int, int, int], NDArray[np.int64]],
    ) -> None:
        self.num_streams = num_streams
        self._texts, self._pad, self._numbers = texts, pad, numbers

    def read(self, stream: int, position: int, count: int) -> dict[str, Tensor]:
        return self._texts.batch(self._numbers(stream, position, count), self._pad)


@dataclass(frozen=True, kw_only=True)
class LabelledTexts:
    """Texts as token ids, with their labels."""

    ids: NDArray[np.int32]
    """Token ids of all texts, one text after another."""
    starts: NDArray[np.int64]
    """Index in `ids` at which each text begins, and at last the length of `ids`: [texts + 1]."""
    labels: NDArray[np.int64]
    """The class of each text, from 0: [texts]."""
    digest: str
    """Equal for equal texts and labels, whatever the tokenizer."""
    skipped: Counter[str]
    """Number of rows that were left out, by reason."""

    @staticmethod
    def read(
        data: DataSettings, split: Split, label_column: str, tokenizer: Tokenizer
    ) -> "LabelledTexts":
        """The rows of a split, each cut at data.context_tokens tokens.

        Raises:
            ValueError: A row is bad while data.bad_rows is "error", or none is left.
        """
        digest, labels, lengths, ids = hashlib.sha256(), [], [], []
        rows = read_rows(data, split, {data.text_column: str, label_column: int})
        for chunk in _chunks(rows, TEXTS_AT_ONCE):
            texts = [row[data.text_column] for row in chunk]
            for row, encoded in zip(
                chunk, tokenizer.encode_whole(texts, data.context_tokens), strict=True
            ):
                label = row[label_column]
                digest.update(
                    f"{label} {len(row[data.text_column])} {row[data.text_column]}".encode()
                )
                labels.append(label)
                lengths.append(len(encoded))
                ids.append(np.array(encoded, dtype=np.int32))
        require(bool(labels), f"{data.source} has no labelled text to use for {split}")
        return LabelledTexts(
            ids=np.concatenate(ids),
            starts=np.cumsum([0, *lengths]),
            labels=np.array(labels),
            digest=digest.hexdigest()[:24],
            skipped=rows.skipped,
        )

    @property
    def num_classes(self) -> int:
        """One more than the largest label."""
        return int(self.labels.max()) + 1

    def __len__(self) -> int:
        return len(self.labels)

    def balanced(self, per_class: int, classes: int) -> NDArray[np.int64]:
        """The numbers of the first texts of each class, in ascending order.

        Args:
            per_class: Texts to take of each class; 0: all texts.
            classes: Number of classes that must be there, even if no text here has the last ones.

        Raises:
            ValueError: A class has fewer texts than `per_class`.
        """
        each = [
            np.flatnonzero(self.labels == label) for label in range(max(classes, self.num_classes))
        ]
        if per_class == 0:
            return np.arange(len(self))
        for label, numbers in enumerate(each):
            advice = (
                "lower it (0: all there are), or hold out more with data.validation_samples or "
                "data.validation_split"
            )
            require(
                len(numbers) >= per_class,
                f"task.evaluation_per_class is {per_class}, but class {label} has {len(numbers)} "
                f"texts; {advice}",
            )
        return np.sort(np.concatenate([numbers[:per_class] for numbers in each]))

    def batch(self, numbers: NDArray[np.int64], pad: int) -> dict[str, Tensor]:
        """The texts of these numbers, padded to the longest of them.

        Returns:
            input_ids and attention_mask, int64 [samples, longest], and labels, int64 [samples].
        """
        texts = [self.ids[self.starts[number] : self.starts[number + 1]] for number in numbers]
        longest = max(map(len, texts))
        ids, mask = (
            torch.full((len(texts), longest), pad),
            torch.zeros(len(texts), longest, dtype=torch.int64),
        )
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.from_numpy(text.astype(np.int64))
            mask[row, : len(text)] = 1
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": torch.from_numpy(self.labels[numbers]),
        }


def _chunks(rows: Iterable[Mapping[str, Any]], size: int) -> Iterator[list[Mapping[str, Any]]]:
    iterator = iter(rows)
    while chunk := list(islice(iterator, size)):
        yield chunk
