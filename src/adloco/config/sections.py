"""A recipe: every setting of a run, in sections, of which frozen dataclasses own the settings.

A setting is described and checked where it is used. Some sections choose one class among several by
a key of their own, for instance `rule` in [batch]; the fields of the others are then unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from adloco.algorithms.inner.adamw import InnerAdamW
from adloco.algorithms.inner.muon import InnerMuon
from adloco.algorithms.inner.sgd import InnerSGD
from adloco.algorithms.merging import MergeFates, Merging
from adloco.algorithms.method import Batching, GradientTest, Method
from adloco.algorithms.optimizers import InnerFactory, OuterOptimizer
from adloco.algorithms.outer_sync import OuterMemory, Syncing
from adloco.config.settings import (
    MemorySettings,
    OuterMean,
    PlacementSettings,
    PlainWire,
    ProfileSettings,
    RunSettings,
)
from adloco.data.data_settings import DataSettings
from adloco.distributed.codecs.wire import Bf16, Int2, Int4, Int8, TopK, WireFormat
from adloco.distributed.comm.compressed import keeps_residuals
from adloco.errors import require
from adloco.models.model_sources import LlamaShape, ModelOptions, ModelSource, NamedModel
from adloco.rules.batch import (
    AugmentedInnerProductTest,
    BatchRule,
    BatchWarmup,
    ConstantBatch,
    InnerProductTest,
    NormTest,
    groups_to_compare,
)
from adloco.rules.controller import BatchGuards
from adloco.rules.learning_rate import LearningRate
from adloco.rules.merge import MergeLargestWithSmallest, MergePolicy, MergeSmallest, NoMerge
from adloco.rules.shares import EqualShares, Shares, SpeedShares
from adloco.rules.switch import SwitchMode
from adloco.rules.sync_schedule import Streaming
from adloco.tasks.classification import ClassificationSettings
from adloco.tasks.evaluation_settings import EvaluationSettings
from adloco.tasks.language_model import LanguageModelSettings
from adloco.tasks.task import TaskSettings


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A key of a section that selects one of several classes."""

    key: str
    classes: Mapping[str, type]
    default: str
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """The classes whose fields stand in a section, by the name each has in `Recipe`."""

    parts: Mapping[str, type]
    choice: Choice | None = None
    chosen: str = ""
    """Name in `Recipe` of what is chosen."""


BATCH_RULES: dict[str, type] = {
    "constant": ConstantBatch,
    "warmup": BatchWarmup,
    "norm-test": NormTest,
    "inner-product": InnerProductTest,
    "augmented": AugmentedInnerProductTest,
}
MERGE_POLICIES: dict[str, type] = {
    "none": NoMerge,
    "smallest": MergeSmallest,
    "largest-with-smallest": MergeLargestWithSmallest,
}
SHARES: dict[str, type] = {"equal": EqualShares, "speed": SpeedShares}
TASKS: dict[str, type] = {
    "language-model": LanguageModelSettings,
    "classification": ClassificationSettings,
}
MODEL_SOURCES: dict[str, type] = {"llama": LlamaShape, "transformers": NamedModel}
INNER_OPTIMIZERS: dict[str, type] = {"adamw": InnerAdamW, "sgd": InnerSGD, "muon": InnerMuon}
OUTER_UPDATES: dict[str, type] = {"mean": OuterMean, "optimizer": OuterOptimizer}
WIRE_FORMATS: dict[str, type] = {
    "fp32": PlainWire,
    "bf16": Bf16,
    "int8": Int8,
    "int4": Int4,
    "int2": Int2,
    "topk": TopK,
}

