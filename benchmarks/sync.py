"""Compares an outer sync and a data-parallel step with bare torch calls on the same ranks, wire
formats with int8, and rounds with a norm test with those without.

    .venv/bin/python benchmarks/sync.py [--part PART] [--quick] [--json FILE]

1. An outer sync (pseudo-gradient, mean over workers, Nesterov step, parameters back to the worker)
   is compared with `all_reduce` of as many bytes. The goal is at most 1.15 times its time. The
   plain mean, without an outer optimizer, and the same outer step in plain torch are shown too.
2. Inner steps of `ddp` are compared with a plain loop around torch's DistributedDataParallel, with
   the same model, batch, optimizer and clipping. The goal is at least 0.97 of its steps per second.

3. Encoding and decoding of each wire format, in pieces as a sync does it, is compared with int8's,
   on one thread. The goal is at most twice its time for int4 and int2.

4. Rounds of 20 inner steps of the default model, with Muon and 8 samples a step, the smallest batch
   of the default recipe, with four test steps in each metric, are compared with those
   of a constant batch. The goal is at most 1.03 of their time.

The sides of each comparison take turns within one start of the ranks. Reported are medians of
their ratio, because machines are noisy. benchmarks/bench.py measures the smaller sizes of 1 and 2
together with all else that a user waits for.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_loop import BATCH, BareLoop, batching, plain_run, problem
from bench_pairs import Seconds, in_turns
from torch import Tensor, nn

from adloco import BatchGuards, Batching, InnerMuon, OuterOptimizer, SwitchMode, Syncing, place
from adloco.algorithms.model_state import Replica
from adloco.algorithms.outer_sync import OuterSync
from adloco.distributed.comm.block_sums import in_pieces
from adloco.distributed.testing import run_on_ranks
from adloco.distributed.wire.bf16 import Bf16
from adloco.distributed.wire.int1 import Int1
from adloco.distributed.wire.int2 import Int2
from adloco.distributed.wire.int4 import Int4
from adloco.distributed.wire.int8 import Int8
from adloco.distributed.wire.topk import TopK
from adloco.distributed.wire.wire_format import WireFormat
from adloco.lab.optimizer_norms.batch_rules import StepNormTest
from adloco.rules.batch_rules.batch_rule import BatchRule
from adloco.rules.batch_rules.constant import ConstantBatch
from adloco.rules.batch_rules.norm_test import NormTest
from adloco.rules.sync_schedule import SyncEvent

NESTEROV = OuterOptimizer(lr=0.7, options={"momentum": 0.9, "nesterov": True})
STEPS = 20


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--part",
        choices=tuple(PARTS),
        help="run this part only; the others' rows stay in the JSON file",
    )
    parser.add_argument("--quick", action="store_true", help="the smallest sizes only")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/sync.json"))
    known = parser.parse_args()
    rows: dict[str, Any] = json.loads(known.json.read_text()) if known.json.exists() else {}
    rows["torch"] = torch.__version__
    for part in PARTS if known.part is None else [known.part]:
        rows[part] = PARTS[part](known.quick)
        print(f"{part}: {json.dumps(rows[part])}", flush=True)
    known.json.write_text(json.dumps(rows, indent=2) + "\n")
    print(f"written to {known.json}")


def sync_rows(quick: bool) -> list[dict[str, Any]]:
    return [
        {"parameters": millions * 10**6, "ranks": ranks}
        | medians(run_on_ranks(sync_times, ranks, millions * 10**6, turns, timeout_seconds=600)[0])
        for millions, turns in ([(1, 40)] if quick else [(1, 40), (10, 15), (100, 5)])
        for ranks in ([2] if quick else [2, 3, 4])
    ]


def step_rows(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for width, turns in [(128, 12)] if quick else [(128, 12), (512, 5)]:
        for ranks in [2] if quick else [2, 4]:
            found = run_on_ranks(step_times, ranks, width, turns, timeout_seconds=600)[0]
            row = {"width": width, "ranks": ranks} | medians(found[0]) | {"parameters": found[1]}
            rows.append(
                row | {name: row[name] / STEPS for name in ("torch_seconds", "ours_seconds")}
            )
    return rows


def sync_times(parameters: int, turns: int) -> Seconds:
    """Seconds of each side on this rank."""
    placement = place(dist.get_world_size())
    comm = placement.comm(range(dist.get_world_size()))
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
    by_hand = SyncByHand(list(model))
    return in_turns(
        {
            "all_reduce": lambda: dist.all_reduce(flat),
            "sync": lambda: outer.sync(event, [replica], weights, comm),
            "mean": lambda: plain.sync(event, [replica], weights, comm),
            "by_hand": by_hand.step,
        },
        turns,
        meet=dist.barrier,
    )


class SyncByHand:
    """DiLoCo's outer step in plain torch, with all differences in one buffer."""

    def __init__(self, params: list[Tensor]) -> None:
        self._params = params
        self._global = [param.detach().clone() for param in params]
        self._buffer = torch.empty(sum(param.numel() for param in params))
        for own, part in zip(
            self._global, self._buffer.split([param.numel() for param in params]), strict=True
        ):
            own.grad = part.view_as(own)
        self._optimizer = NESTEROV(self._global)

    @torch.no_grad()
    def step(self) -> None:
        for own, param in zip(self._global, self._params, strict=True):
            torch.sub(own, param, out=own.grad)
        dist.all_reduce(self._buffer)
        self._buffer.div_(dist.get_world_size())
        self._optimizer.step()
        for own, param in zip(self._global, self._params, strict=True):
            param.copy_(own)


