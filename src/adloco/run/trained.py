"""Loads and evaluates the model of a finished or stopped run, and lets it continue a text; also the
short text that a finished run shows.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from adloco.algorithms.method import Problem
from adloco.algorithms.model_state import copy_all, state_buffers
from adloco.algorithms.state_parts import trainer_part, worker_part, workers_of
from adloco.data.rows import half_pair
from adloco.distributed.parallel.gradient_norms import trainable
from adloco.distributed.placement.islands import island_of
from adloco.errors import require
from adloco.metrics import Record
from adloco.models.fixed_values import changed_fixed
from adloco.models.source import Builder
from adloco.rules.failure_signs import is_finite
from adloco.run.checkpoint import need
from adloco.run.environment import device_here
from adloco.run.folder import MODEL
from adloco.run.own_problem import builder_of
from adloco.run.records import Records
from adloco.run.stored import StoredRun, check_corpus, read_run
from adloco.tasks.island_texts import IslandTexts, open_islands
from adloco.tasks.language_model import generate
from adloco.tasks.problem_task import ProblemTask
from adloco.tasks.task import EvaluationSettings, Task, TaskData

if TYPE_CHECKING:
    from adloco.run.training_run import TrainingRun

COLDEST = 1e-6
"""Smallest temperature but 0; float32 has none for a difference of logits over a smaller one."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model with the global parameters of one trainer."""

    stored: StoredRun
    model: nn.Module
    trainer: int
    problem: Problem | None = None
    """The problem of a run from Python."""


def load_trained(
    folder: Path,
    trainer: int | None = None,
    round: int | Literal["best"] | None = None,
    problem: Problem | None = None,
    *,
    trust_recipe: bool = False,
) -> Trained:
    """Load a trainer's model from a checkpoint of a run.

    Args:
        trainer: Its number; None for the trainer with the lowest validation loss.
        round: As in `read_run`.
        problem: The problem of a run from Python, which has its model; None for other runs.
        trust_recipe: As in `resumed_recipe`.

    Raises:
        ValueError: There is no such trainer (any more) or no such checkpoint, or the folder cannot
            be read.
    """
    stored = read_run(folder, round, trust_recipe=trust_recipe)
    trainers = workers_of(stored.algorithm)
    living = sorted(trainers)
    if trainer is None:
        trainer = _best_trainer(folder, stored.algorithm["rounds_done"], living)
    require(
        trainer in living,
        f"there is no trainer {trainer} in {stored.checkpoint}; its trainers are "
        f"{', '.join(map(str, living))}",
    )
    outer = need(stored.checkpoint, trainer_part(trainer))["outer"]
    builder = builder_of(problem, stored.recipe, folder) if problem else _builder(stored)
    model = builder.whole()
    changed = changed_fixed(lambda: model, stored.folder / MODEL)
    require(not changed, changed)
    model = model.to(device_here(stored.recipe.run.device))
    copy_all(outer["params"], trainable(model))
    copy_all(outer["buffers"], state_buffers(model, floating=True))
    if counters := state_buffers(model, floating=False):
        # Those of its first worker, which is the one that is evaluated: they are not averaged.
        own = need(stored.checkpoint, worker_part(trainers[trainer][0]))["inner"]["counters"]
        copy_all(own, counters)
    return Trained(stored=stored, model=model.eval(), trainer=trainer, problem=problem)


def _builder(stored: StoredRun) -> Builder:
    """The builder of a run's model, without trained weights."""
    recipe = stored.recipe
    build = recipe.model.builder
    return build(
        config=build.load_config(stored.folder / MODEL),
        head=recipe.task.head,
        options=recipe.model_options,
        seed=recipe.run.seed,
    )


def own_task(trained: Trained, evaluation: EvaluationSettings) -> Task:
    """Open the run's task with its own data; ValueError if that is not what the run began with. Of
    islands with texts of their own, it has those that had workers at the checkpoint.
    """
    stored = trained.stored
    if trained.problem:
        return ProblemTask(trained.problem)
    recipe = stored.recipe
    given = TaskData(recipe.data, evaluation, stored.tokenizer)
    living = itertools.chain(*workers_of(stored.algorithm).values())
    islands, workers = len(recipe.data.islands), recipe.method.num_workers
    here = sorted({island_of(worker, workers, islands) for worker in living})
    task = open_islands(recipe.task, given, here, workers)
    if isinstance(task, IslandTexts):
        task.gather_texts(lambda mine: [mine])
    task.configure(stored.recipe.model.builder.load_config(stored.folder / MODEL))
    check_corpus(stored, task)
    return task


