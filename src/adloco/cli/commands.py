"""The commands, each from its words to an exit code."""

import argparse
import math
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

# Before transformers is imported: the command line shows its own progress.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HUB_VERBOSITY", "error")
os.environ.setdefault("DATASETS_VERBOSITY", "critical")

from rich.console import Console

from adloco.cli.view import open_view, summary_lines
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.recipe_text import to_toml
from adloco.config.sections import Recipe
from adloco.config.settings import RunSettings
from adloco.distributed.launch.launcher import (
    island_shape,
    num_ranks,
    process_group,
    this_rank,
)
from adloco.distributed.launch.local_ranks import INTERRUPTED, start_ranks
from adloco.report.page import write_report
from adloco.run.export import export as export_trained
from adloco.run.records import Records
from adloco.run.start import new_folder
from adloco.run.stored import resumed_recipe, run_folder
from adloco.run.trackers import TrackerWarning
from adloco.run.trained import evaluate as evaluate_trained
from adloco.run.trained import load_trained
from adloco.run.training_run import TrainingRun
from adloco.tasks.language_model import generate as generate_tokens

SECOND_SIGNAL_SECONDS = 1.0
RUN_SETTINGS = {field.name for field in fields(RunSettings)}


def train(words: Sequence[str]) -> int:
    """Train a recipe, or go on with a run."""
    parser = parser_of("train", "Train a recipe; every setting is a flag, see `adloco config`.")
    parser.add_argument(
        "recipe", nargs="?", help="a file, or the name of a shipped recipe (default: adloco)"
    )
    parser.add_argument("--resume", metavar="RUN", type=Path, help="run folder to go on with")
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="processes on this machine to spread the workers over (default: 1)",
    )
    settings, others = take_settings(words)
    known = parser.parse_args(others)
    if known.resume and known.recipe:
        raise ValueError(f"--resume goes on with the recipe of the run; leave out {known.recipe}")

    def recipe() -> Recipe:
        return (
            resumed_recipe(known.resume, settings)
            if known.resume
            else build_recipe(override(read_values(known.recipe or "adloco"), settings))
        )

    if known.ranks != 1 and num_ranks() == 1:
        return _train_on_ranks(known.ranks, recipe(), words, known.resume)
    console = Console(highlight=False, quiet=this_rank() != 0)
    with process_group(end_rank):
        with console.status("reading and tokenising text, building models ..."):
            run = (
                TrainingRun.resume(known.resume, settings)
                if known.resume
                else TrainingRun.create(recipe())
            )  # Here, so that a bad one on one rank ends all.
        return _train(run, console)


def _train_on_ranks(count: int, recipe: Recipe, words: Sequence[str], resumed: Path | None) -> int:
    """Train in that many processes, which start again, from the newest checkpoint, where memory ran
    out on ranks that could not repeat the step.
    """
    folder = resumed or new_folder(recipe)
    records = Records(folder)
    limit = records.pass_limit()
    code = on_ranks(
        count,
        recipe,
        ["train", *words] if resumed else ["train", *words, "--run.folder", str(folder)],
    )
    # What a new run was given stands in its folder; a resumed one is given again what is not.
    again = ["train", *words] if resumed else ["train", "--resume", str(folder)]
    while code not in (0, INTERRUPTED) and records.pass_limit() != limit:
        limit = records.pass_limit()
        print(
            f"adloco: the ranks start again from the newest checkpoint, with micro-batches of at most {limit}",
            file=sys.stderr,
            flush=True,
        )
        code = start_ranks(count, again)
    return code


def on_ranks(count: int, recipe: Recipe, words: Sequence[str]) -> int:
    """Run the command in that many processes of this machine, if they can hold the recipe."""
    if count < 1:
        raise ValueError(f"--ranks must be >= 1, got {count}")
    method, shape = recipe.method, recipe.placement
    island_shape(count, method.num_workers, shape.shard_size, shape.replica_size)
    return start_ranks(count, words)


