"""Parts of bench.py that train in this process: `single`, the norm test, co-located trainers, and
how often torch.compile compiles while the batch changes.
"""

import shutil
from collections.abc import Iterator
from functools import partial

import torch
from bench_loop import WIDTHS, BareLoop, batching, problem
from bench_pairs import Count, Row, chosen, in_turns

from adloco import AdLoCo, BatchWarmup, Execution, InnerAdamW, Method, NormTest, Syncing
from adloco.distributed.placement.one_process import num_cores

INNER_STEPS = 20
"""H by default; the norm test takes its statistics once in so many steps."""


def single(*, quick: bool) -> Iterator[Row]:
    """Rounds of `single`, with all their records, against as many steps of a loop by hand."""
    for millions, steps, pairs in chosen([(1, INNER_STEPS, 12), (10, 5, 6)], quick):
        torch.set_num_threads(1)
        given = problem(WIDTHS[millions])
        run = AdLoCo(
            given,
            Method(sync_every=steps),
            inner=InnerAdamW(),
            syncing=Syncing(outer=None),
            batching=batching(),
        )
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
            name: AdLoCo(
                problem(WIDTHS[millions]),
                Method(sync_every=1),
                inner=InnerAdamW(),
                syncing=Syncing(outer=None),
                batching=batching(rule=rule),
            )
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


def co_located(*, quick: bool) -> Iterator[Row]:
    """A round of several trainers in one process against their rounds one after another."""
    cases = [(128, 4, 2, 12), (128, 4, 4, 6), (64, 2, 4, 12)]
    for width, layers, trainers, pairs in chosen(cases, quick):
        torch.set_num_threads(num_cores())
        given = problem(width, layers=layers, streams=trainers)
        runs = [
            AdLoCo(
                given,
                Method(num_trainers=count, sync_every=INNER_STEPS),
                inner=InnerAdamW(),
                syncing=Syncing(outer=None),
                batching=batching(),
            )
            for count in (*[1] * trainers, trainers)
        ]
        *alone, together = runs
        times = in_turns(
            {"alone": partial(_each, alone), "together": together.round},
            pairs,
            warm_up=1,
        )
        yield Row.of(
            f"{trainers} co-located trainers of {together.num_parameters / 1e6:.1f}M parameters",
            "one after another, each on all cores",
            times["together"],
            times["alone"],
            goal=1.0,
        )


def recompiles(*, quick: bool) -> Iterator[Count]:
    """Graphs that torch.compile makes while a batch grows by one sample each round."""
    if shutil.which("g++") is None:
        raise RuntimeError("torch.compile needs a C++ compiler, and there is no g++")
    from torch._dynamo.utils import counters

    batches = range(4, 10 if quick else 25)
    run = AdLoCo(
        problem(WIDTHS[1]),
        Method(sync_every=1),
        inner=InnerAdamW(),
        syncing=Syncing(outer=None),
        batching=batching(
            batches[0],
            rule=BatchWarmup(
                batches=batches[1:],
                after_samples=[sum(batches[: number + 1]) for number in range(len(batches) - 1)],
            ),
            maximum=batches[-1],
        ),
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


def _each(runs: list[AdLoCo]) -> None:
    for run in runs:
        run.round()
