"""Settings of a run as a whole: its length and folder, its ranks and its memory."""

from dataclasses import dataclass
from typing import Literal

from adloco.algorithms.method import OnNonFinite
from adloco.config.register import Register
from adloco.errors import SettingError, require_range, require_setting
from adloco.setting import setting
from adloco.tracking.tracker import TrackerSettings

TRACKERS = Register(package="adloco.tracking", protocol=TrackerSettings)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The length of a run, its folder, its device, and what it saves."""

    folder: str = setting(
        "", resume="free", of_rank=True, traceless=True, aliases=("output", "output_dir")
    )
    """Folder for the run's files; it must be new or empty. Without one it is a folder in runs/,
    named after the recipe, the model, the data and the time.
    """
    name: str = setting("", resume="free", of_rank=True, traceless=True)
    """Name of the recipe in tables and reports. Where none is given: the name of the recipe's
    file.
    """
    tokens: int = setting(1_200_000, resume="free", equal="budget")
    """Budget: number of tokens to train on, over all trainers. The run ends with the sample that
    reaches it; the last inner step takes what is left. 0: no limit; one of the next three must then
    be given.
    """
    rounds: int = setting(0, resume="free", equal="budget")
    """Budget in rounds; 0: no limit. The run ends when its first budget is spent."""
    inner_steps: int = setting(0, resume="free", equal="budget", aliases=("max_steps", "steps"))
    """Budget in inner optimizer steps of each worker; 0: no limit."""
    syncs: int = setting(0, resume="free", equal="budget")
    """Budget in rounds that sync; 0: no limit."""
    seed: int = 0
    """Seed of the initial parameters, the order of the data, and dropout."""
    device: str = setting("auto", resume="free", of_rank=True, traceless=True)
    """Device to train on: auto (a GPU if there is one), cpu, cuda, cuda:1, ... With several
    ranks, each takes the next GPU of its machine, whatever number is given.
    """
    threads: int = setting(0, resume="free", of_rank=True, traceless=True)
    """Number of workers that run at the same time. 0: one per core on a CPU; on a GPU one, or one
    per core if their micro-batches are small. It does not change the results. Compiled ones, and
    more than 31 on a GPU, always run one after another.
    """
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Data type of the computation. bf16: mixed precision by autocast; auto: bf16 if the device
    computes it natively, otherwise fp32; the run then keeps it on every machine.
    """
    compile: bool | Literal["auto"] = "auto"
    """Compile the model with torch.compile, its repeated blocks as one graph (slow to start, faster
    steps), and the loss of a language model. auto: a language model of at least 20 million
    parameters, each worker on one GPU, that never waits for the host (docs/data-and-models.md says
    which those are). A loss function of your own should call a model of transformers with
    use_cache=False. What is compiled follows the first sizes of micro-batches that a process meets,
    so where these change (an adaptive batch), a resumed run may round otherwise.
    """
    deterministic: bool = setting(False, resume="free")
    """Repeat each bit of a run on a GPU, also after it was resumed (but see run.compile). Without
    it, the backward pass of attention over long contexts adds in no fixed order there. An operation
    of a model that has no such order is an error. It can cost a quarter of the speed (30 million
    parameters, an H200). On a CPU all runs are repeated.
    """
    on_nonfinite: OnNonFinite = setting("stop", resume="recorded")
    """Action when the numbers of a worker are not finite. stop: end the run with an error, with the
    last checkpoint as it is; skip: leave out an inner step whose loss or gradient is not finite;
    restore: start the worker again from the parameters of the last sync, with fresh optimizer
    state. Both are counted.
    """
    checkpoint_every: int = setting(10, resume="free", traceless=True)
    """Rounds from one checkpoint to the next. The last round always writes one."""
    checkpoint_seconds: float = setting(1800.0, resume="free", traceless=True)
    """Longest time without a checkpoint: one is also written within a round, after the inner steps
    in progress. At least 1, or 0: only after rounds.
    """
    keep_checkpoints: int = setting(2, resume="free", traceless=True)
    """Number of checkpoints to keep; older ones are deleted."""
    keep_best: bool = setting(False, resume="free")
    """Also write a checkpoint after each evaluation with the lowest loss so far, and keep that one
    besides run.keep_checkpoints, for adloco evaluate, generate and export --best.
    """
    grace_seconds: float = setting(30.0, resume="free")
    """Time from a signal that tells the run to stop to the end that a scheduler or launcher puts to
    it (30 is torchrun's --shutdown-timeout). The run says if saving takes longer. A rank that waits
    for another one ends then.
    """
    silent_seconds: float = setting(60.0, resume="free")
    """A rank that gives no sign of life for so long is stopped or cut off, and has failed. One that
    computes, or waits, gives two a second, however long its rounds are.
    """
    timeout_seconds: float = setting(600.0, resume="free")
    """Time in which all ranks must have started, at least 30. A rank that gives signs of life and
    is slow is waited for, ten times as long.
    """
    on_rank_failure: Literal["stop", "replace", "drop"] = setting(
        "stop", resume="free", aliases=("on_loss",)
    )
    """Action when a rank is killed, stopped or cut off. stop: end the run, to be resumed; replace:
    the remaining ranks take over its workers and resume from the newest checkpoint, with the same
    numbers as if nothing had happened, and take back a rank that returns; drop: they resume from
    there without its workers (method.dropped). Neither starts another rank: adloco train --restart
    does.
    """
    copy_every: int = setting(0, resume="free")
    """Rounds from one copy of the run's state in memory to the next; 0: none are made. Each island
    keeps a copy of its workers and sends it to an island on another machine, if there is one, which
    takes about three times the bytes of an uncompressed sync. After a failure
    (run.on_rank_failure) the others resume from there, if no checkpoint is newer. Where these two
    islands see different folders, each checkpoint makes a copy too, which its receiver writes to
    its disk. An island that is alone writes a checkpoint instead.
    """
    secret_file: str = setting("", resume="free", of_rank=True, traceless=True)
    """File with a secret that all machines of a run share, of 16 to 4096 bytes, which its owner
    alone can read. The launchers that meet (--meet), and the ranks of the other machines, prove it
    before anything else that they send is read. Empty: whoever reaches the meeting point can use
    it. One machine alone does not read it.
    """
    trackers: str = setting("auto", resume="free", of_rank=True, traceless=True, code=True)
    """Trackers for metrics, besides the run's folder: auto (TensorBoard if it is installed), none,
    or names separated by commas: tensorboard, wandb, clearml, mlflow, trackio, or a class of your
    own as package.module:Name.
    """

    def __post_init__(self) -> None:
        if not (self.rounds or self.inner_steps or self.syncs):
            require_range(self, "tokens", above=0)
        require_range(self, *self.limits, "threads", at_least=0)
        require_setting(0 <= self.seed < 2**63, self, "seed", "must be >= 0 and < 2^63")
        require_range(self, "checkpoint_every", "keep_checkpoints", above=0)
        require_setting(
            # With less, a round could be stopped each time before its first inner step.
            self.checkpoint_seconds == 0 or 1 <= self.checkpoint_seconds <= 1e6,
            self,
            "checkpoint_seconds",
            "must be 0, or from 1 to 1e6",
        )
        require_setting(
            self.copy_every == 0 or (self.copy_every > 0 and self.on_rank_failure != "stop"),
            self,
            "copy_every",
            "must be 0, or > 0 with {on_rank_failure} = replace or drop, not {on_rank_failure=}",
        )
        require_range(self, "grace_seconds", above=0, at_most=1e6)
        require_range(self, "silent_seconds", "timeout_seconds", at_least=1, at_most=1e6)
        plain = self.name.isprintable() and not {"/", "\\"} & {*self.name}
        require_setting(
            plain and self.name not in (".", ".."),
            self,
            "name",
            "must be printable characters without slashes, and not . or ..",
        )
        for name in () if self.trackers == "auto" else self.tracker_names:
            try:
                TRACKERS.find(name)
            except ValueError as error:
                problem = f"{error} (auto and none stand alone)"
                raise SettingError(self, "trackers", problem) from error

    @property
    def limits(self) -> dict[str, int]:
        """The budgets by name; 0: no limit."""
        return {
            "tokens": self.tokens,
            "rounds": self.rounds,
            "inner_steps": self.inner_steps,
            "syncs": self.syncs,
        }

    @property
    def tracker_names(self) -> list[str]:
        """The names in `trackers`, each once; none for "none", and "auto" unresolved."""
        names = dict.fromkeys(name.strip() for name in self.trackers.split(","))
        return [] if self.trackers == "none" else list(names)


