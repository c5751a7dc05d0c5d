"""The parts of bench.py in one process: `single`, the norm test, co-located trainers, how often
torch.compile compiles while the batch changes, checkpoints, and text.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from bench_loop import INNER_STEPS, WIDTHS, BareLoop, batching, plain_run, problem
from bench_pairs import Count, Row, Sides, chosen, in_turns

from adloco import AdLoCo, BatchWarmup, Execution, NormTest
from adloco.config.recipe import build_recipe, override, read_values
from adloco.data.data_settings import DataSettings
from adloco.data.files import library_texts
from adloco.data.token_cache import begin_cache, fill
from adloco.data.tokenizers import make_tokenizer
from adloco.distributed.placement.threads import num_cores
from adloco.run.training_run import TrainingRun

TOKENIZER = "bpe:4096"
ROUNDS = 10
"""Rounds of a block with and without checkpoints."""


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


def co_located(*, quick: bool) -> Iterator[Row]:
    """A round of several trainers in one process against their rounds one after another."""
    cases = [(128, 4, 2, 12), (128, 4, 4, 6), (64, 2, 4, 12)]
    for width, layers, trainers, pairs in chosen(cases, quick):
        torch.set_num_threads(num_cores())
        given = problem(width, layers=layers, streams=trainers)
        alone = [plain_run(given, INNER_STEPS) for _ in range(trainers)]
        together = plain_run(given, INNER_STEPS, trainers=trainers)
        sides: Sides = {"alone": partial(_each, alone), "together": together.round}
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


def checkpoints(*, quick: bool) -> Iterator[Row]:
    """Rounds of the default recipe with checkpoints against the same rounds without, in seconds in
    which threads were busy. The write that is in progress at a block's end is waited for, so the
    ratios are upper bounds.
    """
    never = 10**9
    with tempfile.TemporaryDirectory() as folder:
        for every, pairs in chosen([(1, 4), (10, 4)], quick):
            sides = {
                str(each): partial(_block, _run(Path(folder, f"{every}-{each}"), each, pairs))
                for each in (never, every)
            }
            times = in_turns(sides, pairs, warm_up=1, clock=time.process_time)
            yield Row.of(
                f"a checkpoint every {every} rounds, busy seconds of {ROUNDS}",
                "none",
                times[str(every)],
                times[str(never)],
                goal=1.02,
            )


def _run(folder: Path, every: int, pairs: int) -> tuple[TrainingRun, Iterator[Any]]:
    own = {
        "run.folder": str(folder),
        "run.checkpoint_every": str(every),
        # The last round saves in all runs, so it is not trained.
        "run.rounds": str(ROUNDS * (pairs + 1) + 1),
        "run.tokens": "1000000000",
        "run.trackers": "none",
        "batch.maximum": "4",
    }
    run = TrainingRun.create(build_recipe(override(read_values("adloco"), list(own.items()))))
    return run, run.rounds()


def _block(of: tuple[TrainingRun, Iterator[Any]]) -> None:
    run, under_way = of
    for _ in range(ROUNDS):
        next(under_way)
    run.saving.wait()


def prepare_text(*, quick: bool) -> Iterator[Row]:
    """Python's standard library, from a file to a complete token cache, against `tokenizers` on the
    same texts in memory, both with all cores.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    texts = list(library_texts())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text_file = folder / "texts.jsonl"
        with text_file.open("w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        made = make_tokenizer(TOKENIZER, texts[:200]).to_transformers(whole=False)
        made.save_pretrained(folder / "tokenizer")
        caches = count()
        sides: Sides = {
            "tokenizer": partial(made.backend_tokenizer.encode_batch_fast, texts),
            "prepare": lambda: _prepared(folder, text_file, f"cache-{next(caches)}"),
        }
        times = in_turns(sides, 1 if quick else 4, warm_up=0)
    megabytes = sum(map(len, texts)) / 1e6
    yield Row.of(
        f"`adloco prepare` of {megabytes:.0f} MB with {TOKENIZER}",
        f"`tokenizers` on the texts in memory, {num_cores()} threads",
        times["prepare"],
        times["tokenizer"],
    )


def _prepared(folder: Path, text_file: Path, cache: str) -> Any:
    data = DataSettings(
        path=str(text_file), tokenizer=str(folder / "tokenizer"), cache=str(folder / cache)
    )
    for state in fill(begin_cache(data), num_cores()):
        last = state
    assert last.complete, "the whole text is prepared"
