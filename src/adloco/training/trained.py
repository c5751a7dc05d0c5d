"""A finished (or stopped) run's model, for evaluation and generation."""

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from adloco.algorithms.outer import copy_all
from adloco.placement.gradients import trainable
from adloco.rules.checks import require
from adloco.training.data.cache import open_cache
from adloco.training.data.sources import TokenSource
from adloco.training.environment import choose_device
from adloco.training.records import Records
from adloco.training.stored import StoredRun, check_corpus, read_run
from adloco.training.tasks.language_model import build_llama, evaluation_windows, loss_on_windows


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Global parameters of one trainer, in a model."""

    stored: StoredRun
    model: nn.Module
    trainer: int


def load_trained(folder: Path, trainer: int | None = None) -> Trained:
    """A trainer's model from the newest checkpoint; without a number, of the trainer with the lowest validation loss."""
    stored = read_run(folder)
    saved = {entry["trainer"]: entry for entry in stored.algorithm["trainers"]}
    chosen = _best_trainer(folder, sorted(saved)) if trainer is None else trainer
    require(chosen in saved, f"there is no trainer {chosen} in {stored.checkpoint}; living ones are {', '.join(map(str, sorted(saved)))}")
    recipe = stored.recipe
    model = build_llama(recipe.model, stored.tokenizer.vocab_size, recipe.run.seed).to(choose_device(recipe.run.device))
    copy_all(saved[chosen]["outer"]["params"], trainable(model))
    return Trained(stored=stored, model=model, trainer=chosen)


def evaluate(trained: Trained, path: str | None, windows: int) -> tuple[float, int]:
    """(mean loss in nats per token, number of tokens) on the run's validation text, or on all text of another path.

    windows: how many, evenly spaced; 0: all.
    """
    stored, data = trained.stored, trained.stored.recipe.data
    cache = open_cache(data if path is None else data.at(path), stored.tokenizer)
    if path is None:
        check_corpus(stored, cache)
    tokens = cache.validation if path is None else cache.everything()
    least = data.context_tokens + 1
    require(len(tokens) >= least, f"data.path {path!r} has {len(tokens)} tokens, fewer than one window of {least}; give more text")
    source = TokenSource(tokens, context_tokens=data.context_tokens)
    device = next(trained.model.parameters()).device
    total, count = loss_on_windows(trained.model, source, evaluation_windows(source, windows), device)
    return total / count, count


def _best_trainer(folder: Path, living: list[int]) -> int:
    for record in reversed(Records(folder).read()):
        losses = {row["trainer"]: row["val_loss"] for row in record["trainers"] if row["val_loss"] is not None and row["trainer"] in living}
        if losses:
            return int(min(losses, key=lambda trainer: (losses[trainer], trainer)))
    return living[0]
