"""A short text of a run's model, which the last lines of `adloco train` and the report show."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from adloco.tasks.language_model import generate

if TYPE_CHECKING:
    from adloco.run.training_run import TrainingRun

PROMPT_TOKENS, ADDED_TOKENS = 24, 96
TEMPERATURE = 0.8


def text_sample(run: TrainingRun) -> dict[str, str] | None:
    """The beginning of the validation text, and how the best trainer here continues it.

    The draw has a seed and a generator of its own: the text is the same each time, and the run's
    random state stays as it is. Called between rounds, in one process.

    Returns:
        `prompt` and `text`; None if the task generates no text, if trainers' models are spread over
        several ranks, live on other ranks or have diverged, or if their losses are not finite.
    """
    recipe, algorithm = run.recipe, run.algorithm
    state = algorithm.state
    whole = run.placement.ranks_per_worker == 1 and not state.diverged and not state.in_round
    if not (recipe.task.generates and run.newest and whole):
        return None
    losses = {
        row["trainer"]: row["val_loss"]
        for row in run.newest["trainers"]
        if row["val_loss"] is not None and math.isfinite(row["val_loss"])
    }
    here = [
        trainer
        for trainer in losses
        if trainer in state.trainers and state.trainers[trainer].worker_ids[0] in state.workers
    ]
    if not here:
        return None
    trainer = state.trainers[min(here, key=lambda trainer: (losses[trainer], trainer))]
    worker = state.workers[trainer.worker_ids[0]]
    tokenizer = run.task.tokenizer
    prompt = run.task.largest_source().read(0, 0, 1)[0][:PROMPT_TOKENS].tolist()
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
