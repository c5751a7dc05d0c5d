"""The sections of a recipe, and the recipe itself: every setting of a run.

The settings of a section are the fields of frozen dataclasses, each defined beside the code that
uses it. Some sections also have a key that chooses one class among several, such as `rule` in
[batch]; then only the fields of the chosen class are settings of the section. The fields of
`Recipe` say which section has their class, and which key chooses it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from adloco.algorithms.method import (
    Batching,
    GradientTest,
    Merging,
    Method,
    OuterMemory,
    Syncing,
    SyncWeights,
)
from adloco.algorithms.optimizers import InnerFactory, OuterFactory, OuterMean
from adloco.algorithms.stage import Option
from adloco.config.register import Register, summary
from adloco.config.settings import MemorySettings, PlacementSettings, RunSettings
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
from adloco.tasks.task import EvaluationSettings, TaskSettings


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A key of a section that selects one of several classes."""

    key: str
    part: str
    """Field of `Recipe` that has the chosen class."""
    register: Register
    default: str
    meaning: str
    """Help text of the key. The help text of each class is its own docstring."""
    held_equal: str
    """Default of `Facts.equal` for the settings of the section."""
    aliases: tuple[str, ...]
    """Same as in `Facts`."""

    def help(self) -> str:
        """The meaning, followed by one line for each class."""
        lines = [f"{key}: {summary(kind)}" for key, kind in self.register.classes.items()]
        return "\n".join([self.meaning, *lines, "package.module:Name: a class of your own."])


@dataclass(frozen=True, kw_only=True)
class Section:
    """The classes whose fields are the settings of a section."""

    parts: Mapping[str, type]
    """Field of `Recipe`, or key of an option -> class, for the classes that it always has."""
    choice: Choice | None
    """Key that chooses one more class; None: the section has no such key."""


BATCH_RULES = Register(package="adloco.rules.batch_rules", protocol=BatchRule)
MERGE_POLICIES = Register(package="adloco.rules.merge_policies", protocol=MergePolicy)
SHARES = Register(package="adloco.rules.shares", protocol=Shares)
TASKS = Register(package="adloco.tasks.kinds", protocol=TaskSettings)
MODEL_SOURCES = Register(package="adloco.models.sources", protocol=ModelSource)
INNER_OPTIMIZERS = Register(package="adloco.algorithms.inner", protocol=InnerFactory)
OUTER_UPDATES = Register(package="adloco.algorithms.optimizers", protocol=OuterFactory)
WIRE_FORMATS = Register(package="adloco.distributed.wire", protocol=WireFormat)


def _in(section: str) -> Any:
    """A field of `Recipe` whose class has its settings in a section of another name."""
    return field(metadata={"section": section})


