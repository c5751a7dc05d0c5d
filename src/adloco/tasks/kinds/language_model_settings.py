"""The settings of causal language modelling, and what it measures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from adloco.metrics import Metric, Unit
from adloco.models.source import Head
from adloco.tasks.task import Task, TaskData

LN_2 = math.log(2)
LARGEST_EXPONENT = 230.0
"""The exponential of larger numbers is above 1e100, which a line of a run's records cannot have."""


def perplexity(loss: float) -> float:
    """The exponential of a loss in nats per token, or of `LARGEST_EXPONENT` if that is less."""
    return math.exp(min(loss, LARGEST_EXPONENT))


@dataclass(frozen=True, kw_only=True)
class LanguageModelSettings:
    """Predict each token of packed documents from those before it."""

    key: ClassVar[str] = "language-model"

    head: ClassVar[Head] = "AutoModelForCausalLM"
    pipeline: ClassVar[str] = "text-generation"
    packed: ClassVar[bool] = True
    generates: ClassVar[bool] = True
    counted: ClassVar[str] = "tokens"
    measures: ClassVar[tuple[Metric, ...]] = (
        Metric("loss", "loss", Unit("nats per token", ".4f"), panel="loss"),
        Metric("perplexity", "perplexity", Unit("", ".3f"), of_loss=perplexity),
        Metric("bits_per_byte", "bits per byte", Unit("", ".3f"), short="bpb"),
    )

    def measured(self, means: Sequence[float]) -> dict[str, float]:
        loss, token_bytes = means
        found = {"loss": loss, "perplexity": perplexity(loss)}
        # It is nan if the tokenizer does not keep the whole of a text.
        return found | ({"bits_per_byte": loss / LN_2 / token_bytes} if token_bytes > 0 else {})

    def open(self, given: TaskData) -> Task:
        from adloco.tasks.language_model import open_language_model

        return open_language_model(given)
