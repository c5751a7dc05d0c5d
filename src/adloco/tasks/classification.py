"""Sequence classification: labelled texts that are cut at a number of tokens, cross-entropy of the
label, and accuracy on a balanced evaluation set.

The texts of a batch are padded to its longest text. The attention mask hides the padding, so it
enters neither the loss nor a gradient.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adloco.algorithms.method import Source
from adloco.data.order import StreamOrder
from adloco.data.rows import left_out
from adloco.data.tokenizers import Tokenizer, make_tokenizer
from adloco.distributed.device import to_device
from adloco.errors import require
from adloco.tasks.kinds.classification_settings import ClassificationSettings
from adloco.tasks.labelled_texts import (
    TEXTS_AT_ONCE,
    LabelledSource,
    LabelledTexts,
)
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
    train, validation = (
        LabelledTexts.read(data, split, settings.label_column, own)
        for split in ("validation" if everything else "train", "validation")
    )
    # Without a validation split both read the same rows, so each has counted every row that
    # was left out.
    skipped = (
        train.skipped + validation.skipped
        if data.validation_split
        else train.skipped | validation.skipped
    )
    if not everything:
        few, many = len(set(train.labels)), len(set(validation.labels))
        advice = (
            "data.samples takes the first rows, which may be sorted by label: raise it, or "
            "shuffle the rows"
        )
        require(
            few > 1 and few >= many,
            f"the texts to train on have {few} classes, but there are {max(many, 2)} or more; "
            f"{advice}",
        )
    return Classification(
        train,
        validation,
        validation.balanced(0 if everything else settings.evaluation_per_class, train.num_classes),
        own,
        skipped,
    )


class Classification:
    """Sequence classification of labelled texts."""

    def __init__(
        self,
        train: LabelledTexts,
        validation: LabelledTexts,
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

    def rows_read(self) -> int | None:
        return None

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
