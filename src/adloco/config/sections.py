"""The sections of a recipe, and the recipe itself: every setting of a run.

The settings of a section are the fields of frozen dataclasses, each defined beside the code that
uses it. Some sections also have a key that chooses one class among several, such as `rule` in
[batch]; then only the fields of the chosen class are settings of the section.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from adloco.algorithms.method import (
    Batching,
    GradientTest,
    Merging,
    Method,
    OuterMemory,
    Syncing,
)
from adloco.algorithms.optimizers import InnerFactory, OuterFactory, OuterMean
from adloco.algorithms.stage import Option
from adloco.config.register import Register, summary
from adloco.config.settings import MemorySettings, PlacementSettings, ProfileSettings, RunSettings
from adloco.data.data_settings import DataSettings
from adloco.distributed.wire.feedback import Feedback
from adloco.distributed.wire.plain import PlainWire
from adloco.distributed.wire.wire_format import WireFormat
from adloco.errors import require
from adloco.models.source import ModelOptions, ModelSource
from adloco.options import options
from adloco.rules.batch_rules.batch_rule import BatchRule
from adloco.rules.controller import BatchController, BatchGuards
from adloco.rules.learning_rate import LearningRate
from adloco.rules.merge import MergeFates, MergePolicy
from adloco.rules.shares import Shares
from adloco.rules.switch import SwitchMode
from adloco.rules.sync_schedule import Streaming
from adloco.tasks.evaluation_settings import EvaluationSettings
from adloco.tasks.task import TaskSettings


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A key of a section that selects one of several classes."""

    key: str
    register: Register
    default: str
    meaning: str
    """Help text of the key. The help text of each class is its own docstring."""
    aliases: tuple[str, ...] = ()
    """As in `Facts`."""

    def help(self) -> str:
        """The meaning, followed by one line for each class."""
        classes = self.register.classes.items()
        lines = [f"{key}: {summary(kind)}" for key, kind in classes]
        return "\n".join([self.meaning, *lines, "package.module:Name: a class of your own."])


@dataclass(frozen=True, kw_only=True)
class Section:
    """The classes whose fields are the settings of a section."""

    parts: Mapping[str, type]
    """Field of `Recipe` -> class, for the classes that the section always has."""
    choice: Choice | None = None
    """Key that chooses one more class; None: the section has no such key."""
    chosen: str = ""
    """Field of `Recipe` that has the chosen class."""
    held_equal: str = ""
    """As `Facts.equal`, of the settings of the section that do not say it."""


BATCH_RULES = Register(package="adloco.rules.batch_rules", protocol=BatchRule)
MERGE_POLICIES = Register(package="adloco.rules.merge_policies", protocol=MergePolicy)
SHARES = Register(package="adloco.rules.shares", protocol=Shares)
TASKS = Register(package="adloco.tasks.kinds", protocol=TaskSettings)
MODEL_SOURCES = Register(package="adloco.models.sources", protocol=ModelSource)
INNER_OPTIMIZERS = Register(package="adloco.algorithms.inner", protocol=InnerFactory)
OUTER_UPDATES = Register(package="adloco.algorithms.optimizers", protocol=OuterFactory)
WIRE_FORMATS = Register(package="adloco.distributed.wire", protocol=WireFormat)

