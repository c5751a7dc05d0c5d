"""Pieces of your own for `adloco train`, one of each kind (docs/python.md).

PYTHONPATH=examples adloco train diloco --batch.rule my_pieces:DoublingBatch
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adloco.algorithms.method import Source
from adloco.rules.batch_rules.batch_rule import TrainingPoint
from adloco.rules.merge import Merge
from adloco.rules.moments import GradientEstimate
from adloco.tasks.kinds.language_model_settings import LanguageModelSettings
from adloco.tasks.task import Task, TaskData


@dataclass(frozen=True, kw_only=True)
class DoublingBatch:
    """Double the batch each time the trainer has seen `every_samples` samples."""

    every_samples: int = 200
    """Samples from one doubling to the next."""
    start: int = 8
    """Batch before the first doubling."""

    fewest_groups = 1
    measurement = ""

    def __post_init__(self) -> None:
        if self.every_samples <= 0:
            raise ValueError(f"every_samples must be > 0, got {self.every_samples}")

    def requested(self, estimate: GradientEstimate | None, point: TrainingPoint) -> int:
        return int(self.start * 2 ** (point.samples // self.every_samples))


@dataclass(frozen=True, kw_only=True)
class MergeAllOnce:
    """Merge all trainers into one at the end of round `at_round`."""

    at_round: int = 2
    """Number of the round, counted from 1."""

    def decide(self, round: int, requests: Mapping[int, int]) -> Merge | None:
        if round != self.at_round or len(requests) < 2:
            return None
        survivor, *absorbed = sorted(requests)
        total = sum(requests.values())
        weights = {trainer: request / total for trainer, request in requests.items()}
        return Merge(survivor=survivor, absorbed=tuple(absorbed), weights=weights)


@dataclass(frozen=True, kw_only=True)
class Fp16:
    """A wire format of 2 bytes a value: the nearest float16, clamped to its range of +-65504."""

    block = 64
    block_bytes = 2 * block

    def encode(self, values: Tensor) -> Tensor:
        return values.clamp(-65504, 65504).half().view(torch.uint8)

    def decode(self, blocks: Tensor) -> Tensor:
        return blocks.view(torch.float16).float()


@dataclass(frozen=True, kw_only=True)
class InnerAdagrad:
    """Adagrad on all parameters of a worker. Its state persists across rounds."""

    lr: float = 1e-2
    """Learning rate; a schedule multiplies it by its factor."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr must be > 0, got {self.lr}")

    def __call__(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return [torch.optim.Adagrad(trainable, lr=self.lr)]


@dataclass(frozen=True, kw_only=True)
class JsonTracker:
    """Append the numbers of each round to a file in the run's folder."""

    def open(self, folder: Path, settings: Mapping[str, Any], tokens: int) -> "JsonFile":
        return JsonFile(folder / "my_tracker.jsonl")


class JsonFile:
    """A file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def log(self, values: dict[str, Any], step: int) -> None:
        print(json.dumps({"step": step} | values), file=self._file, flush=True)

    def finish(self) -> None:
        self._file.close()


def count_up(rows: int = 50) -> Iterator[str]:
    """Rows for `data.factory`: texts, or dictionaries with the columns that the task reads."""
    for first in range(rows):
        yield " ".join(str(number) for number in range(first, first + 200))


class TinyModel(nn.Module):
    """Predicts a token from the one before it, through a narrow layer."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embed(input_ids))
        return logits


def build_tiny(vocab_size: int, width: int = 16) -> nn.Module:
    """Build a model for `model.factory`.

    It takes token ids, int64 [samples, tokens], and returns logits [samples, tokens, vocab_size].
    """
    return TinyModel(vocab_size, width)


@dataclass(frozen=True, kw_only=True)
class SmoothedLanguageModel:
    """Next-token prediction whose training loss has label smoothing."""

    smoothing: float = 0.1
    """Part of the target's probability that is spread evenly over the vocabulary."""

    head = LanguageModelSettings.head
    pipeline = LanguageModelSettings.pipeline
    packed = LanguageModelSettings.packed
    generates = LanguageModelSettings.generates
    counted = LanguageModelSettings.counted
    measures = LanguageModelSettings.measures

    def measured(self, means: Sequence[float]) -> dict[str, float]:
        return LanguageModelSettings().measured(means)

    def open(self, given: TaskData) -> Task:
        return SmoothedTask(LanguageModelSettings().open(given), self.smoothing)


class SmoothedTask:
    """A language-model task with another loss; all else is taken from that task."""

    def __init__(self, task: Task, smoothing: float) -> None:
        self.tokenizer = task.tokenizer
        self.matches_fingerprint = task.matches_fingerprint
        self.rows_read = task.rows_read
        self.skipped = task.skipped
        self.configure = task.configure
        self.train_source = task.train_source
        self.num_train_samples = task.num_train_samples
        self.validate_model = task.validate_model
        self.measure = task.measure
        self._task = task
        self._smoothing = smoothing

    @property
    def corpus(self) -> str:
        return self._task.corpus

    def largest_source(self) -> Source:
        return self._task.largest_source()

    def loss(self, model: Any, batch: Any) -> Tensor:
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits.float()
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), batch[:, 1:].flatten(), label_smoothing=self._smoothing
        )
