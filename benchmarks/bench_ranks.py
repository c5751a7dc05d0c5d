"""The parts of bench.py about ranks and bytes: Muon, what an outer sync and a data-parallel step
cost, and wire formats.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from bench_loop import BATCH, INNER_STEPS, WIDTHS, BareLoop, batching, plain_run, problem
from bench_pairs import Row, Seconds, Sides, chosen, in_turns
from torch import Tensor, nn

from adloco import InnerAdamW, InnerMuon, OuterOptimizer, Syncing, place
from adloco.algorithms.model_state import Replica
from adloco.algorithms.outer_sync import OuterSync
from adloco.distributed.comm.block_sums import in_pieces
from adloco.distributed.testing import run_on_ranks
from adloco.distributed.wire.bf16 import Bf16
from adloco.distributed.wire.int1 import Int1
from adloco.distributed.wire.int2 import Int2
from adloco.distributed.wire.int4 import Int4
from adloco.distributed.wire.int8 import Int8
from adloco.distributed.wire.wire_format import WireFormat
from adloco.rules.sync_schedule import SyncEvent

NESTEROV = OuterOptimizer(lr=0.7, options={"momentum": 0.9, "nesterov": True})
RANKS, MUON_STEPS = 2, 5
MUON_GOALS = {1: 1.15, 2: 1.25}
"""The largest ratio that is good enough, by the number of shards."""
FORMAT_GOALS = {"int4": 2.0, "int2": 2.0}


def muon(*, quick: bool) -> Iterator[Row]:
    """Rounds of the default model with Muon against those with AdamW."""
    for shards, pairs in chosen([(1, 40), (2, 30)], quick):
        seconds, parameters = run_on_ranks(
            optimizer_times, shards, WIDTHS[1], pairs, timeout_seconds=600
        )[0]
        where = "one thread" if shards == 1 else f"{shards} shards on {shards} ranks"
        yield Row.of(
            f"Muon, {parameters / 1e6:.1f}M parameters, {MUON_STEPS} steps of {BATCH} samples, "
            f"{where}",
            "AdamW",
            seconds["Muon"],
            seconds["AdamW"],
            goal=MUON_GOALS[shards],
        )


def optimizer_times(width: int, pairs: int) -> tuple[Seconds, int]:
    """Seconds of MUON_STEPS inner steps with each optimizer, and the model's number of parameters.

    The model is sharded over the ranks that call it; each rank computes on one thread.
    """
    runs = {
        name: plain_run(problem(width), MUON_STEPS, inner=inner, placement=place(1, shard_size=0))
        for name, inner in (("AdamW", InnerAdamW()), ("Muon", InnerMuon()))
    }
    sides = {name: run.round for name, run in runs.items()}
    return in_turns(sides, pairs, meet=dist.barrier), runs["Muon"].num_parameters


def outer_sync(*, quick: bool) -> Iterator[Row]:
    """An outer sync against all_reduce of as many bytes, and against the same steps by hand."""
    for millions, turns in chosen([(1, 60), (10, 20), (30, 10)], quick):
        seconds = run_on_ranks(sync_times, RANKS, millions * 10**6, turns, timeout_seconds=600)[0]
        for name, text in (
            ("all_reduce", "a bare `all_reduce`"),
            ("by_hand", "the same outer step in plain torch"),
        ):
            yield Row.of(
                f"outer sync (Nesterov), {millions}M parameters, {RANKS} ranks",
                text,
                seconds["sync"],
                seconds[name],
                goal=1.15 if millions > 1 else None,
            )


def ddp(*, quick: bool) -> Iterator[Row]:
    """Rounds of `ddp` against as many steps of torch's DistributedDataParallel."""
    for millions, turns in chosen([(1, 12), (10, 4)], quick):
        seconds, parameters = run_on_ranks(
            step_times, RANKS, WIDTHS[millions], turns, timeout_seconds=600
        )[0]
        yield Row.of(
            f"`ddp`, {parameters / 1e6:.1f}M parameters, {RANKS} ranks",
            "a loop by hand with DistributedDataParallel",
            seconds["ours"],
            seconds["torch"],
            goal=1.03,
        )


def wire_format_times(*, quick: bool) -> Iterator[Row]:
    """Encoding and decoding in each wire format against int8, on one thread."""
    torch.set_num_threads(1)
    # What has been freed once is kept by the allocator, as in a process that trains.
    torch.zeros(1 << 22)
    for count, pairs in chosen([(1 << 23, 15)], quick):
        values = torch.randn(count, generator=torch.Generator().manual_seed(0))
        times = in_turns(wire_formats(values), pairs)
        for name in [name for name in times if name != "int8"]:
            yield Row.of(
                f"`{name}`, {count / 1e6:.1f}M values there and back",
                "`int8`",
                times[name],
                times["int8"],
                goal=FORMAT_GOALS.get(name),
            )


def sync_times(parameters: int, turns: int) -> Seconds:
    """Seconds of each side on this rank."""
    placement = place(dist.get_world_size())
    comm = placement.comm(range(dist.get_world_size()))
    # Sizes like those of a model: matrices, and vectors in between.
    sizes = [size for _ in range(10) for size in (parameters // 10 - 1000, 1000)]
    model = nn.ParameterList(torch.randn(size) for size in sizes)
    replica = Replica.of(model)
    outer = OuterSync(replica, Syncing(outer=NESTEROV))
    event = SyncEvent(step=0, kind="sync", fragment=0)
    weights = [1 / dist.get_world_size()]
    flat = torch.randn(parameters)
    by_hand = SyncByHand(list(model))
    return in_turns(
        {
            "all_reduce": lambda: dist.all_reduce(flat),
            "sync": lambda: outer.sync(event, [replica], weights, comm),
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


def wire_formats(values: Tensor) -> dict[str, Callable[[], None]]:
    """For each wire format, a function that encodes and decodes values, in pieces as a sync does.

    values: Of one dimension; as many as fill whole blocks of each format.
    """

    def there_and_back(wire: WireFormat) -> None:
        rows = values.view(-1, wire.block)
        for piece in in_pieces(rows, wire):
            wire.decode(wire.encode(rows[piece]))

    formats = (Int8(), Bf16(), Int4(), Int2(), Int1())
    return {wire.key: partial(there_and_back, wire) for wire in formats}


def step_times(width: int, turns: int) -> tuple[Seconds, int]:
    """Seconds of INNER_STEPS inner steps on each side, and the model's number of parameters."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    given, batch = problem(width), BATCH * ranks // 2
    placement = place(1, replica_size=0)
    run = plain_run(given, INNER_STEPS, batching=batching(batch), placement=placement)
    model = given.build_model()
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    bare = BareLoop(model, given.data, forward=ddp, batch=batch, rank=rank, ranks=ranks)
    sides: Sides = {"torch": partial(bare.steps, INNER_STEPS), "ours": run.round}
    return in_turns(sides, turns, meet=dist.barrier), run.num_parameters
