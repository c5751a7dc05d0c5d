"""Sequence classification: labelled texts cut at a number of tokens, cross-entropy on the label,
accuracy on a balanced evaluation set.

Texts of a batch are padded to its longest one; the attention mask hides the padding, so that it
enters neither the loss nor a gradient.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adloco.algorithms.method import Source
from adloco.data.data_settings import DataSettings
from adloco.data.order import StreamOrder
from adloco.data.rows import left_out, read_rows
from adloco.data.tokenizers import Tokenizer, make_tokenizer
from adloco.distributed.device import to_device
from adloco.errors import require
from adloco.metrics import Metric, Unit
from adloco.models.source import Head
from adloco.tasks.evaluation_settings import EvaluationSettings
from adloco.tasks.task import Task

EXAMPLES_AT_ONCE = 64


@dataclass(frozen=True, kw_only=True)
class ClassificationSettings:
    """Predict the label of a text."""

    key: ClassVar[str] = "classification"

    head: ClassVar[Head] = "AutoModelForSequenceClassification"
    pipeline: ClassVar[str] = "text-classification"
    packed: ClassVar[bool] = False
    generates: ClassVar[bool] = False
    counted: ClassVar[str] = "texts"
    measures: ClassVar[tuple[Metric, ...]] = (
        Metric("loss", "loss", Unit("nats per text", ".4f"), panel="loss"),
        Metric("accuracy", "accuracy", Unit("", ".2%"), better="higher", panel="accuracy"),
    )

    label_column: str = "label"
    """Column that holds the label, a whole number from 0."""
    evaluation_per_class: int = 500
    """Validation texts of each class, the first of them; 0: all there are."""

    def __post_init__(self) -> None:
        require(
            self.evaluation_per_class >= 0,
            f"task.evaluation_per_class must be >= 0, got {self.evaluation_per_class}",
        )

    def measured(self, means: Sequence[float]) -> dict[str, float]:
        return dict(zip(("loss", "accuracy"), means, strict=True))

    def open(
        self,
        data: DataSettings,
        evaluation: EvaluationSettings,
        tokenizer: Tokenizer | None = None,
        *,
        everything: bool = False,
    ) -> Task:
        require(
            not data.streaming,
            "data.streaming is for language models: a classification run reads its texts at the "
            "start; set it to false",
        )
        require(
            not data.tokenizer.startswith("bpe:"),
            "data.tokenizer must be bytes or a Hugging Face tokenizer here, got "
            f"{data.tokenizer!r}",
        )
        own = tokenizer or make_tokenizer(data.tokenizer, ())
        train, validation = (
            Examples.read(data, split, self.label_column, own) for split in ("train", "validation")
        )
        # Without a validation split both come from the same rows, and each has counted all that
        # were left out.
        skipped = (
            train.skipped + validation.skipped
            if data.validation_split
            else train.skipped | validation.skipped
        )
        if everything:
            validation = train.joined(validation)
        else:
            few, many = len(set(train.labels)), len(set(validation.labels))
            advice = (
                "data.samples takes the first rows, which may be sorted by label: raise it, or "
                "shuffle the rows"
            )
            require(
                few > 1 and few >= many,
                f"the texts to train on have {few} of the {max(many, 2)} classes or more that "
                f"there are; {advice}",
            )
        return Classification(
            train,
            validation,
            validation.balanced(0 if everything else self.evaluation_per_class, train.num_classes),
            own,
            skipped,
        )


class Classification:
    """Sequence classification of labelled texts."""

    def __init__(
        self,
        train: "Examples",
        validation: "Examples",
        evaluated: NDArray[np.int64],
        tokenizer: Tokenizer,
        skipped: Counter[str],
    ) -> None:
        self.tokenizer = tokenizer
        self.corpus = hashlib.sha256(f"{train.digest} {validation.digest}".encode()).hexdigest()[
            :24
        ]
        self._train = train
        self._validation = validation
        self._evaluated = evaluated
        self._pad = tokenizer.end_of_text
        self._skipped = skipped
        self._num_texts = len(train) + len(validation)

    def matches_fingerprint(self, corpus: str) -> bool:
        return self.corpus == corpus

    def skipped(self) -> str:
        return left_out(self._skipped, self._num_texts + sum(self._skipped.values()))

    def configure(self, config: Any) -> Any:
        longest = getattr(config, "max_position_embeddings", math.inf)
        most = int(max(np.diff(self._train.starts).max(), np.diff(self._validation.starts).max()))
        require(
            most <= longest,
            f"data.context_tokens must be <= {longest}, the longest context of the model, where "
            f"texts have {most} tokens",
        )
        config.num_labels = max(self._train.num_classes, self._validation.num_classes)
        if config.pad_token_id is None:
            config.pad_token_id = self._pad
        self._pad = config.pad_token_id
        return config

    def train_source(self, num_streams: int, seed: int, least: int) -> Source:
        needed = max(least, num_streams)
        require(
            len(self._train) >= needed,
            f"the data has {len(self._train)} labelled texts, but one inner step needs {needed}; "
            "lower batch.initial",
        )
        return ExampleSource(self._train, self._pad, num_streams, seed)

    def loss(self, model: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(_logits(model, batch), batch["labels"])

    def largest_source(self) -> Source:
        return Longest(self._train, self._pad)

    def validate_model(self, model: Any, device: torch.device) -> str:
        return ""

    @torch.no_grad()
    def measure(
        self, model: nn.Module, device: torch.device, at_once: int, part: int = 0, parts: int = 1
    ) -> list[float]:
        model.eval()
        loss, correct, count = 0.0, 0.0, 0
        calls = math.ceil(math.ceil(len(self._evaluated) / parts) / min(at_once, EXAMPLES_AT_ONCE))
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


class ExampleSource:
    """Batches of labelled texts, by stream and position."""

    def __init__(self, examples: "Examples", pad: int, num_streams: int, seed: int) -> None:
        self.num_streams = num_streams
        self._examples = examples
        self._pad = pad
        self._order = StreamOrder(num_samples=len(examples), num_streams=num_streams, seed=seed)

    def read(self, stream: int, position: int, count: int) -> dict[str, Tensor]:
        return self._examples.batch(self._order.indices(stream, position, count), self._pad)


class Longest:
    """Batches of the longest text."""

    num_streams = 1

    def __init__(self, examples: "Examples", pad: int) -> None:
        self._examples = examples
        self._pad = pad

    def read(self, stream: int, position: int, count: int) -> dict[str, Tensor]:
        return self._examples.batch(
            np.full(count, np.diff(self._examples.starts).argmax()), self._pad
        )


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Labelled texts as token ids.

    `ids` are those of all texts, one after another; `starts` are the places where each text begins,
    and the end.
    """

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    labels: NDArray[np.int64]
    digest: str
    skipped: Counter[str]
    """How many rows were left out, by reason."""

    @staticmethod
    def read(data: DataSettings, split: Any, label_column: str, tokenizer: Tokenizer) -> "Examples":
        """The rows of a split, each cut at data.context_tokens tokens."""
        digest, labels, lengths, ids = hashlib.sha256(), [], [], []
        rows = read_rows(data, split, {data.text_column: str, label_column: int})
        for chunk in _chunks(rows, EXAMPLES_AT_ONCE):
            texts = [row[data.text_column] for row in chunk]
            for row, encoded in zip(
                chunk, tokenizer.encode_whole(texts, data.context_tokens), strict=True
            ):
                label = row[label_column]
                require(
                    label >= 0,
                    f"column {label_column!r} must hold whole numbers from 0, got {label}; set "
                    "task.label_column to another",
                )
                digest.update(
                    f"{label} {len(row[data.text_column])} {row[data.text_column]}".encode()
                )
                labels.append(label)
                lengths.append(len(encoded))
                ids.append(np.array(encoded, dtype=np.int32))
        require(bool(labels), f"{data.source} has no labelled text to use for {split}")
        return Examples(
            ids=np.concatenate(ids),
            starts=np.cumsum([0, *lengths]),
            labels=np.array(labels),
            digest=digest.hexdigest()[:24],
            skipped=rows.skipped,
        )

    @property
    def num_classes(self) -> int:
        return int(self.labels.max()) + 1

    def __len__(self) -> int:
        return len(self.labels)

    def joined(self, other: "Examples") -> "Examples":
        """These and then the other ones."""
        return Examples(
            ids=np.concatenate([self.ids, other.ids]),
            starts=np.concatenate([self.starts, other.starts[1:] + self.starts[-1]]),
            labels=np.concatenate([self.labels, other.labels]),
            digest=self.digest + other.digest,
            skipped=self.skipped | other.skipped,
        )

    def balanced(self, per_class: int, classes: int) -> NDArray[np.int64]:
        """Numbers of the first so many examples of each class, all for 0; ValueError if a class has
        fewer.
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
        """input_ids and attention_mask, int64 [samples, longest], and labels, int64 [samples]."""
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
