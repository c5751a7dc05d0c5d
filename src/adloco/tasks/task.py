"""What a model is trained for. A task is one file: its settings, batches from rows, the loss and
the evaluation.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from adloco.algorithms.method import Source
from adloco.data.data_settings import DataSettings
from adloco.data.tokenizers import Tokenizer
from adloco.metrics import Metric
from adloco.models.source import Head
from adloco.tasks.evaluation_settings import EvaluationSettings


class Task(Protocol):
    """A task with its data opened."""

    tokenizer: Tokenizer

    @property
    def corpus(self) -> str:
        """Equal for equal text; of a stream, for equal text so far."""
        ...

    def matches_fingerprint(self, corpus: str) -> bool:
        """True if the text is the one that had this `corpus`, or goes on from it."""
        ...

    def skipped(self) -> str:
        """Which rows were left out so far, in one sentence; empty if none were."""
        ...

    def configure(self, config: Any) -> Any:
        """The model's configuration (of transformers), completed for this task; ValueError if it
        does not fit.
        """
        ...

    def train_source(self, num_streams: int, seed: int, least: int) -> Source:
        """Samples to train on. least: samples of the first inner step over all trainers, which must
        be there.
        """
        ...

    def largest_source(self) -> Source:
        """Samples as long as any, to measure memory with."""
        ...

    def loss(self, model: Any, batch: Any) -> Tensor:
        """Mean loss over the samples of a batch; padding never enters it."""
        ...

    def validate_model(self, model: Any, device: torch.device) -> str:
        """Why this model cannot be trained for the task, in one sentence; empty if it can. Calls
        the model as often on every rank.
        """
        ...

    def measure(
        self, model: nn.Module, device: torch.device, at_once: int, part: int = 0, parts: int = 1
    ) -> list[float]:
        """Sums over the part-th of `parts` shares of the evaluation set, and last the count.

        at_once: samples in a pass.

        Every part calls the model equally often, as the ranks that share a sharded model must.
        """
        ...


class TaskSettings(Protocol):
    """A task's settings, what it measures and what it can do."""

    @property
    def head(self) -> Head:
        """Class in transformers that puts the task's head on a model."""
        ...

    @property
    def pipeline(self) -> str:
        """Name of the task at Hugging Face, for the card of an exported model."""
        ...

    @property
    def packed(self) -> bool:
        """True if samples are windows of packed text; False if they are texts.

        `adloco prepare` packs text, and evaluation.windows counts windows.
        """
        ...

    @property
    def generates(self) -> bool:
        """True if a trained model continues a prompt."""
        ...

    @property
    def counted(self) -> str:
        """What an evaluation averages over, in the plural."""
        ...

    @property
    def measures(self) -> tuple[Metric, ...]:
        """What an evaluation measures: first the loss, whose name is `loss`; lower is better."""
        ...

    def measured(self, means: Sequence[float]) -> dict[str, float]:
        """Each measure by name, from the means of what `Task.measure` adds up."""
        ...

    def open(
        self,
        data: DataSettings,
        evaluation: EvaluationSettings,
        tokenizer: Tokenizer | None = None,
        *,
        everything: bool = False,
    ) -> Task:
        """The task with its data. tokenizer: instead of the one that data names; everything:
        evaluate on all rows, and train on none.
        """
        ...
