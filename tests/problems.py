"""Small problems with known answers, for tests of all layers."""

import json
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adloco import (
    AdLoCo,
    Batching,
    Execution,
    GradientTest,
    Merging,
    Method,
    OneProcess,
    Problem,
    RoundReport,
    Syncing,
    TensorSource,
)
from adloco.algorithms.method import Source
from adloco.algorithms.model_state import Replica
from adloco.algorithms.outer_sync import OuterSync
from adloco.distributed.comm.comm import Comm
from adloco.models.build import ModelBuilder
from adloco.models.source import ModelOptions
from adloco.models.sources.llama import LlamaShape
from adloco.rules.batch_rules.batch_rule import TrainingPoint
from adloco.rules.sync_schedule import SyncEvent

SHARED_DATA = Path(
    os.environ.get("ADLOCO_SHARED_DATA") or Path(__file__).parents[2] / "shared" / "data"
)
"""Real data beside the checkout, that is no part of the project."""
needs_shared_data = pytest.mark.skipif(
    not SHARED_DATA.exists(), reason=f"there is no {SHARED_DATA} (set ADLOCO_SHARED_DATA)"
)


def cases(named: Mapping[str, Sequence[Any]], default: Collection[str]) -> list[Any]:
    """Parameters of a test by name, in their order.

    Args:
        named: The values of each case.
        default: Names of the cases that always run; the others run in the nightly job.
    """
    assert set(default) <= set(named)
    return [
        pytest.param(*values, id=name, marks=[] if name in default else pytest.mark.nightly)
        for name, values in named.items()
    ]


TWO_WORKERS_PLACED = cases(
    {"workers": (2, 1, 1), "DDP": (2, 1, 2), "FSDP2": (2, 2, 1), "HSDP": (4, 2, 2)},
    default=("workers", "FSDP2"),
)
"""Ranks, shards and replicas for a run of two workers."""


def at(samples: int, requested_batch: int = 1, **others: float) -> TrainingPoint:
    """Where a trainer's training is; its initial batch is 1 unless it is given."""
    initial = int(others.pop("initial_batch", 1))
    return TrainingPoint(
        samples=samples, requested_batch=requested_batch, initial_batch=initial, **others
    )


def regression(
    num_streams: int, samples: int = 240, seed: int = 0, dtype: torch.dtype = torch.float32
) -> TensorSource:
    """Noisy linear regression in three dimensions."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 3, generator=generator, dtype=torch.float64).float()
    targets = inputs @ torch.tensor([1.0, -2.0, 0.5]) + 0.3 * torch.randn(
        samples, generator=generator
    )
    return TensorSource(inputs.to(dtype), targets.to(dtype), num_streams=num_streams, seed=seed)


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 1)


class BlockLM(nn.Module):
    """A language model with everything that sharding meets: repeated blocks, sizes that nothing
    divides, a head tied to the embedding.
    """

    def __init__(self, vocabulary: int = 7, width: int = 5) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        state = self.embedding(ids)
        for block in self.blocks:
            state = state + torch.tanh(block(state))
        logits: Tensor = self.head(state)
        return logits


def next_token(model: Any, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def tokens(samples: int, num_streams: int, vocabulary: int = 7, context: int = 6) -> TensorSource:
    ids = (
        torch.randint(
            0, vocabulary, (samples, context + 1), generator=torch.Generator().manual_seed(0)
        )
        // 2
    )
    return TensorSource(ids, num_streams=num_streams)


def squared_error(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    loss: Tensor = ((model(inputs)[:, 0] - targets) ** 2).mean()
    return loss


class Recording:
    """A source that remembers what was read."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self.num_streams = source.num_streams
        self.reads: list[tuple[int, int, int]] = []
        self.samples: dict[int, list[Tensor]] = {stream: [] for stream in range(source.num_streams)}

    def read(self, stream: int, position: int, count: int) -> Any:
        batch = self.source.read(stream, position, count)
        self.reads.append((stream, position, count))
        self.samples[stream].append(batch[0])
        return batch


class Interrupting:
    """A source that calls a function before one of its reads."""

    def __init__(self, source: Source) -> None:
        self.num_streams = source.num_streams
        self._source = source
        self._action: Callable[[], None] = lambda: None
        self._reads_left = 0
        self._streams: Sequence[int] = range(source.num_streams)

    def before(
        self, read: int, action: Callable[[], None], streams: Sequence[int] | None = None
    ) -> None:
        """Call the action once, before that read from now on.

        Args:
            read: Its number, from 1 on.
            action: May raise an error, which is then the read's.
            streams: Those whose reads count; None: all.
        """
        self._reads_left, self._action = read, action
        self._streams = range(self.num_streams) if streams is None else streams

    def read(self, stream: int, position: int, count: int) -> Any:
        if stream in self._streams and self._reads_left:
            self._reads_left -= 1
            if not self._reads_left:
                self._action()
        return self._source.read(stream, position, count)


