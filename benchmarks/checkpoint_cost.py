"""Measures how much longer rounds take with checkpoints.

    .venv/bin/python benchmarks/checkpoint_cost.py [RECIPE] [--every 1,10] [--rounds 10]
        [--blocks 4] [--section.key VALUE ...]

The same run is trained several times, in one process and in turns: once without checkpoints, and
once for each number of rounds from one checkpoint to the next. A turn is a block of rounds.
Checkpoints change no numbers, so the runs do the same work in the same block, and each block gives
a ratio of their seconds, and of the seconds that cores were busy, which say more on a machine that
others use. The write that is in progress at the end of a block is waited for, so the ratios are
upper bounds. The first block warms up and does not count. The goal is at most 2%.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from adloco.cli.arguments import take_settings
from adloco.config.recipe import build_recipe, override, read_values
from adloco.run.training_run import TrainingRun

NEVER = 10**9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", default="adloco", help="default: %(default)s")
    parser.add_argument("--every", default="1,10", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=10, help="of a block (default: %(default)s)")
    parser.add_argument("--blocks", type=int, default=4, help="that count (default: %(default)s)")
    settings, words = take_settings(sys.argv[1:])
    known = parser.parse_args(words)
    every, rounds = [int(number) for number in known.every.split(",")], known.rounds
    if uneven := [number for number in every if rounds % number]:
        parser.error(f"--rounds must be a multiple of each --every, got {rounds} and {uneven}")
    base = override(read_values(known.recipe), settings)
    with TemporaryDirectory() as folder:
        runs = {
            number: started(base, f"{folder}/{number}", number, known) for number in [NEVER, *every]
        }
        blocks = in_turns(runs, rounds, known.blocks)
        sizes = {number: size(Path(run.folder)) for number, run in runs.items()}
    usual = statistics.median(block.seconds for block in blocks[NEVER]) / rounds
    print(f"a round takes {usual:.3f} s without checkpoints")
    for number in every:
        pairs = list(zip(blocks[number], blocks[NEVER], strict=True))
        seconds = more([ours.seconds / theirs.seconds for ours, theirs in pairs])
        busy = more([ours.busy_seconds / theirs.busy_seconds for ours, theirs in pairs])
        megabytes = sizes[number] / 1e6
        print(
            f"every {number:>3} rounds, {megabytes:.1f} MB: seconds {seconds}, busy seconds {busy}"
        )


def started(values: Any, folder: str, every: int, known: argparse.Namespace) -> TrainingRun:
    """A run of these settings with a checkpoint once in so many rounds."""
    own = {
        "run.folder": folder,
        "run.checkpoint_every": str(every),
        # The last round saves in all runs, so it is not trained.
        "run.rounds": str(known.rounds * (known.blocks + 1) + 1),
        "run.tokens": "1000000000",
        "run.trackers": "none",
    }
    return TrainingRun.create(build_recipe(override(values, list(own.items()))))


class Block(NamedTuple):
    """What a block of rounds took; busy seconds are of all threads of this process."""

    seconds: float
    busy_seconds: float


def in_turns(runs: dict[int, TrainingRun], rounds: int, blocks: int) -> dict[int, list[Block]]:
    """The blocks of each run, without the first.

    Args:
        runs: By the number of rounds from one checkpoint to the next.
        rounds: Of a block.
        blocks: That count.
    """
    under_way = {number: run.rounds() for number, run in runs.items()}
    found: dict[int, list[Block]] = {number: [] for number in runs}
    for block in range(blocks + 1):
        for number in [*runs] if block % 2 else [*reversed(runs)]:
            began, busy = time.perf_counter(), time.process_time()
            for _ in range(rounds):
                next(under_way[number])
            runs[number].saving.wait()
            taken = Block(time.perf_counter() - began, time.process_time() - busy)
            found[number].append(taken)
            print(f"block {block}, every {number}: {taken.seconds:.2f} s", flush=True)
    return {number: of_run[1:] for number, of_run in found.items()}


def more(ratios: Sequence[float]) -> str:
    """By how much ratios are above 1, in words: their median, and the least and the most."""
    least, most = min(ratios) - 1, max(ratios) - 1
    return f"{statistics.median(ratios) - 1:+.1%} ({least:+.1%} to {most:+.1%})"


def size(folder: Path) -> int:
    """Bytes of the newest checkpoint of a run."""
    newest = max((folder / "checkpoints").iterdir())
    return sum(file.stat().st_size for file in newest.iterdir())


if __name__ == "__main__":
    main()