def format_times(count: int) -> dict[str, float]:
    """Nanoseconds for each value of encoding and decoding, and their ratio to int8's.

    count: Values at once.
    """
    # What has been freed once is kept by the allocator, as in a process that trains.
    torch.zeros(1 << 22)
    values = torch.randn(count, generator=torch.Generator().manual_seed(0))
    found = medians(in_turns(wire_formats(values), 15))
    return {
        name.replace("_seconds", "_ns"): round(
            number if name.endswith("_ratio") else number / count * 1e9, 2
        )
        for name, number in found.items()
    }


def wire_formats(values: Tensor) -> dict[str, Callable[[], None]]:
    """For each wire format, a function that encodes and decodes values, in pieces as a sync does.

    values: Of one dimension; as many as fill whole blocks of each format.
    """

    def there_and_back(wire: WireFormat) -> None:
        rows = values.view(-1, wire.block)
        for piece in in_pieces(rows, wire):
            wire.decode(wire.encode(rows[piece]))

    formats = (Int8(), Bf16(), Int4(), Int2(), Int1(), TopK())
    return {wire.key: partial(there_and_back, wire) for wire in formats}


def step_times(width: int, turns: int) -> tuple[Seconds, int]:
    """Seconds of STEPS inner steps on each side, and the model's number of parameters."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    given, batch = problem(width), BATCH * ranks // 2
    own = {"batching": batching(batch), "placement": place(1, replica_size=0)}
    run = plain_run(given, STEPS, **own)
    model = given.build_model()
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    bare = BareLoop(model, given.data, forward=ddp, batch=batch, rank=rank, ranks=ranks)
    sides = {"torch": partial(bare.steps, STEPS), "ours": run.round}
    return in_turns(sides, turns, meet=dist.barrier), run.num_parameters


def metric_times(turns: int) -> dict[str, float]:
    """Seconds of a round with each metric of the norm test, and their ratio to a constant batch."""

    def side(rule: BatchRule) -> Callable[[], Any]:
        batches = Batching(
            rule=rule,
            guards=BatchGuards(initial=BATCH, minimum=BATCH, maximum=BATCH),
            switch=SwitchMode(max_micro_batch=4, mode="always"),
        )
        return plain_run(problem(128), STEPS, inner=InnerMuon(), batching=batches).round

    tests = {
        "euclidean": side(NormTest()),
        "sign": side(StepNormTest(metric="sign")),
        "muon": side(StepNormTest(metric="muon")),
    }
    return medians(in_turns({"constant": side(ConstantBatch()), **tests}, turns))


def medians(seconds: Seconds) -> dict[str, float]:
    """The median seconds of each side (NAME_seconds), and the median ratio of each but the first
    to the first (NAME_ratio).
    """
    first, *others = seconds
    ratios = {
        f"{name}_ratio": statistics.median(
            mine / base for mine, base in zip(seconds[name], seconds[first], strict=True)
        )
        for name in others
    }
    return {f"{name}_seconds": statistics.median(times) for name, times in seconds.items()} | ratios


PARTS: dict[str, Callable[[bool], Any]] = {
    "outer_sync": sync_rows,
    "ddp_steps": step_rows,
    "formats": lambda quick: run_on_ranks(format_times, 1, 1 << (20 if quick else 23))[0],
    "metrics": lambda quick: run_on_ranks(
        metric_times, 1, 3 if quick else 15, timeout_seconds=3600
    )[0],
}
"""() -> the rows of each part, with the smallest sizes only if quick."""

if __name__ == "__main__":
    main()
