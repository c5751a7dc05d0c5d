"""The protocol of a task, which is what a model is trained for: language modelling, for instance.

A task is one file with its settings, its batches, its loss and its evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from adloco.errors import require_range
from adloco.setting import setting

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from adloco.algorithms.method import Source
    from adloco.data.data_settings import DataSettings
    from adloco.data.tokenizers import Tokenizer
    from adloco.metrics import Metric
    from adloco.models.source import Head


@dataclass(frozen=True)
class TaskData:
    """The data that a task is opened with."""

    data: DataSettings
    """Sources and treatment of the data."""
    evaluation: EvaluationSettings
    """The part of it that is evaluated."""
    tokenizer: Tokenizer | None = None
    """Used instead of the one that `data` names."""
    everything: bool = False
    """Evaluate on all rows and train on none; `data` holds out all of them."""


class Task(Protocol):
    """A task with its data, ready to train and evaluate."""

    tokenizer: Tokenizer

    @property
    def corpus(self) -> str:
        """A fingerprint of the text; for a stream, of the text read so far."""

    def matches_fingerprint(self, corpus: str) -> bool:
        """True if the text has this fingerprint, or if it is a stream whose beginning has it."""

    def rows_read(self) -> int | None:
        """Rows of a stream read so far; None if all rows are read before training."""

    def skipped(self) -> str:
        """A sentence about rows left out and what else is amiss in texts; empty if nothing is."""

    def configure(self, config: Any) -> Any:
        """Complete a transformers configuration for this task; ValueError if it does not fit."""

    def train_source(self, num_streams: int, seed: int, least: int) -> Source:
        """Samples to train on.

        Args:
            num_streams: Streams into which the samples are divided, one for each worker.
            seed: Decides the order of the samples.
            least: Samples of the first inner step over all trainers.

        Raises:
            ValueError: There are fewer samples than `least` or than streams.
        """

    def num_train_samples(self, at_least: int) -> int:
        """Number of samples to train on; `sys.maxsize` if it is not known.

        at_least: For a stream, samples to fetch; the number is then of those so far.
        """

    def largest_source(self) -> Source:
        """Samples of the greatest length in the data, to measure memory with."""

    def loss(self, model: Any, batch: Any) -> Tensor:
        """Mean loss over the samples of a batch; padding does not count."""

    def validate_model(self, model: Any, device: torch.device) -> str:
        """One sentence that says why this model cannot be trained for the task; empty if it can.

        It must call the model equally often on every rank.
        """

    def measure(
        self, model: nn.Module, device: torch.device, at_once: int, part: int = 0, parts: int = 1
    ) -> list[float]:
        """Evaluate the model on one part of the evaluation set.

        Every part calls the model equally often, as the ranks that share a sharded model must.

        Args:
            model: The model, which is set to evaluation mode.
            at_once: Most samples in one call of the model.
            part: Which of `parts` this is, from 0.

        Returns:
            Sums over the part, and last the count of its tokens or texts. The sums of all parts
            over the count of all parts are the means for `TaskSettings.measured`.
        """


class TaskSettings(Protocol):
    """The settings of a task, what it measures and what it can do."""

    head: ClassVar[Head]
    """The auto class of transformers that puts the task's head on a model."""
    pipeline: ClassVar[str]
    """Hugging Face's name for the task (pipeline_tag), for the card of an exported model."""
    packed: ClassVar[bool]
    """True if samples are windows of packed text; False if each is a text of its own.

    `adloco prepare` packs text, and evaluation.windows counts windows.
    """
    generates: ClassVar[bool]
    """True if a trained model continues a prompt."""
    counted: ClassVar[str]
    """The units that an evaluation averages over, in the plural: tokens or texts."""
    measures: ClassVar[tuple[Metric, ...]]
    """The measures of an evaluation: first the loss, named `loss`, of which lower is better."""

    def measured(self, means: Sequence[float]) -> dict[str, float]:
        """Each measure that is known, by name, from the means of what `Task.measure` adds up."""

    def open(self, given: TaskData) -> Task:
        """Open the task with its data; ValueError if that cannot be read or used for it."""


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Frequency of evaluations, and the windows of each. The last round is always evaluated."""

    every: int = setting(1, resume="free", aliases=("eval_every",))
    """Rounds from one evaluation of all trainers to the next."""
    windows: int = setting(64, equal="validation windows")
    """Validation windows of a language model, evenly spaced over the held-out text; 0: all."""

    def __post_init__(self) -> None:
        require_range(self, "every", above=0)
        require_range(self, "windows", at_least=0)