SECTIONS: dict[str, Section] = {
    "run": Section(parts={"run": RunSettings}),
    "task": Section(
        parts={},
        choice=Choice(
            key="kind",
            register=TASKS,
            default="language-model",
            meaning="What the model is trained for.",
        ),
        chosen="task",
        held_equal="task",
    ),
    "model": Section(
        parts={"model_options": ModelOptions},
        choice=Choice(
            key="source",
            register=MODEL_SOURCES,
            default="llama",
            meaning="Where the model comes from.",
        ),
        chosen="model",
        held_equal="model",
    ),
    "data": Section(parts={"data": DataSettings}),
    "method": Section(parts={"method": Method}),
    "placement": Section(
        parts={"placement": PlacementSettings},
        choice=Choice(
            key="balance",
            register=SHARES,
            default="equal",
            meaning="How a trainer's batch is split over its workers.",
        ),
        chosen="shares",
    ),
    "inner": Section(
        parts={},
        choice=Choice(
            key="optimizer",
            register=INNER_OPTIMIZERS,
            default="adamw",
            meaning="Each worker's optimizer.",
        ),
        chosen="inner",
    ),
    "learning_rate": Section(parts={"learning_rate": LearningRate}),
    "outer": Section(
        parts={"outer_memory": OuterMemory},
        choice=Choice(
            key="update",
            register=OUTER_UPDATES,
            default="optimizer",
            meaning="How a sync changes the global parameters.",
        ),
        chosen="outer",
    ),
    "wire": Section(
        parts={"feedback": Feedback},
        choice=Choice(
            key="format",
            register=WIRE_FORMATS,
            default="fp32",
            meaning="How pseudo-gradients are encoded when they are sent between workers.",
            aliases=("codec",),
        ),
        chosen="wire",
    ),
    "streaming": Section(parts={"streaming": Streaming}),
    "batch": Section(
        parts={"guards": BatchGuards},
        choice=Choice(
            key="rule",
            register=BATCH_RULES,
            default="constant",
            meaning="How a trainer's batch is decided.",
        ),
        chosen="batch",
    ),
    "test": Section(parts={"test": GradientTest}),
    "switch": Section(parts={"switch": SwitchMode}),
    "merge": Section(
        parts={"fates": MergeFates},
        choice=Choice(
            key="policy",
            register=MERGE_POLICIES,
            default="none",
            meaning="Which trainers merge.",
        ),
        chosen="merge",
    ),
    "evaluation": Section(parts={"evaluation": EvaluationSettings}),
    "memory": Section(parts={"memory": MemorySettings}),
    "profile": Section(parts={"profile": ProfileSettings}),
}
for _key, _option in options().items():
    _section = SECTIONS.get(_option.section, Section(parts={}))
    SECTIONS[_option.section] = replace(_section, parts={**_section.parts, _key: _option})


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
    outer: OuterFactory | OuterMean
    outer_memory: OuterMemory
    wire: PlainWire | WireFormat
    feedback: Feedback
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
    options: Mapping[str, Option]
    """The options of lab/, by their keys."""

    def __post_init__(self) -> None:
        others = self.run.tokens or self.run.rounds or self.run.inner_steps
        require(
            bool(others) or self.syncs,
            "run.syncs alone never ends a run in which nothing is synced; give run.tokens, "
            "run.rounds or run.inner_steps",
        )
        for option in self.options.values():
            option.check(self.method, self.batching, self.streaming, self.merge)
        each = self.batch.fewest_groups
        smallest = self.method.workers_per_trainer * each
        require(
            self.guards.initial >= smallest,
            f"batch.initial must be >= {smallest}, so that each of "
            f"{self.method.workers_per_trainer} workers has "
            f"{'a sample' if each == 1 else f'{each} samples to compare'}, got "
            f"{self.guards.initial}",
        )

    def require_numbers(self) -> None:
        """Raise ValueError if the run chooses H, eta or n itself."""
        chosen = [name for option in self.options.values() for name in option.chooses]
        require(
            not chosen,
            f"auto.chooses must be empty here, where numbers are needed, got {chosen}; only a run "
            "chooses them",
        )

    def part(self, name: str) -> Any:
        """The settings that a field of the recipe, or an option, has."""
        return self.options[name] if name in self.options else getattr(self, name)

    @property
    def syncs(self) -> bool:
        """True if a trainer has several workers, at the start or after a merge."""
        return self.method.syncs(self.merge)

    @property
    def data_parallel(self) -> bool:
        """True if the recipe is one worker that is meant to have several replicas or shards, which
        sync in every inner step.
        """
        shape = self.placement
        return self.method.num_workers == 1 and (shape.replica_size != 1 or shape.shard_size != 1)

    def schedule_tokens(self) -> int:
        """Tokens at which the schedule of the learning rate ends; 0 if it is constant.

        Raises:
            ValueError: The schedule has an end, and nothing says where.
        """
        total = self.learning_rate.total_tokens or self.run.tokens
        shape = self.learning_rate.shape
        require(
            total > 0 or shape == "constant",
            f"learning_rate.total_tokens must be > 0 where run.tokens is 0: shape {shape} falls to "
            "its end there; or set learning_rate.shape to constant",
        )
        return total

    @property
    def first_batch(self) -> int:
        """Requested batch of each trainer's first round, in samples."""
        return BatchController(self.batch, self.guards, self.run.seed).requested_batch

    @property
    def batch_cap(self) -> int | None:
        """`batch.maximum` if the batch rule measures gradients; None if it follows a plan."""
        return self.guards.maximum if self.batch.fewest_groups > 1 else None

    @property
    def batching(self) -> Batching:
        """How a trainer's batch is decided and split into micro-batches."""
        return Batching(
            rule=self.batch,
            guards=self.guards,
            test=self.test,
            switch=self.switch,
            shares=self.shares,
        )

    @property
    def merging(self) -> Merging:
        """Which trainers merge, and what becomes of their parameters, state and data."""
        return Merging(policy=self.merge, fates=self.fates)

    @property
    def syncing(self) -> Syncing:
        """How the workers of a trainer are synced."""
        return Syncing(
            outer=None if isinstance(self.outer, OuterMean) else self.outer,
            wire=self.wire_format,
            feedback=self.feedback,
            streaming=self.streaming,
            memory=self.outer_memory,
        )

    @property
    def wire_format(self) -> WireFormat | None:
        """Encoding of pseudo-gradients; None if they are sent uncompressed, or never sent."""
        return None if isinstance(self.wire, PlainWire) or not self.syncs else self.wire

    @property
    def unused(self) -> str:
        """A sentence that names settings without effect in this recipe; empty if there are none."""
        if not self.syncs and not isinstance(self.wire, PlainWire):
            return "wire.format changes nothing: no trainer ever has two workers to sync"
        if not self.keeps_residuals and self.feedback not in (
            Feedback(),
            Feedback(feedback="none"),
        ):
            return (
                "wire.feedback and wire.feedback_decay change nothing: no residual is kept in this "
                "recipe; give a lossy wire.format, and wire.feedback memory or params"
            )
        largest = self.method.num_workers if self.syncs else 1
        return next(filter(None, (own.unused(largest) for own in self.options.values())), "")

    @property
    def keeps_residuals(self) -> bool:
        """True if workers keep what the wire format leaves unsent (error feedback)."""
        return self.syncing.residuals != "none"
