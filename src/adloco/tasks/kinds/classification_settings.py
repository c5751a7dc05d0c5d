"""The settings of sequence classification, and what it measures."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from adloco.errors import require_range
from adloco.metrics import Metric, Unit
from adloco.models.source import Head
from adloco.setting import setting
from adloco.tasks.task import Task, TaskData


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
    evaluation_per_class: int = setting(500, equal="validation windows")
    """Validation texts of each class: the first ones are taken. 0: all texts."""

    def __post_init__(self) -> None:
        require_range(self, "evaluation_per_class", at_least=0)

    def measured(self, means: Sequence[float]) -> dict[str, float]:
        return dict(zip(("loss", "accuracy"), means, strict=True))

    def open(self, given: TaskData) -> Task:
        from adloco.tasks.classification import open_classification

        return open_classification(self, given)