def evaluate(
    trained: Trained, path: str | None, windows: int | None
) -> tuple[dict[str, float], int, str]:
    """Evaluate a model.

    Args:
        path: Data of which all rows are used; None for the run's own validation rows.
        windows: Windows to evaluate a language model on, evenly spaced; 0: all; None: as many as in
            training.

    Returns:
        Each measure by name, the number of tokens or texts that it averages over, and a sentence
        about what was left out of the text at `path`; empty if nothing was.

    Raises:
        ValueError: The data cannot be evaluated, or is not counted in windows.
    """
    stored, recipe = trained.stored, trained.stored.recipe
    evaluation = recipe.evaluation
    if windows is not None:
        windows = _whole("windows", windows)
        require(
            windows == 0 or recipe.task.packed,
            f"windows are counted of packed text, but the run in {stored.folder} is evaluated on "
            f"{recipe.task.counted}; leave windows out",
        )
        evaluation = replace(evaluation, windows=windows)
    named = path != ""  # As by an unset variable of the shell.
    require(named, "data.path '' names no text; name one, or leave it out for the run's own")
    if path is None:
        task = own_task(trained, evaluation)
    else:
        data = recipe.data.at(path)
        task = recipe.task.open(TaskData(data, evaluation, stored.tokenizer, everything=True))
        task.configure(recipe.model.builder.load_config(stored.folder / MODEL))
    *sums, count = task.measure(
        trained.model, next(trained.model.parameters()).device, recipe.switch.b_max
    )
    amiss = "" if path is None else task.skipped()
    return recipe.task.measured([total / count for total in sums]), int(count), amiss


def continued(
    trained: Trained, prompt: str, *, max_tokens: int, temperature: float, seed: int
) -> Iterator[str]:
    """Continue a text with a language model.

    Args:
        prompt: The text; empty: the model begins one.
        temperature: Divides the logits; 0 takes the most likely token each time.

    Yields:
        The prompt as the tokenizer gives it back, then each piece of text that follows.

    Raises:
        ValueError: The run trains another task, or a number is out of range.
    """
    recipe, tokenizer = trained.stored.recipe, trained.stored.tokenizer
    max_tokens, seed = _whole("tokens", max_tokens), _whole("seed", seed)
    require(isinstance(temperature, Real), f"temperature must be a number, got {temperature!r}")
    require(not half_pair(prompt), "the prompt holds bytes that are no UTF-8 text")
    require(max_tokens > 0, f"tokens must be > 0, got {max_tokens}")
    require(
        temperature == 0 or COLDEST <= temperature < math.inf,
        f"temperature must be 0, or >= {COLDEST} and finite, got {temperature}",
    )
    require(-(2**63) <= seed < 2**63, f"seed must be >= -2^63 and < 2^63, got {seed}")
    require(
        recipe.task.generates,
        "adloco generate needs a language model, and the run in "
        f"{trained.stored.folder} trains another task; use adloco evaluate",
    )
    start = tokenizer.encode([prompt])[0] or [tokenizer.end_of_text]
    shown = tokenizer.decode(start) if prompt else ""
    yield shown
    ids = list(start)
    for token in generate(
        trained.model,
        start,
        max_tokens=max_tokens,
        temperature=temperature,
        context_tokens=recipe.data.context_tokens,
        vocab_size=tokenizer.vocab_size,
        stop=tokenizer.end_of_text,
        seed=seed,
    ):
        ids.append(token)
        text = tokenizer.decode(ids if prompt else ids[1:])
        # A character of several tokens is given once it is complete.
        if text.startswith(shown) and not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text


def _whole(name: str, value: Any) -> int:
    """A whole number, also of NumPy."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None


def _best_trainer(folder: Path, rounds: int, living: list[int]) -> int:
    """The trainer with the lowest loss in the latest evaluation, within these rounds, of any that
    are left.
    """
    for record in reversed(Records(folder).read_whole()):
        if record["round"] > rounds:
            continue
        best = _lowest(record, living)
        if best is not None:
            return best
    return living[0]


def _lowest(record: Record, among: Collection[int]) -> int | None:
    """The one of these trainers with the lowest finite loss in a line; None if none has one."""
    losses = {
        row["trainer"]: row["val_loss"]
        for row in record["trainers"]
        if row["trainer"] in among and is_finite(row["val_loss"])
    }
    return min(losses, key=lambda trainer: (losses[trainer], trainer), default=None)


PROMPT_TOKENS, ADDED_TOKENS = 24, 96
TEMPERATURE = 0.8


def text_sample(run: TrainingRun) -> dict[str, str] | None:
    """The beginning of a sample of the validation text, and how the best trainer here continues it.

    The draw has a seed and a generator of its own: the text is the same each time, and the run's
    random state stays as it is. Called between rounds, in one process.

    Returns:
        `prompt` and `text`; None if the task generates no text, if trainers' models are spread over
        several ranks or live on other ranks, or if their losses are not finite.
    """
    recipe, algorithm = run.recipe, run.algorithm
    state = algorithm.state
    whole = run.placement.ranks_per_worker == 1
    if not (recipe.task.generates and run.newest and whole and not state.in_round):
        return None
    here = {
        trainer for trainer, held in state.trainers.items() if held.worker_ids[0] in state.workers
    }
    best = _lowest(run.newest, here)
    if best is None:
        return None
    trainer = state.trainers[best]
    worker = state.workers[trainer.worker_ids[0]]
    tokenizer = run.task.tokenizer
    prompt = run.task.largest_source().read(0, 0, 1)[0][:PROMPT_TOKENS].tolist()
    with state.at_global(worker, trainer):
        added = list(
            generate(
                worker.model,
                prompt,
                max_tokens=ADDED_TOKENS,
                temperature=TEMPERATURE,
                context_tokens=recipe.data.context_tokens,
                vocab_size=tokenizer.vocab_size,
                stop=tokenizer.end_of_text,
                seed=0,
            )
        )
    begun, text = tokenizer.decode(prompt), tokenizer.decode([*prompt, *added])
    return {"prompt": begun, "text": text.removeprefix(begun)}
