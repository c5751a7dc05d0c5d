"""Labelled texts of a source, cut at a number of tokens, and batches of them."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from adloco.data.data_settings import DataSettings
from adloco.data.rows import Position, Split, open_rows, stages
from adloco.data.token_store import SPLITS
from adloco.data.tokenizers import Tokenizer
from adloco.errors import require

TEXTS_AT_ONCE = 64
"""Texts that are tokenised together."""


@dataclass(eq=False)
class LabelledSource:
    """Batches of labelled texts, by stream and position."""

    texts: "LabelledTexts"
    pad: int
    """Token id that fills shorter texts."""
    num_streams: int
    numbers: Callable[[int, int, int], NDArray[np.int64]]
    """(stream, position, count) -> the numbers of the texts there."""

    def read(self, stream: int, position: int, count: int) -> dict[str, Tensor]:
        return self.texts.batch(self.numbers(stream, position, count), self.pad)


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

    @property
    def num_classes(self) -> int:
        """One more than the largest label."""
        return int(self.labels.max()) + 1

    def __len__(self) -> int:
        return len(self.labels)

    def balanced(self, per_class: int, classes: int) -> NDArray[np.int64]:
        """The numbers of the first `per_class` texts of each class, in ascending order; 0: of all.

        classes: Number of classes that must be there, even if no text here has the last ones.

        Raises:
            ValueError: A class has fewer texts than `per_class`.
        """
        if per_class == 0:
            return np.arange(len(self))
        labels = range(max(classes, self.num_classes))
        each = [np.flatnonzero(self.labels == label) for label in labels]
        for label, numbers in enumerate(each):
            require(
                len(numbers) >= per_class,
                f"task.evaluation_per_class is {per_class}, but class {label} has {len(numbers)} "
                "texts; lower it (0: all there are), or hold out more with "
                "data.validation_samples or data.validation_split",
            )
        return np.sort(np.concatenate([numbers[:per_class] for numbers in each]))

    def batch(self, numbers: NDArray[np.int64], pad: int) -> dict[str, Tensor]:
        """The texts of these numbers, padded to the longest of them.

        Returns:
            input_ids and attention_mask, int64 [samples, longest], and labels, int64 [samples].
        """
        texts = [
            torch.from_numpy(self.ids[self.starts[number] : self.starts[number + 1]]).long()
            for number in numbers
        ]
        return {
            "input_ids": pad_sequence(texts, batch_first=True, padding_value=pad),
            "attention_mask": pad_sequence([*map(torch.ones_like, texts)], batch_first=True),
            "labels": torch.from_numpy(self.labels[numbers]),
        }


@dataclass(kw_only=True)
class _Reading:
    """What was read so far of a split."""

    ids: list[NDArray[np.int32]] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    digest: Any = field(default_factory=hashlib.sha256)


def read_texts(
    data: DataSettings, label_column: str, tokenizer: Tokenizer, splits: Sequence[Split] = SPLITS
) -> tuple[dict[Split, LabelledTexts], Counter[str]]:
    """The texts of these splits, each cut at data.context_tokens tokens, and the number of rows
    that were left out, by reason.

    Rows are read once: a function of the user's own could give others the next time, and what is
    held out would be trained on.

    Raises:
        ValueError: A row is bad while data.bad_rows is "error", or a split has no text.
    """
    found: dict[Split, _Reading] = {"train": _Reading(), "validation": _Reading()}
    skipped: Counter[str] = Counter()
    for stage in stages(data):
        rows = open_rows(data, stage, {data.text_column: str, label_column: int}, Position())
        taken = ((at, row) for at, row in rows if row is not None)
        while chunk := list(islice(taken, TEXTS_AT_ONCE)):
            texts = [row[data.text_column] for _, row in chunk]
            encoded = tokenizer.encode_whole(texts, data.context_tokens)
            for (at, row), text, ids in zip(chunk, texts, encoded, strict=True):
                reading, label = found[stage.split_of(at)], row[label_column]
                reading.ids.append(np.array(ids, dtype=np.int32))
                reading.labels.append(label)
                reading.digest.update(f"{label} {len(text)} {text}".encode())
        skipped += rows.position.skipped
    for split in splits:
        labelled = bool(found[split].labels)
        require(labelled, f"{data.source} has no labelled text to use for {split}")
    return {
        split: LabelledTexts(
            ids=np.concatenate(found[split].ids),
            starts=np.cumsum([0, *map(len, found[split].ids)]),
            labels=np.array(found[split].labels),
            digest=found[split].digest.hexdigest()[:24],
        )
        for split in splits
    }, skipped