def _chosen(
    name: str,
    register: Register,
    *,
    default: str,
    meaning: str,
    held_equal: str = "",
    aliases: tuple[str, ...] = (),
) -> Any:
    """A field of `Recipe` whose class is chosen by section.key; see `Choice`."""
    section, _, key = name.partition(".")
    about = {"default": default, "meaning": meaning, "held_equal": held_equal, "aliases": aliases}
    return field(
        metadata={"section": section, "choice": {"key": key, "register": register} | about}
    )


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Every setting of a run."""

    run: RunSettings
    task: TaskSettings = _chosen(
        "task.kind",
        TASKS,
        default="language-model",
        meaning="What the model is trained for.",
        held_equal="task",
    )
    model: ModelSource = _chosen(
        "model.source",
        MODEL_SOURCES,
        default="llama",
        meaning="Where the model comes from.",
        held_equal="model",
    )
    model_options: ModelOptions = _in("model")
    data: DataSettings
    method: Method
    placement: PlacementSettings
    shares: Shares = _chosen(
        "placement.balance",
        SHARES,
        default="equal",
        meaning="How a trainer's batch is split over its workers.",
    )
    inner: InnerFactory = _chosen(
        "inner.optimizer", INNER_OPTIMIZERS, default="muon", meaning="Each worker's optimizer."
    )
    learning_rate: LearningRate
    outer: OuterFactory | OuterMean = _chosen(
        "outer.update",
        OUTER_UPDATES,
        default="optimizer",
        meaning="How a sync changes the global parameters.",
    )
    outer_memory: OuterMemory = _in("outer")
    sync_weights: SyncWeights = _in("outer")
    wire: PlainWire | WireFormat = _chosen(
        "wire.format",
        WIRE_FORMATS,
        default="fp32",
        meaning="How pseudo-gradients are encoded when they are sent between workers.",
        aliases=("codec",),
    )
    feedback: Feedback = _in("wire")
    streaming: Streaming
    batch: BatchRule = _chosen(
        "batch.rule", BATCH_RULES, default="constant", meaning="How a trainer's batch is decided."
    )
    guards: BatchGuards = _in("batch")
    test: GradientTest
    switch: SwitchMode
    merge: MergePolicy = _chosen(
        "merge.policy", MERGE_POLICIES, default="none", meaning="Which trainers merge."
    )
    fates: MergeFates = _in("merge")
    evaluation: EvaluationSettings
    memory: MemorySettings
    options: Mapping[str, Option]
    """The options of lab/, by their keys."""

    def __post_init__(self) -> None:
        others = self.run.tokens or self.run.rounds or self.run.inner_steps
        require(
            bool(others) or self.method.living_sync(self.merge),
            "run.syncs alone never ends a run in which nothing is synced; give run.tokens, "
            "run.rounds or run.inner_steps",
        )
        if self.data.islands:
            self._check_islands()
        each = self.batch.fewest_groups
        workers = self.method.workers_per_trainer
        share = "a sample" if each == 1 else f"{each} samples to compare"
        require(
            self.guards.initial >= workers * each,
            f"batch.initial must be >= {workers * each}, so that each of {workers} workers has "
            f"{share}, got {self.guards.initial}",
        )

    def _check_islands(self) -> None:
        """Raise ValueError if islands with texts of their own cannot train this recipe."""
        islands, method = len(self.data.islands), self.method
        require(
            self.task.packed,
            "data.islands is for language models; leave it out with this task.kind",
        )
        require(
            method.num_trainers == 1,
            "data.islands needs one trainer, so that all are measured on the same texts, got "
            f"method.num_trainers {method.num_trainers}; set it to 1",
        )
        require(
            method.num_workers >= islands,
            f"method.workers_per_trainer must be >= {islands}, one for each of data.islands, got "
            f"{method.workers_per_trainer}",
        )
        require(
            self.run.on_rank_failure != "replace",
            "run.on_rank_failure cannot be replace with data.islands, because no other island has "
            "the text of one that fails; use drop, or stop and --restart",
        )
        require(
            self.run.on_rank_failure != "drop" or method.num_workers % islands == 0,
            "run.on_rank_failure drop needs equally many workers on each of data.islands, or one "
            "may move to a machine without its text; make method.workers_per_trainer "
            f"{method.num_workers} a multiple of {islands}, or use stop and --restart",
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
        """True for one worker with replicas or shards, which sync in every inner step."""
        shape = self.placement
        return self.method.num_workers == 1 and (shape.replica_size != 1 or shape.shard_size != 1)

    @property
    def mean_sync_every(self) -> float:
        """Mean inner steps of a round until the schedule ends; ValueError if rounds have no end."""
        growth = self.method.sync_growth
        self.learning_rate.check_growth(growth)
        return self.method.sync_every / self.learning_rate.mean_decay(growth)

    @property
    def after_merges(self) -> tuple[int, int]:
        """(workers of a trainer, trainers) in the end; see `Method.after_merges`."""
        return self.method.after_merges(self.merge)

    def schedule_tokens(self) -> int:
        """Tokens at which the schedule of the learning rate ends; 0 if it is constant; ValueError
        if it has an end, and nothing says where.
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
        return BatchController(self.batch, self.guards).requested_batch

    @property
    def batch_cap(self) -> int | None:
        """`batch.maximum` if the batch rule measures gradients; None if it follows a plan."""
        return self.guards.maximum if self.batch.fewest_groups > 1 else None

    @property
    def batching(self) -> Batching:
        """The rule for a trainer's batch, and its split into micro-batches."""
        return Batching(
            rule=self.batch,
            guards=self.guards,
            test=self.test,
            switch=self.switch,
            shares=self.shares,
        )

    @property
    def merging(self) -> Merging:
        """The trainers that merge, and the fate of their parameters, state and data."""
        return Merging(policy=self.merge, fates=self.fates)

    @property
    def syncing(self) -> Syncing:
        """Settings of the sync between the workers of a trainer."""
        return Syncing(
            outer=None if isinstance(self.outer, OuterMean) else self.outer,
            wire=self.wire_format,
            feedback=self.feedback,
            streaming=self.streaming,
            memory=self.outer_memory,
            weights=self.sync_weights,
        )

    @property
    def wire_format(self) -> WireFormat | None:
        """Encoding of pseudo-gradients; None if they are sent uncompressed, or never sent."""
        return None if isinstance(self.wire, PlainWire) or not self.syncs else self.wire

    @property
    def keeps_residuals(self) -> bool:
        """True if workers keep what the wire format leaves unsent (error feedback)."""
        return self.syncing.residuals != "none"


def _sections() -> dict[str, Section]:
    """The sections in the order of the recipe's fields, then those that only options have."""
    parts: dict[str, dict[str, Any]] = {}
    choices: dict[str, Choice] = {}
    for each in fields(Recipe):
        section = each.metadata.get("section", each.name)
        if "choice" in each.metadata:
            choices[section] = Choice(part=each.name, **each.metadata["choice"])
            parts.setdefault(section, {})
        elif each.name != "options":
            parts.setdefault(section, {})[each.name] = each.type
    for key, option in options().items():
        parts.setdefault(option.section, {})[key] = option
    return {name: Section(parts=own, choice=choices.get(name)) for name, own in parts.items()}


SECTIONS = _sections()
