"""Sequence classification: labelled texts that are cut at a number of tokens, cross-entropy of the
label, and accuracy on a balanced evaluation set.

The texts of a batch are padded to its longest text. The attention mask hides the padding, so it
enters neither the loss nor a gradient.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adloco.algorithms.method import Source
from adloco.data.labelled_texts import TEXTS_AT_ONCE, LabelledSource, LabelledTexts, read_texts
from adloco.data.rows import Split, left_out
from adloco.data.sources import StreamOrder
from adloco.data.token_store import SPLITS
from adloco.data.tokenizers import Tokenizer, make_tokenizer
from adloco.distributed.device import to_device
from adloco.errors import require
from adloco.models.attention import check_context
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
    texts, bad_rows = read_texts(data, settings.label_column, own, splits)
    train, validation = texts[splits[0]], texts["validation"]
    if not everything:
        trained, held_out = set(train.labels), len(validation)
        others = int((~np.isin(validation.labels, train.labels)).sum())
        require(
            # Rare classes may be among those that are held out alone.
            len(trained) > 1 and others < held_out / 2,
            f"the texts to train on have {len(trained)} class{'es' * (len(trained) > 1)}, and "
            f"{others} of the {held_out} to validate on are of others; data.samples takes the "
            "first rows, which may be sorted by label: raise it, or shuffle the rows",
        )
    per_class = 0 if everything else settings.evaluation_per_class
    evaluated = validation.balanced(per_class, train.num_classes)
    return Classification(train, validation, evaluated, own, bad_rows, trains=not everything)


@dataclass(eq=False)
class Classification:
    """Sequence classification of labelled texts."""

    train: LabelledTexts
    validation: LabelledTexts
    evaluated: NDArray[np.int64]
    """The numbers of the texts of an evaluation."""
    tokenizer: Tokenizer
    bad_rows: Counter[str]
    trains: bool

    def __post_init__(self) -> None:
        self.pad = self.tokenizer.padding
        digests = f"{self.train.digest} {self.validation.digest}"
        self.corpus = hashlib.sha256(digests.encode()).hexdigest()[:24]

    def matches_fingerprint(self, corpus: str) -> bool:
        return self.corpus == corpus

    def rows_read(self) -> int | None:
        return None

    def skipped(self) -> str:
        texts = len(self.validation) + self.trains * len(self.train)
        rows = texts + self.bad_rows.total()
        said = [left_out(self.bad_rows, rows)]
        if unseen := {*self.validation.labels.tolist()} - {*self.train.labels.tolist()}:
            said.append(f"no text to train on has class {min(unseen)}, of some to validate on")
        return "; ".join(filter(None, said))

    def configure(self, config: Any) -> Any:
        if config.pad_token_id is None:
            config.pad_token_id = self.pad
        self.pad = config.pad_token_id
        most = int(max(np.diff(self.train.starts).max(), np.diff(self.validation.starts).max()))
        check_context(config, most, f"where texts have {most} tokens")
        classes = max(self.train.num_classes, self.validation.num_classes)
        require(
            self.trains or classes <= config.num_labels,
            f"a text is labelled {classes - 1}, but the model has {config.num_labels} classes, "
            "from 0",
        )
        if self.trains:
            config.num_labels = classes
            # Of several labels or of numbers, as the weights may have been before: transformers'
            # pipeline would give other scores than the softmax that is trained.
            config.problem_type = None
        return config

    def train_source(self, num_streams: int, seed: int, least: int) -> Source:
        texts, needed = len(self.train), max(least, num_streams)
        require(
            texts >= needed,
            f"the data has {texts} labelled texts, but one inner step needs {needed}; lower "
            "batch.initial",
        )
        order = StreamOrder(num_samples=texts, num_streams=num_streams, seed=seed)
        # Streams take every num_streams-th text: of labels in turns, each would have some alone.
        drawn = np.random.default_rng(seed).permutation(texts)
        return LabelledSource(
            self.train, self.pad, num_streams, lambda *place: drawn[order.indices(*place)]
        )

    def num_train_samples(self, at_least: int) -> int:
        return len(self.train)

    def loss(self, model: Any, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(_logits(model, batch), batch["labels"])

    def largest_source(self) -> Source:
        longest = np.diff(self.train.starts).argmax()
        return LabelledSource(
            self.train, self.pad, 1, lambda stream, position, count: np.full(count, longest)
        )

    def validate_model(self, model: Any, device: torch.device) -> str:
        return ""

    @torch.no_grad()
    def measure(
        self, model: nn.Module, device: torch.device, at_once: int, part: int = 0, parts: int = 1
    ) -> list[float]:
        model.eval()
        # Read at the end alone, so that the host need not wait for the device in between.
        sums, count = torch.zeros(2, dtype=torch.float64, device=device), 0
        calls = math.ceil(math.ceil(len(self.evaluated) / parts) / min(at_once, TEXTS_AT_ONCE))
        for chunk in np.array_split(self.evaluated[part::parts], calls):
            texts = chunk if len(chunk) else self.evaluated[:1]
            batch = to_device(self.validation.batch(texts, self.pad), device)
            logits = _logits(model, batch)
            if len(chunk):
                loss = nn.functional.cross_entropy(logits, batch["labels"], reduction="sum")
                correct = (logits.argmax(-1) == batch["labels"]).sum()
                sums += torch.stack([loss.double(), correct.double()])
                count += len(chunk)
        return [*sums.tolist(), count]


def _logits(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    logits: Tensor = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    ).logits.float()
    return logits
