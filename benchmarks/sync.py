"""Compares an outer sync and a data-parallel step with bare torch calls on the same ranks, wire
formats with int8, and rounds with a norm test with those without.

    .venv/bin/python benchmarks/sync.py [--part PART] [--quick] [--json FILE]

1. An outer sync (pseudo-gradient, mean over workers, Nesterov step, parameters back to the worker)
   is compared with `all_reduce` of as many bytes on the same group. The goal is at most 1.15 times
   its time. The plain mean, without an outer optimizer, is shown too.
2. Inner steps of `ddp` are compared with a plain loop around torch's DistributedDataParallel, with
   the same model, batch, optimizer and clipping. The goal is at least 0.97 of its steps per second.

3. Encoding and decoding of each wire format, in pieces as a sync does it, is compared with int8's,
   on one thread. The goal is at most twice its time for int4 and int2.

4. Rounds of 20 inner steps of the default model, with Muon and 8 samples a step, the smallest batch
   of the default recipe, with a norm test in each metric on the first step, are compared with those
   of a constant batch. The goal is at most 1.03 of their time.

The sides of each comparison take turns within one start of the ranks. Reported are medians of
their ratio, because machines are noisy.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adloco import (
    AdLoCo,
    BatchGuards,
    Batching,
    InnerAdamW,
    InnerMuon,
    Method,
    OuterOptimizer,
    Problem,
    SwitchMode,
    Syncing,
    TensorSource,
    place,
)
from adloco.algorithms.model_state import Replica
from adloco.algorithms.outer_sync import OuterSync
from adloco.distributed.codecs.bf16 import Bf16
from adloco.distributed.codecs.codec import WireFormat
from adloco.distributed.codecs.int2 import Int2
from adloco.distributed.codecs.int4 import Int4
from adloco.distributed.codecs.int8 import Int8
from adloco.distributed.codecs.topk import TopK
from adloco.distributed.comm.compressed import in_pieces
from adloco.distributed.comm.process_group import GroupComm
from adloco.distributed.testing import run_on_ranks
from adloco.models.sources.llama import LlamaShape, build_llama
from adloco.rules.batch_rules.batch_rule import BatchRule
from adloco.rules.batch_rules.constant import ConstantBatch
from adloco.rules.batch_rules.norm_test import Metric, NormTest
from adloco.rules.sync_schedule import SyncEvent
from adloco.tasks.language_model import next_token_loss

NESTEROV = OuterOptimizer(lr=0.7, options={"momentum": 0.9, "nesterov": True})
CONTEXT, BATCH = 128, 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part",
        choices=("outer_sync", "ddp_steps", "codecs", "metrics"),
        help="run this part only; the others' rows stay in the JSON file",
    )
    parser.add_argument("--quick", action="store_true", help="the smallest sizes only")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/sync.json"))
    known = parser.parse_args()
    sizes, ranks = ([1], [2]) if known.quick else ([1, 10, 100], [2, 3, 4])
    rows: dict[str, Any] = json.loads(known.json.read_text()) if known.json.exists() else {}
    rows["torch"] = torch.__version__
    if known.part in (None, "outer_sync"):
        rows["outer_sync"] = [sync_row(millions, count) for millions in sizes for count in ranks]
    if known.part in (None, "ddp_steps"):
        rows["ddp_steps"] = [
            step_row(width, count)
            for width in ([128] if known.quick else [128, 512])
            for count in ranks[:1] + ranks[2:]
        ]
    if known.part in (None, "codecs"):
        rows["codecs"] = run_on_ranks(codec_times, 1, 1 << (20 if known.quick else 23))[0]
        print("codecs, one thread:", json.dumps(rows["codecs"]), flush=True)
    if known.part in (None, "metrics"):
        rows["metrics"] = run_on_ranks(
            metric_times, 1, 3 if known.quick else 15, timeout_seconds=3600
        )[0]
        print("norm tests, one thread:", json.dumps(rows["metrics"]), flush=True)
    known.json.write_text(json.dumps(rows, indent=2) + "\n")
    print(f"written to {known.json}")


def sync_row(millions: int, ranks: int) -> dict[str, Any]:
    rounds = {1: 40, 10: 15, 100: 5}[millions]
    row = {"parameters": millions * 1_000_000, "ranks": ranks} | run_on_ranks(
        sync_times, ranks, millions * 1_000_000, rounds, timeout_seconds=600
    )[0]
    print(
        f"outer sync  {millions:>4}M parameters  {ranks} ranks"
        f"  all_reduce {1e3 * row['all_reduce_seconds']:8.1f} ms"
        f"  sync {1e3 * row['sync_seconds']:8.1f} ms  ratio {row['sync_ratio']:.2f}"
        f"  plain mean {row['mean_ratio']:.2f}",
        flush=True,
    )
    return row


def sync_times(parameters: int, rounds: int) -> dict[str, float]:
    placement = place(dist.get_world_size())
    comm = placement.comm(range(dist.get_world_size()))
    assert isinstance(comm, GroupComm)
    # Sizes like those of a model: matrices, and vectors in between.
    sizes = [size for _ in range(10) for size in (parameters // 10 - 1000, 1000)]
    model = nn.ParameterList(torch.randn(size) for size in sizes)
    replica = Replica.of(model, with_residuals=False, on_host=False)
    outer, plain = (
        OuterSync(replica, Syncing(outer=NESTEROV)),
        OuterSync(replica, Syncing(outer=None)),
    )
    event = SyncEvent(step=0, kind="sync", fragment=0)
    weights = [1 / dist.get_world_size()]
    flat = torch.randn(parameters)

    def sync(step: OuterSync) -> None:
        step.sync(event, [replica], weights, comm)

    return paired(
        {
            "all_reduce": lambda: dist.all_reduce(flat, group=comm._group),
            "sync": lambda: sync(outer),
            "mean": lambda: sync(plain),
        },
        rounds,
    )


def codec_times(count: int) -> dict[str, float]:
    """Nanoseconds for each value of encoding and decoding, and their ratio to int8's.

    count: Values at once.
    """
    values = torch.randn(count, generator=torch.Generator().manual_seed(0))

    def there_and_back(codec: WireFormat) -> None:
        rows = values.view(-1, codec.block)
        for piece in in_pieces(rows, codec):
            codec.decode(codec.encode(rows[piece]))

    codecs: list[Int8 | Bf16 | Int4 | Int2 | TopK] = [Int8(), Bf16(), Int4(), Int2(), TopK()]
    times = paired({codec.key: partial(there_and_back, codec) for codec in codecs}, rounds=15)
    return {
        name.replace("_seconds", "_ns"): round(
            number if name.endswith("_ratio") else number / count * 1e9, 2
        )
        for name, number in times.items()
    }


def step_row(width: int, ranks: int) -> dict[str, Any]:
    row = {"width": width, "ranks": ranks} | run_on_ranks(
        step_times, ranks, width, 12 if width == 128 else 5, timeout_seconds=600
    )[0]
    print(
        f"ddp step    {row['parameters'] / 1e6:>4.1f}M parameters  {ranks} ranks"
        f"  torch DDP {1e3 * row['torch_seconds']:8.1f} ms"
        f"  ours {1e3 * row['ours_seconds']:8.1f} ms"
        f"  steps/s {1 / row['ours_ratio']:.3f} of torch's",
        flush=True,
    )
    return row


def step_times(width: int, rounds: int) -> dict[str, float]:
    """Seconds of an inner step on each side, their ratio, and the model's number of parameters."""
    steps, ranks = 20, dist.get_world_size()
    shape = LlamaShape(hidden_size=width, intermediate_size=width * 11 // 4)
    data = TensorSource(
        torch.randint(0, 257, (4000, CONTEXT + 1), generator=torch.Generator().manual_seed(0)),
        num_streams=1,
    )
    batch = BATCH * ranks // 2
    run = AdLoCo(
        Problem(
            build_model=lambda: build_llama(shape, 257, seed=0), loss_fn=next_token_loss, data=data
        ),
        Method(sync_every=steps),
        inner=InnerAdamW(),
        syncing=Syncing(outer=None),
        batching=Batching(
            guards=BatchGuards(initial=batch),
            switch=SwitchMode(max_micro_batch=batch, mode="always"),
        ),
        placement=place(1, replica_size=0),
    )
    model = build_llama(shape, 257, seed=0)
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = InnerAdamW()(model)[0]
    position = 0

    def plain() -> None:
        nonlocal position
        for _ in range(steps):
            ids: Tensor = data.read(0, position + dist.get_rank() * batch // ranks, batch // ranks)
            position += batch
            loss = next_token_loss(ddp, ids)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            float(loss.detach())

    times = paired({"torch": plain, "ours": lambda: list(run.rounds(1))}, rounds)
    return {
        key: value / steps if key.endswith("seconds") else value for key, value in times.items()
    } | {"parameters": run.num_parameters}


def metric_times(rounds: int) -> dict[str, float]:
    """Seconds of a round with each metric of the norm test, and their ratio to a constant batch."""
    data = TensorSource(
        torch.randint(0, 257, (4000, CONTEXT + 1), generator=torch.Generator().manual_seed(0)),
        num_streams=1,
    )

    def side(rule: BatchRule) -> Callable[[], Any]:
        run = AdLoCo(
            Problem(
                build_model=lambda: build_llama(LlamaShape(), 257, seed=0),
                loss_fn=next_token_loss,
                data=data,
            ),
            Method(),
            inner=InnerMuon(),
            syncing=Syncing(outer=None),
            batching=Batching(
                rule=rule,
                guards=BatchGuards(initial=BATCH, minimum=BATCH, maximum=BATCH),
                switch=SwitchMode(max_micro_batch=4, mode="always"),
            ),
        )
        return lambda: list(run.rounds(1))

    metrics: tuple[Metric, ...] = ("euclidean", "sign", "muon")
    tests = {metric: side(NormTest(metric=metric)) for metric in metrics}
    return paired({"constant": side(ConstantBatch()), **tests}, rounds)


def paired(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Time several functions in turns, after two rounds of warm-up.

    Args:
        sides: Functions by name.
        rounds: Times that each is measured.

    Returns:
        The median seconds of each (NAME_seconds), and the median ratio of each to the first
        (NAME_ratio).
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(rounds + 2):
        for name, function in sides.items():
            dist.barrier()
            began = time.perf_counter()
            function()
            dist.barrier()
            if index >= 2:
                seconds[name].append(time.perf_counter() - began)
    first, *others = sides
    ratios = {
        f"{name}_ratio": statistics.median(
            mine / base for mine, base in zip(seconds[name], seconds[first], strict=True)
        )
        for name in others
    }
    return {f"{name}_seconds": statistics.median(times) for name, times in seconds.items()} | ratios


if __name__ == "__main__":
    main()
