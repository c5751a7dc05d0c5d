"""Settings of a run that no single mechanism owns."""

from dataclasses import dataclass
from typing import Literal

from adloco.config.register import Register
from adloco.errors import require
from adloco.tracking.tracker import TrackerSettings

TRACKERS = Register(package="adloco.tracking", protocol=TrackerSettings)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How long a run is, where it goes, and on what it runs."""

    folder: str = ""
    """Folder of the run's files; must not exist yet. Empty: runs/ with the recipe's name and the
    time.
    """
    name: str = ""
    """Name of the recipe, shown in tables and reports. Empty: that of the recipe's file."""
    tokens: int = 1_200_000
    """Budget: tokens trained on, over all trainers. The last round ends with the inner step that
    reaches it.
    """
    seed: int = 0
    """Seed of the initial parameters and of the order of the data."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda, cuda:1, ..."""
    threads: int = 0
    """Workers that run at once; 0: one per core on a CPU, one on a GPU. Does not change the
    numbers.
    """
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16: mixed precision by autocast; auto: bf16 where the device computes it natively, else
    fp32.
    """
    compile: bool = False
    """Compile the model with torch.compile (slow to start, faster steps)."""
    checkpoint_every: int = 10
    """Rounds from one checkpoint to the next; the last round always writes one."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints stay."""
    trackers: str = "auto"
    """auto (TensorBoard where it is installed), none, or names separated by commas: tensorboard,
    wandb, clearml, mlflow, trackio, or a class of your own as package.module:Name.
    """

    def __post_init__(self) -> None:
        require(self.tokens > 0, f"run.tokens must be > 0, got {self.tokens}")
        require(0 <= self.seed < 2**63, f"run.seed must be >= 0 and < 2^63, got {self.seed}")
        require(self.threads >= 0, f"run.threads must be >= 0, got {self.threads}")
        require(
            self.checkpoint_every > 0,
            f"run.checkpoint_every must be > 0, got {self.checkpoint_every}",
        )
        require(
            self.keep_checkpoints > 0,
            f"run.keep_checkpoints must be > 0, got {self.keep_checkpoints}",
        )
        own = [name for name in self.tracker_names if ":" in name]
        known = self.trackers in ("auto", "none") or (
            {*self.tracker_names} - {*own} <= TRACKERS.classes.keys()
        )
        require(
            known,
            f"run.trackers must be auto, none, or of {', '.join(TRACKERS.classes)}, or classes of "
            "your own "
            f"as package.module:Name, separated by commas, got {self.trackers!r}",
        )
        for name in own:
            try:
                TRACKERS.find(name)
            except ValueError as error:
                raise ValueError(f"run.trackers {error}") from error

    @property
    def tracker_names(self) -> list[str]:
        """The trackers asked for, each once; auto as it stands."""
        return (
            []
            if self.trackers == "none"
            else list(dict.fromkeys(name.strip() for name in self.trackers.split(",")))
        )


@dataclass(frozen=True, kw_only=True)
class PlacementSettings:
    """How several ranks serve a worker. The ranks of an island are neighbours: shard_size x
    replica_size of them.
    """

    shard_size: int = 1
    """Ranks over which a worker's parameters are sharded (FSDP2); 0: as many as there are for each
    worker.
    """
    replica_size: int = 1
    """Copies of a worker (or of its shards), whose gradients are summed at every step (DDP, HSDP);
    0: as many as there are for each worker.
    """

    def __post_init__(self) -> None:
        require(self.shard_size >= 0, f"placement.shard_size must be >= 0, got {self.shard_size}")
        require(
            self.replica_size >= 0, f"placement.replica_size must be >= 0, got {self.replica_size}"
        )
        require(
            self.shard_size + self.replica_size > 0,
            "one of placement.shard_size and placement.replica_size must be > 0, got 0 and 0",
        )


@dataclass(frozen=True, kw_only=True)
class MemorySettings:
    """The budget in which switch.max_micro_batch = "auto" looks for the largest micro-batch."""

    gib: float = 0.0
    """Memory that this process may take, in GiB; needed on a CPU. 0: what is free on the GPU when
    the run starts.
    """
    fraction: float = 0.9
    """Part of it to plan for; the rest is a margin."""

    def __post_init__(self) -> None:
        require(self.gib >= 0, f"memory.gib must be >= 0, got {self.gib}")
        require(0 < self.fraction <= 1, f"memory.fraction must be in (0, 1], got {self.fraction}")


@dataclass(frozen=True, kw_only=True)
class ProfileSettings:
    """What to record of a run's resources, beyond the metrics."""

    memory: bool = False
    """On a GPU: PyTorch's history of allocations in the first process, written to
    profile/memory-rank0.pickle at the end.
    """