@dataclass(frozen=True, kw_only=True)
class PlacementSettings:
    """The ranks (processes) that serve a worker. Together, shard_size x replica_size neighbouring
    ranks are an island.
    """

    shard_size: int = setting(1, resume="free")
    """Number of ranks over which a worker's parameters are sharded (FSDP2). 0: all ranks, divided
    equally among the workers.
    """
    replica_size: int = setting(1, resume="free")
    """Number of copies of a worker (or of its shards), whose gradients are summed at every step
    (DDP, HSDP). 0: all ranks, divided equally among the workers.
    """

    def __post_init__(self) -> None:
        require_range(self, "shard_size", "replica_size", at_least=0)
        some = self.shard_size + self.replica_size > 0
        require_setting(some, self, "shard_size", "must be > 0 with {replica_size=}")


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """Memory within which switch.max_micro_batch = "auto" and `adloco probe` find the largest
    micro-batch.
    """

    gib: float = setting(0.0, resume="free")
    """Memory that this process may use, in GiB; adloco probe and max_micro_batch auto need it on a
    CPU. 0: what is free on the GPU when the run starts.
    """
    fraction: float = setting(0.9, resume="free")
    """Fraction of that memory to plan for; the rest is a safety margin."""

    def __post_init__(self) -> None:
        require_range(self, "gib", at_least=0)
        require_range(self, "fraction", above=0, at_most=1)
