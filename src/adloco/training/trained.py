"""A finished (or stopped) run's model, for evaluation and generation."""

from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from adloco.algorithms.outer import copy_all, trainable
from adloco.rules.checks import require
from adloco.training import checkpoint
from adloco.training.data.cache import open_cache
from adloco.training.data.sources import TokenSource
from adloco.training.data.tokenizers import Tokenizer, load_tokenizer
from adloco.training.environment import choose_device
from adloco.training.recipe import Recipe, build_recipe, read_values
from adloco.training.records import Records
from adloco.training.run import CHECKPOINTS, run_folder
from adloco.training.tasks.language_model import build_llama, evaluation_windows, loss_on_windows


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Global parameters of one trainer, in a model, with what they were trained with."""

    recipe: Recipe
    tokenizer: Tokenizer
    model: nn.Module
    trainer: int
    checkpoint: Path


def load_trained(folder: Path, trainer: int | None = None) -> Trained:
    """A trainer's model from the newest checkpoint; without a number, of the trainer with the lowest validation loss."""
    newest = checkpoint.newest(run_folder(folder) / CHECKPOINTS)
    state = checkpoint.load(newest)["algorithm"]
    recipe = build_recipe(read_values(str(folder / "recipe.toml")))
    tokenizer = load_tokenizer(folder / "tokenizer")
    saved = {entry["trainer"]: entry for entry in state["trainers"]}
    chosen = _best_trainer(folder, sorted(saved)) if trainer is None else trainer
    require(chosen in saved, f"there is no trainer {chosen} in {newest}; living ones are {', '.join(map(str, sorted(saved)))}")
    model = build_llama(recipe.model, tokenizer.vocab_size, recipe.run.seed).to(choose_device(recipe.run.device))
    copy_all(saved[chosen]["outer"]["params"], trainable(model))
    return Trained(recipe=recipe, tokenizer=tokenizer, model=model, trainer=chosen, checkpoint=newest)


def evaluate(trained: Trained, path: str | None, windows: int) -> tuple[float, int]:
    """(mean loss in nats per token, number of tokens) on the run's validation text, or on all text of another path.

    windows: how many, evenly spaced; 0: all.
    """
    recipe, context = trained.recipe, trained.recipe.data.context_tokens
    if path is None:
        tokens = open_cache(recipe.data).validation
    else:
        tokens = open_cache(replace(recipe.data, path=path), tokenizer=trained.tokenizer).everything()
    require(len(tokens) > context, f"data.path {path!r} has {len(tokens)} tokens, fewer than one window of {context + 1}; give more text")
    source = TokenSource(tokens, context_tokens=context)
    device = next(trained.model.parameters()).device
    total, count = loss_on_windows(trained.model, source, evaluation_windows(source, windows), device)
    return total / count, count


def _best_trainer(folder: Path, living: list[int]) -> int:
    for record in reversed(Records(folder).read()):
        losses = {row["trainer"]: row["val_loss"] for row in record["trainers"] if row["val_loss"] is not None and row["trainer"] in living}
        if losses:
            return int(min(losses, key=lambda trainer: (losses[trainer], trainer)))
    return living[0]