SECTIONS: dict[str, Section] = {
    "run": Section(parts={"run": RunSettings}),
    "task": Section(
        parts={},
        choice=Choice(
            key="kind",
            classes=TASKS,
            default="language-model",
            meaning="What the model is trained for: " + ", ".join(TASKS) + ".",
        ),
        chosen="task",
    ),
    "model": Section(
        parts={"model_options": ModelOptions},
        choice=Choice(
            key="source",
            classes=MODEL_SOURCES,
            default="llama",
            meaning="llama: a Llama of a shipped or own shape with random weights; transformers: any model there, by hub name, folder or type.",
        ),
        chosen="model",
    ),
    "data": Section(parts={"data": DataSettings}),
    "method": Section(parts={"method": Method}),
    "placement": Section(
        parts={"placement": PlacementSettings},
        choice=Choice(
            key="balance",
            classes=SHARES,
            default="equal",
            meaning="How a trainer's batch is split over its workers. equal: evenly; speed: by each one's measured samples per second.",
        ),
        chosen="shares",
    ),
    "inner": Section(
        parts={},
        choice=Choice(
            key="optimizer",
            classes=INNER_OPTIMIZERS,
            default="adamw",
            meaning="Each worker's optimizer. adamw; sgd; muon: on hidden matrices, AdamW on the rest.",
        ),
        chosen="inner",
    ),
    "learning_rate": Section(parts={"learning_rate": LearningRate}),
    "outer": Section(
        parts={"outer_memory": OuterMemory},
        choice=Choice(
            key="update",
            classes=OUTER_UPDATES,
            default="optimizer",
            meaning="optimizer: apply the pseudo-gradient with an outer optimizer; mean: adopt the workers' mean as it is.",
        ),
        chosen="outer",
    ),
    "wire": Section(
        parts={},
        choice=Choice(
            key="format",
            classes=WIRE_FORMATS,
            default="fp32",
            meaning="How pseudo-gradients cross between workers: fp32 (as they are), bf16, int8, int4 (E3M0), int2 or topk (the largest in 2 bits).",
        ),
        chosen="wire",
    ),
    "streaming": Section(parts={"streaming": Streaming}),
    "batch": Section(
        parts={"guards": BatchGuards},
        choice=Choice(
            key="rule",
            classes=BATCH_RULES,
            default="constant",
            meaning="How a trainer's batch is decided: " + ", ".join(BATCH_RULES) + ".",
        ),
        chosen="batch",
    ),
    "test": Section(parts={"test": GradientTest}),
    "switch": Section(parts={"switch": SwitchMode}),
    "merge": Section(
        parts={"fates": MergeFates},
        choice=Choice(
            key="policy",
            classes=MERGE_POLICIES,
            default="none",
            meaning="Which trainers merge: " + ", ".join(MERGE_POLICIES) + ".",
        ),
        chosen="merge",
    ),
    "evaluation": Section(parts={"evaluation": EvaluationSettings}),
    "memory": Section(parts={"memory": MemorySettings}),
    "profile": Section(parts={"profile": ProfileSettings}),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Every setting of a run."""

    run: RunSettings
    task: TaskSettings
    model: ModelSource
    model_options: ModelOptions
    data: DataSettings
    method: Method
    placement: PlacementSettings
    shares: Shares
    inner: InnerFactory
    learning_rate: LearningRate
    outer: OuterOptimizer | OuterMean
    outer_memory: OuterMemory
    wire: PlainWire | WireFormat
    streaming: Streaming
    batch: BatchRule
    guards: BatchGuards
    test: GradientTest
    switch: SwitchMode
    merge: MergePolicy
    fates: MergeFates
    evaluation: EvaluationSettings
    memory: MemorySettings
    profile: ProfileSettings

    def __post_init__(self) -> None:
        each = groups_to_compare(self.batch)
        smallest = self.method.workers_per_trainer * each
        require(
            self.guards.initial >= smallest,
            f"batch.initial must be >= {smallest}, so that each of {self.method.workers_per_trainer} workers has "
            f"{'a sample' if each == 1 else f'{each} samples to compare'}, got {self.guards.initial}",
        )

    @property
    def syncs(self) -> bool:
        """Whether a trainer has several workers, at first or after a merge: otherwise nothing is
        sent in any format.
        """
        return self.method.workers_per_trainer > 1 or (
            self.method.num_trainers > 1 and not isinstance(self.merge, NoMerge)
        )

    @property
    def batching(self) -> Batching:
        """How batches are decided and carried out."""
        return Batching(
            rule=self.batch,
            guards=self.guards,
            test=self.test,
            switch=self.switch,
            shares=self.shares,
        )

    @property
    def merging(self) -> Merging:
        """Which trainers merge, and what becomes of what they own."""
        return Merging(policy=self.merge, fates=self.fates)

    @property
    def syncing(self) -> Syncing:
        """How the workers of a trainer are brought together."""
        return Syncing(
            outer=None if isinstance(self.outer, OuterMean) else self.outer,
            codec=self.wire_format,
            streaming=self.streaming,
            memory=self.outer_memory,
        )

    @property
    def wire_format(self) -> WireFormat | None:
        """None: differences cross as they are, or nothing ever does."""
        return None if isinstance(self.wire, PlainWire) or not self.syncs else self.wire

    @property
    def unused(self) -> str:
        """A sentence on settings that change nothing, or empty."""
        idle = not self.syncs and not isinstance(self.wire, PlainWire)
        return (
            "wire.format changes nothing: no trainer ever has two workers to sync" if idle else ""
        )

    @property
    def feedback(self) -> bool:
        """Whether workers keep what a sync leaves unsent."""
        return keeps_residuals(self.wire_format)