def end_rank(message: str) -> None:
    """End this rank for another's failure, from whatever it waits for."""
    print(f"adloco (rank {this_rank()}): {message}", file=sys.stderr, flush=True)
    os._exit(2)


def _train(run: TrainingRun, console: Console) -> int:
    if run.finished:
        console.print(
            f"{run.folder} has spent its budget of {run.recipe.run.tokens:,} tokens already",
            soft_wrap=True,
        )
    for notice in run.notices:
        console.print(notice, style="bold red", soft_wrap=True)
    with _interruptible(run), open_view(run, console) as view, _plain_warnings():
        for record in run.rounds():
            view.show(record)
    if run.recipe.data.streaming and (left_out := run.task.skipped()):
        console.print(left_out, style="bold red", soft_wrap=True)
    if not run.finished:  # Stopped, here or on another rank.
        console.print(
            f"stopped and saved; go on with: adloco train --resume {run.folder}", soft_wrap=True
        )
        return INTERRUPTED
    if not run.placement.is_rank_zero:
        return 0
    with console.status("drawing the report ..."):
        summary = run.finish()
        write_report(run.folder)
    for line in summary_lines(run, summary):
        console.print(line, soft_wrap=True)
    return 0


@contextmanager
def _interruptible(run: TrainingRun) -> Iterator[None]:
    """Ctrl+C (or a polite kill) ends the run after the inner step in progress; a second one ends it
    at once.
    """
    received: list[float] = []

    def stop(number: int, frame: FrameType | None) -> None:
        # Launchers pass on what the terminal has sent already: a second signal counts only after a
        # while.
        if received and time.monotonic() - received[0] > SECOND_SIGNAL_SECONDS:
            raise KeyboardInterrupt
        received.append(time.monotonic())
        run.stop()

    before = {
        number: signal.signal(number, stop)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """A tracker's warning as one sentence, without the place in the code."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", TrackerWarning)
        others = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, TrackerWarning):
                print(f"adloco: {message}", file=sys.stderr)
            else:
                others(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


def config(words: Sequence[str]) -> int:
    """Print a resolved recipe."""
    parser = parser_of("config", "Print a resolved recipe: every setting, with its meaning.")
    parser.add_argument(
        "recipe",
        nargs="?",
        default="adloco",
        help="a file, or the name of a shipped recipe (default: adloco)",
    )
    settings, others = take_settings(words)
    recipe = build_recipe(override(read_values(parser.parse_args(others).recipe), settings))
    print(to_toml(recipe, with_meanings=True), end="")
    return 0


def evaluate(words: Sequence[str]) -> int:
    """Print the loss of a run's model."""
    parser = parser_of(
        "evaluate", "Loss of a run's model on its validation text, or on all text of another path."
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument(
        "--data.path",
        dest="path",
        metavar="PATH",
        help="text file, folder, jsonl or parquet to evaluate on instead",
    )
    parser.add_argument(
        "--trainer",
        type=int,
        help="trainer to evaluate (default: the one with the lowest validation loss)",
    )
    parser.add_argument(
        "--windows",
        type=int,
        help="windows to evaluate on, evenly spaced; 0: all (default: the run's evaluation.windows)",
    )
    known = parser.parse_args(words)
    if (known.windows or 0) < 0:
        raise ValueError(f"--windows must be >= 0, got {known.windows}")
    console = Console(highlight=False)
    with console.status("evaluating ..."):
        trained = load_trained(known.run, known.trainer)
        recipe = trained.stored.recipe
        if known.windows and not recipe.task.packed:
            raise ValueError(
                f"--windows counts windows of packed text, but the run in {known.run} is evaluated on {recipe.task.counted}; leave it out"
            )
        windows = recipe.evaluation.windows if known.windows is None else known.windows
        measured, count = evaluate_trained(trained, known.path, windows)
    console.print(f"trainer {trained.trainer} of {trained.stored.checkpoint}", soft_wrap=True)
    numbers = [
        f"{measure.label} {measure.text(measured[measure.name])} {measure.unit.name}".rstrip()
        for measure in recipe.task.measures
    ]
    console.print(f"{', '.join(numbers)}, over {count:,} {recipe.task.counted}", soft_wrap=True)
    return 0


def generate(words: Sequence[str]) -> int:
    """Continue a text."""
    parser = parser_of("generate", "Continue a text with a run's model.")
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--tokens", type=int, default=200, help="most tokens to add (default: 200)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        help="0: always the most likely token (default: 0.8)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (default: 0)")
    parser.add_argument(
        "--trainer",
        type=int,
        help="trainer to use (default: the one with the lowest validation loss)",
    )
    known = parser.parse_args(words)
    if known.tokens <= 0 or not 0 <= known.temperature < math.inf:
        raise ValueError(
            f"--tokens must be > 0 and --temperature >= 0 and finite, got {known.tokens} and {known.temperature}"
        )
    trained = load_trained(known.run, known.trainer)
    if not trained.stored.recipe.task.generates:
        raise ValueError(
            f"adloco generate needs a language model, and the run in {known.run} trains another task; use adloco evaluate"
        )
    tokenizer = trained.stored.tokenizer
    prompt = tokenizer.encode([known.prompt])[0] or [tokenizer.end_of_text]
    context = trained.stored.recipe.data.context_tokens
    shown = tokenizer.decode(prompt) if known.prompt else ""
    print(shown, end="", flush=True)
    ids = list(prompt)
    for token in generate_tokens(
        trained.model,
        prompt,
        max_tokens=known.tokens,
        temperature=known.temperature,
        context_tokens=context,
        stop=tokenizer.end_of_text,
        seed=known.seed,
    ):
        ids.append(token)
        text = tokenizer.decode(ids if known.prompt else ids[1:])
        # A character of several tokens is not shown before it is whole.
        if text.startswith(shown) and not text.endswith("\ufffd"):
            print(text[len(shown) :], end="", flush=True)
            shown = text
    print()
    return 0


def export(words: Sequence[str]) -> int:
    """Write a run's model for transformers."""
    parser = parser_of(
        "export",
        "Write a run's model as a folder that transformers loads: weights, configuration, tokenizer, model card.",
    )
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument(
        "--to",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="folder to write; must not exist yet",
    )
    parser.add_argument(
        "--trainer",
        type=int,
        help="trainer to export (default: the one with the lowest validation loss)",
    )
    known = parser.parse_args(words)
    console = Console(highlight=False)
    with console.status("writing the model ..."):
        export_trained(load_trained(known.run, known.trainer), known.to)
    console.print(f"{known.to}: load it with from_pretrained({str(known.to)!r})", soft_wrap=True)
    return 0


def report(words: Sequence[str]) -> int:
    """Draw a run's plots and report again."""
    parser = parser_of("report", "Draw the plots and report.html of a run from its metrics.")
    parser.add_argument("run", type=Path, metavar="RUN")
    known = parser.parse_args(words)
    console = Console(highlight=False)
    with console.status("drawing the report ..."):
        path = write_report(run_folder(known.run))
    console.print(str(path), soft_wrap=True)
    return 0


def take_settings(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """(section.key, value) of every --section.key VALUE or --section.key=VALUE, and the words that
    are none.
    """
    settings, others, left = [], [], list(words)
    while left:
        word = left.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in name:
            others.append(word)
            continue
        if not equals and not left:
            raise ValueError(f"{word} needs a value, as in {word} VALUE")
        settings.append((name, value if equals else left.pop(0)))
    return settings, others


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One sentence instead of the usage."""
        unknown = re.match(r"unrecognized arguments: --(\w+)", message)
        if unknown and unknown.group(1) in RUN_SETTINGS:
            message += f" (did you mean --run.{unknown.group(1)}?)"
        raise ValueError(f"{message}; see {self.prog} --help")


def parser_of(command: str, description: str) -> argparse.ArgumentParser:
    # No abbreviations: --r must not silently mean --resume.
    return _Parser(prog=f"adloco {command}", description=description, allow_abbrev=False)
