"""Sequence classification: labelled texts that are cut at a number of tokens, cross-entropy of the
label, and accuracy on a balanced evaluation set.

The texts of a batch are padded to its longest text. The attention mask hides the padding, so it
enters neither the loss nor a gradient.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adloco.algorithms.method import Source
from adloco.data.data_file import Row
from adloco.data.data_settings import DataSettings
from adloco.data.rows import Position, Split, left_out, open_rows, stages
from adloco.data.sources import StreamOrder
from adloco.data.token_store import SPLITS
from adloco.data.tokenizers import Tokenizer, make_tokenizer
from adloco.distributed.device import to_device
from adloco.errors import require
from adloco.models.transformers_versions import check_context
from adloco.tasks.kinds.classification_settings import ClassificationSettings
from adloco.tasks.task import TaskData


def open_classification(settings: ClassificationSettings, given: TaskData) -> "Classification":
    """Open the task with its data."""
    data, everything = given.data, given.everything
    data.require_context()
    require(
        not data.streaming,
        "data.streaming is for language models: a classification run reads its texts at the "
        "start; set it to false",
    )
    require(
        not data.tokenizer.startswith("bpe:"),
        f"data.tokenizer must be bytes or a Hugging Face tokenizer here, got {data.tokenizer!r}",
    )
    own = given.tokenizer or make_tokenizer(data.tokenizer, ())
    splits: tuple[Split, ...] = ("validation",) if everything else SPLITS
    texts, skipped = read_texts(data, settings.label_column, own, splits)
    train, validation = texts[splits[0]], texts["validation"]
    if not everything:
        trained, held_out = set(train.labels), set(validation.labels)
        advice = (
            "data.samples takes the first rows, which may be sorted by label: raise it, or "
            "shuffle the rows"
        )
        require(
            1 < len(trained) >= len(held_out),
            f"the texts to train on have {len(trained)} classes, but there are "
            f"{max(len(held_out), 2)} or more; {advice}",
        )
    return Classification(
        train,
        validation,
        validation.balanced(0 if everything else settings.evaluation_per_class, train.num_classes),
        own,
        skipped,
        trains=not everything,
    )


class Classification:
    """Sequence classification of labelled texts."""

    def __init__(
        self,
        train: "LabelledTexts",
        validation: "LabelledTexts",
        evaluated: NDArray[np.int64],
        tokenizer: Tokenizer,
        skipped: Counter[str],
        *,
        trains: bool,
    ) -> None:
        self.tokenizer = tokenizer
        self.corpus = hashlib.sha256(f"{train.digest} {validation.digest}".encode()).hexdigest()[
            :24
        ]
        self._train = train
        self._validation = validation
        self._evaluated = evaluated
        self._pad = tokenizer.padding
        self._skipped = skipped
        self._trains = trains
        self._num_texts = len(train) + len(validation)

    def matches_fingerprint(self, corpus: str) -> bool:
        return self.corpus == corpus

    def rows_read(self) -> int | None:
        return None

    def skipped(self) -> str:
        unseen = sorted({*self._validation.labels.tolist()} - {*self._train.labels.tolist()})
        said = [
            f"no text to train on has class {label}, of some to validate on" for label in unseen
        ]
        rows = self._num_texts + sum(self._skipped.values())
        return "; ".join(filter(None, [left_out(self._skipped, rows), *said[:1]]))

    def configure(self, config: Any) -> Any:
        if config.pad_token_id is None:
            config.pad_token_id = self._pad
        self._pad = config.pad_token_id
        most = int(max(np.diff(self._train.starts).max(), np.diff(self._validation.starts).max()))
        check_context(config, most, f"where texts have {most} tokens")
        classes = max(self._train.num_classes, self._validation.num_classes)
        require(
            self._trains or classes <= config.num_labels,
            f"a text is labelled {classes - 1}, but the model has {config.num_labels} classes, "
            "from 0",
        )
        if self._trains:
            config.num_labels = classes
        return config

    def train_source(self, num_streams: int, seed: int, least: int) -> Source:
        needed = max(least, num_streams)
        require(
            len(self._train) >= needed,
            f"the data has {len(self._train)} labelled texts, but one inner step needs {needed}; "
            "lower batch.initial",
        )
        texts = len(self._train)
        order = StreamOrder(num_samples=texts, num_streams=num_streams, seed=seed)
        return LabelledSource(self._train, self._pad, num_streams, order.indices)

    def num_train_samples(self, at_least: int) -> int:
        return len(self._train)

    def loss(self, model: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(_logits(model, batch), batch["labels"])

    def largest_source(self) -> Source:
        longest = np.diff(self._train.starts).argmax()
        return LabelledSource(
            self._train, self._pad, 1, lambda stream, position, count: np.full(count, longest)
        )

    def validate_model(self, model: Any, device: torch.device) -> str:
        return ""

    @torch.no_grad()
    def measure(
        self, model: nn.Module, device: torch.device, at_once: int, part: int = 0, parts: int = 1
    ) -> list[float]:
        model.eval()
        loss, correct, count = 0.0, 0.0, 0
        calls = math.ceil(math.ceil(len(self._evaluated) / parts) / min(at_once, TEXTS_AT_ONCE))
        for chunk in np.array_split(self._evaluated[part::parts], calls):
            batch = to_device(
                self._validation.batch(chunk if len(chunk) else self._evaluated[:1], self._pad),
                device,
            )
            logits = _logits(model, batch)
            if len(chunk):
                loss += float(nn.functional.cross_entropy(logits, batch["labels"], reduction="sum"))
                correct += float((logits.argmax(-1) == batch["labels"]).sum())
                count += len(chunk)
        return [loss, correct, count]


def _logits(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    logits: Tensor = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    ).logits.float()
    return logits


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


@dataclass(kw_only=True)
class _Reading:
    """What was read so far of a split."""

    ids: list[NDArray[np.int32]] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    digest: Any = field(default_factory=hashlib.sha256)


def read_texts(
    data: DataSettings,
    label_column: str,
    tokenizer: Tokenizer,
    splits: Sequence[Split] = SPLITS,
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
        for chunk in _chunks(((at, row) for at, row in rows if row is not None), TEXTS_AT_ONCE):
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


def _chunks(rows: Iterable[tuple[int, Row]], size: int) -> Iterator[list[tuple[int, Row]]]:
    iterator = iter(rows)
    while chunk := list(islice(iterator, size)):
        yield chunk
