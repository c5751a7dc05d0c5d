"""The parts of bench.py about steps and syncs: `single`, the norm test, Muon, co-located trainers,
how often torch.compile compiles while the batch changes; and on ranks, what an outer sync and a
data-parallel step cost.
"""

import shutil
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from bench_loop import BATCH, WIDTHS, BareLoop, batching, plain_run, problem
from bench_pairs import Count, Row, Seconds, chosen, in_turns
from sync import step_times, sync_times

from adloco import AdLoCo, BatchWarmup, Execution, InnerAdamW, InnerMuon, NormTest, place
from adloco.distributed.placement.one_process import num_cores
from adloco.distributed.testing import run_on_ranks

INNER_STEPS = 20
"""H by default; the norm test takes its statistics once in so many steps."""
RANKS, MUON_STEPS = 2, 5
MUON_GOALS = {1: 1.15, 2: 1.25}
"""The largest ratio that is good enough, by the number of shards."""


def single(*, quick: bool) -> Iterator[Row]:
    """Rounds of `single`, with all their records, against as many steps of a loop by hand."""
    for millions, steps, pairs in chosen([(1, INNER_STEPS, 12), (10, 5, 6)], quick):
        torch.set_num_threads(1)
        given = problem(WIDTHS[millions])
        run = plain_run(given, steps)
        bare = BareLoop(given.build_model(), given.data)
        times = in_turns({"bare": partial(bare.steps, steps), "adloco": run.round}, pairs)
        yield Row.of(
            f"`single`, {run.num_parameters / 1e6:.1f}M parameters, {steps} steps on one thread",
            "a loop by hand",
            times["adloco"],
            times["bare"],
            goal=1.03,
        )


def norm_test(*, quick: bool) -> Iterator[Row]:
    """A step with the statistics of the norm test against one without, as one of INNER_STEPS."""
    for millions, pairs in chosen([(1, 40), (10, 14), (30, 10)], quick):
        torch.set_num_threads(1)
        runs = {
            name: plain_run(problem(WIDTHS[millions]), 1, batching=batching(rule=rule))
            for name, rule in (("without", None), ("with", NormTest()))
        }
        times = in_turns({name: run.round for name, run in runs.items()}, pairs)
        yield Row.of(
            f"norm test, {runs['with'].num_parameters / 1e6:.1f}M parameters, "
            f"once in {INNER_STEPS} steps",
            "a constant batch",
            times["with"],
            times["without"],
            goal=1.02,
            as_part_of=INNER_STEPS,
        )


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


def co_located(*, quick: bool) -> Iterator[Row]:
    """A round of several trainers in one process against their rounds one after another."""
    cases = [(128, 4, 2, 12), (128, 4, 4, 6), (64, 2, 4, 12)]
    for width, layers, trainers, pairs in chosen(cases, quick):
        torch.set_num_threads(num_cores())
        given = problem(width, layers=layers, streams=trainers)
        alone = [plain_run(given, INNER_STEPS) for _ in range(trainers)]
        together = plain_run(given, INNER_STEPS, trainers=trainers)
        sides = {"alone": partial(_each, alone), "together": together.round}
        times = in_turns(sides, pairs, warm_up=1)
        yield Row.of(
            f"{trainers} co-located trainers of {together.num_parameters / 1e6:.1f}M parameters",
            "one after another, each on all cores",
            times["together"],
            times["alone"],
            goal=1.0,
        )


def _each(runs: list[AdLoCo]) -> None:
    for run in runs:
        run.round()


def recompiles(*, quick: bool) -> Iterator[Count]:
    """Graphs that torch.compile makes while a batch grows by one sample each round."""
    if shutil.which("g++") is None:
        raise RuntimeError("torch.compile needs a C++ compiler, and there is no g++")
    from torch._dynamo.utils import counters

    batches = range(4, 10 if quick else 25)
    ends = [sum(batches[: number + 1]) for number in range(len(batches) - 1)]
    growing = BatchWarmup(batches=batches[1:], after_samples=ends)
    run = plain_run(
        problem(WIDTHS[1]),
        1,
        batching=batching(batches[0], rule=growing, maximum=batches[-1]),
        execution=Execution(compile=True),
    )
    counters.clear()
    seen = {
        report.trainers[0].trainer_batch: report.trainers[0].micro_batch
        for report in run.rounds(len(batches))
    }
    assert list(seen) == list(batches), "every batch is trained once"
    yield Count(
        what=f"graphs compiled while the batch grows from {batches[0]} to {batches[-1]} samples",
        count=counters["stats"]["unique_graphs"],
        of=f"{len({*seen.values()})} sizes of the largest micro-batch",
        goal=3,
    )


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