class Clock:
    """Seconds that all threads of the process have taken together."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class ClockOfThread(Clock, threading.local):
    """Seconds of the calling thread alone, as if all threads ran at the same time."""


class Timed:
    """A source in which a sample takes a second, and three seconds in a slow stream."""

    def __init__(self, source: TensorSource, clock: Clock, slow: int | None = None) -> None:
        self.source, self.num_streams = source, source.num_streams
        self.clock, self.slow = clock, slow

    def read(self, stream: int, position: int, count: int) -> Any:
        self.clock.now += count * (3 if stream == self.slow else 1)
        return self.source.read(stream, position, count)


def sgd(lr: float) -> Callable[[nn.Module], Sequence[torch.optim.Optimizer]]:
    return lambda model: [torch.optim.SGD(model.parameters(), lr=lr)]


def adamw(lr: float) -> Callable[[nn.Module], Sequence[torch.optim.Optimizer]]:
    return lambda model: [torch.optim.AdamW(model.parameters(), lr=lr)]


def outer_sgd(
    lr: float, momentum: float = 0.0, nesterov: bool = False
) -> Callable[[Sequence[Tensor]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(
        parameters, lr=lr, momentum=momentum, nesterov=nesterov
    )


def make_run(**changes: Any) -> AdLoCo:
    """A regression run of one trainer with two workers, with these changes.

    The names are those of the sections' fields.
    """
    told: dict[str, Any] = {
        "build_model": linear,
        "loss_fn": squared_error,
        "inner": sgd(0.05),
        "outer": outer_sgd(1.0),
        "sync_every": 3,
        "workers_per_trainer": 2,
        "max_grad_norm": 0.0,
        "test_steps": 1,
        "placement": OneProcess(threads=1),
    } | changes
    told.setdefault("data", regression(told.get("num_trainers", 1) * told["workers_per_trainer"]))
    renamed = {
        "batch": "rule",
        "merge": "policy",
        "test_groups": "groups",
        "test_steps": "steps",
        "test_step": "step",
    }
    told = {renamed.get(name, name): value for name, value in told.items()}

    told = {name: value for name, value in told.items() if value is not None or name == "outer"}

    def take(section: Any) -> Any:
        return section(
            **{field.name: told.pop(field.name) for field in fields(section) if field.name in told}
        )

    problem, method, syncing, merging, execution = (
        take(section) for section in (Problem, Method, Syncing, Merging, Execution)
    )
    told["test"] = take(GradientTest)
    batching = take(Batching)
    return AdLoCo(
        problem,
        method,
        syncing=syncing,
        merging=merging,
        execution=execution,
        batching=batching,
        **told,
    )


def replica(params: Sequence[Tensor]) -> Replica:
    """A worker's live tensors, without buffers and residuals."""
    return Replica(
        names=[str(index) for index in range(len(params))], params=params, buffers=[], residuals=[]
    )


def outer_sync(
    start: Sequence[Tensor],
    outer: Any,
    fragments: Sequence[Sequence[int]] | None = None,
    **syncing: Any,
) -> OuterSync:
    """An outer optimizer over these parameters. syncing: Further fields of `Syncing`."""
    return OuterSync(replica(start), Syncing(outer=outer, **syncing), fragments)


def sync_all(
    outer: OuterSync, per_worker: Sequence[Sequence[Tensor]], weights: Sequence[float], comm: Comm
) -> None:
    """Sync every fragment at once."""
    for fragment in range(len(outer.fragments)):
        event = SyncEvent(step=0, kind="sync", fragment=fragment)
        outer.sync(event, [replica(params) for params in per_worker], weights, comm)


def round_with_ends(run: AdLoCo) -> tuple[RoundReport, list[Tensor]]:
    """A round, and each worker's flat parameters just before its first sync."""
    ends: list[Tensor] = []

    def remember(phase: str) -> AbstractContextManager[None]:
        if phase == "sync" and not ends:
            ends.extend(
                torch.cat([tensor.detach().flatten().clone() for tensor in worker.replica.params])
                for worker in run.workers.values()
            )
        return nullcontext()

    report = run.round(phase=remember)
    assert report is not None
    return report, ends


def params_of(run: AdLoCo, trainer: int = 0) -> Tensor:
    """Global parameters of a trainer, flat."""
    return torch.cat(
        [
            parameter.detach().flatten().clone()
            for parameter in run.trainers[trainer].outer.global_params
        ]
    )


def without_timings(line: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl without what depends on the machine."""
    of_the_machine = ("seconds", "tokens_per_second", "mfu", "memory_bytes", "memory")
    of_the_machine += ("workers", "sync")
    of_the_machine += ("rows_read",)  # What the cache has already is not read.
    decided = {key: value for key, value in line.items() if key not in of_the_machine}
    return decided | {"sync": {key: line["sync"][key] for key in ("bytes", "compression_ratio")}}


def numbers_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics.jsonl of a run without what depends on the machine."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [without_timings(json.loads(line)) for line in lines]


def build_llama(shape: LlamaShape, vocab_size: int, seed: int) -> nn.Module:
    """A causal Llama with memory on the CPU and weights drawn from the seed."""
    return ModelBuilder(
        config=shape.config(vocab_size),
        head="AutoModelForCausalLM",
        options=ModelOptions(),
        seed=seed,
    ).whole()
