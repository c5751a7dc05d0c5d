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
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from bench_pairs import in_turns

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
    values = override(read_values(known.recipe), settings)
    with TemporaryDirectory() as folder:
        runs = {number: Path(folder, str(number)) for number in (NEVER, *every)}
        sides = {str(number): side(values, run, number, known) for number, run in runs.items()}
        blocks = in_turns(sides, known.blocks, warm_up=1, clock=clocks)
        sizes = {number: size(run) for number, run in runs.items()}
    usual = np.array(blocks[str(NEVER)])
    print(f"a round takes {np.median(usual[:, 0]) / rounds:.3f} s without checkpoints")
    for number in every:
        seconds, busy = map(more, (np.array(blocks[str(number)]) / usual).T)
        print(
            f"every {number:>3} rounds, {sizes[number] / 1e6:.1f} MB: seconds {seconds}, "
            f"busy seconds {busy}"
        )


def clocks() -> Any:
    """Seconds, and seconds in which threads of this process were busy."""
    return np.array([time.perf_counter(), time.process_time()])


def side(values: Any, folder: Path, every: int, known: argparse.Namespace) -> Callable[[], None]:
    """A function that trains the next block of a run with a checkpoint once in so many rounds."""
    own = {
        "run.folder": str(folder),
        "run.checkpoint_every": str(every),
        # The last round saves in all runs, so it is not trained.
        "run.rounds": str(known.rounds * (known.blocks + 1) + 1),
        "run.tokens": "1000000000",
        "run.trackers": "none",
    }
    run = TrainingRun.create(build_recipe(override(values, list(own.items()))))
    return partial(block, run, run.rounds(), known.rounds)


def block(run: TrainingRun, under_way: Iterator[Any], rounds: int) -> None:
    for _ in range(rounds):
        next(under_way)
    run.saving.wait()


def more(ratios: Any) -> str:
    """By how much ratios are above 1, in words: their median, and the least and the most."""
    return f"{np.median(ratios) - 1:+.1%} ({min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%})"


def size(folder: Path) -> int:
    """Bytes of the newest checkpoint of a run."""
    newest = max((folder / "checkpoints").iterdir())
    return sum(file.stat().st_size for file in newest.iterdir())


if __name__ == "__main__":
    main()
