"""The task of a problem from Python: data and loss that only the script of `adloco.train` has."""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from adloco.algorithms.method import Problem, Source
from adloco.algorithms.worker import checked_loss
from adloco.data.byte_tokenizer import ByteTokenizer
from adloco.data.tokenizers import Tokenizer
from adloco.distributed.device import to_device
from adloco.errors import require
from adloco.metrics import Metric, Unit
from adloco.models.source import Head
from adloco.tasks.task import Task, TaskData


@dataclass(frozen=True, kw_only=True)
class ProblemTaskSettings:
    """The task of a problem from Python."""

    head: ClassVar[Head] = "AutoModelForCausalLM"
    pipeline: ClassVar[str] = ""
    packed: ClassVar[bool] = False
    generates: ClassVar[bool] = False
    counted: ClassVar[str] = "batches"
    measures: ClassVar[tuple[Metric, ...]] = (
        Metric("loss", "loss", Unit("", ".4f"), panel="loss"),
    )

    def measured(self, means: Sequence[float]) -> dict[str, float]:
        (loss,) = means
        return {"loss": loss}

    def open(self, given: TaskData) -> Task:
        raise ValueError(
            "the data and the loss of this run are in the Python script that began it; use "
            "adloco.train(resume=RUN, problem=...) or adloco.load(RUN, problem=...) there"
        )


class ProblemTask:
    """A problem from Python, ready to train and evaluate."""

    def __init__(self, problem: Problem) -> None:
        require(
            hasattr(problem.validation, "__getitem__") and len(problem.validation) > 0,
            "problem.validation must be a list with at least one batch, such as those that "
            "problem.data gives; a run is evaluated on them, again and again",
        )
        self.tokenizer: Tokenizer = ByteTokenizer()  # Every run folder has one; nothing reads it.
        self._problem = problem

    @property
    def islands(self) -> int:
        """See `Problem.islands`."""
        return self._problem.islands

    @property
    def corpus(self) -> str:
        """A digest of the first training sample and validation batch, as far as repr shows them."""
        first = [self._problem.data.read(0, 0, 1), self._problem.validation[0]]
        return hashlib.sha256(repr(first).encode()).hexdigest()

    def matches_fingerprint(self, corpus: str) -> bool:
        return corpus == self.corpus

    def rows_read(self) -> int | None:
        return None

    def skipped(self) -> str:
        return ""

    def configure(self, config: Any) -> Any:
        return config

    def train_source(self, num_streams: int, seed: int, least: int) -> Source:
        return self._problem.data

    def num_train_samples(self, at_least: int) -> int:
        """No limit is known: a source does not say how many samples it has."""
        return sys.maxsize

    def largest_source(self) -> Source:
        return self._problem.data

    def loss(self, model: Any, batch: Any) -> Tensor:
        return self._problem.loss_fn(model, batch)

    def validate_model(self, model: Any, device: torch.device) -> str:
        (total, _) = self.measure(model, device, 1, 0, len(self._problem.validation))
        return "" if total == total else "problem.loss_fn gives nan for the first validation batch"

    def measure(
        self, model: nn.Module, device: torch.device, at_once: int, part: int = 0, parts: int = 1
    ) -> list[float]:
        batches, total, count = self._problem.validation, 0.0, 0
        model.eval()
        for begin in range(0, len(batches), parts):  # Equally often in every part.
            index = begin + part
            batch = to_device(batches[index % len(batches)], device)
            with torch.no_grad():
                loss = float(checked_loss(self._problem.loss_fn(model, batch), trains=False))
            if index < len(batches):
                total, count = total + loss, count + 1
        return [total, count]
