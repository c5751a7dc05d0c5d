"""Measures how much longer rounds take with checkpoints.

    .venv/bin/python benchmarks/checkpoint_cost.py [RECIPE] [--every 1,10] [--blocks 4]
        [--section.key VALUE ...]

The same run is trained several times, in one process and in turns: once without checkpoints, and
once for each number of rounds from one checkpoint to the next. A turn is a block of as many rounds
as the longest of these. Checkpoints change no numbers, so the runs do the same work in the same
block, and each block gives a ratio of their times. The write that is in progress at the end of a
block is waited for, so the ratios are upper bounds. The first block warms up and does not count.
The goal is at most 2%.
"""

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

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
    parser.add_argument("--blocks", type=int, default=4, help="that count (default: %(default)s)")
    known, words = parser.parse_known_args()
    settings, _ = take_settings(words)
    every = [int(number) for number in known.every.split(",")]
    rounds = max(every)
    with TemporaryDirectory() as folder:
        runs = {
            number: TrainingRun.create(
                build_recipe(
                    override(
                        read_values(known.recipe),
                        [
                            *settings,
                            ("run.folder", f"{folder}/{number}"),
                            ("run.checkpoint_every", str(number)),
                            # The last round saves in all runs, so it is not trained.
                            ("run.rounds", str(rounds * (known.blocks + 1) + 1)),
                            ("run.tokens", "1000000000"),
                            ("run.trackers", "none"),
                        ],
                    )
                )
            )
            for number in [NEVER, *every]
        }
        seconds = in_turns(runs, rounds, known.blocks)
        sizes = {number: size(Path(run.folder)) for number, run in runs.items()}
    print(f"a round takes {statistics.median(seconds[NEVER]) / rounds:.3f} s")
    for number in every:
        pairs = zip(seconds[number], seconds[NEVER], strict=True)
        extra = [ours / theirs - 1 for ours, theirs in pairs]
        print(
            f"a checkpoint every {number:>3} rounds ({sizes[number] / 1e6:.1f} MB): "
            f"{statistics.median(extra):+.1%} (of {len(extra)} blocks, "
            f"{min(extra):+.1%} to {max(extra):+.1%})"
        )


def in_turns(runs: dict[int, TrainingRun], rounds: int, blocks: int) -> dict[int, list[float]]:
    """The seconds of each block of each run, without the first block.

    Args:
        runs: By the number of rounds from one checkpoint to the next.
        rounds: Of a block.
        blocks: That count.
    """
    under_way = {number: run.rounds() for number, run in runs.items()}
    seconds: dict[int, list[float]] = {number: [] for number in runs}
    for block in range(blocks + 1):
        for number in [*runs] if block % 2 else [*reversed(runs)]:
            began = time.perf_counter()
            for _ in range(rounds):
                next(under_way[number])
            runs[number].saving.wait()
            seconds[number].append(time.perf_counter() - began)
            print(f"block {block}, every {number}: {seconds[number][-1]:.2f} s", flush=True)
    return {number: of_blocks[1:] for number, of_blocks in seconds.items()}


def size(folder: Path) -> int:
    """Bytes of the newest checkpoint of a run."""
    newest = max((folder / "checkpoints").iterdir())
    return sum(file.stat().st_size for file in newest.iterdir())


if __name__ == "__main__":
    main()
