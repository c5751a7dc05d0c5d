"""A run folder read back: its recipe, its newest checkpoint and its tokenizer, after a check that they belong together."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adloco.rules.checks import require
from adloco.training import checkpoint
from adloco.training.data.tokenizers import Tokenizer, load_tokenizer
from adloco.training.recipe import Recipe, build_recipe, read_values
from adloco.training.recipe_text import settings

CHECKPOINTS, RECIPE, TOKENIZER = "checkpoints", "recipe.toml", "tokenizer"
FREE_SETTINGS = {
    "run.folder", "run.name", "run.device", "run.threads", "run.checkpoint_every", "run.keep_checkpoints",
    "placement.shard_size", "placement.replica_size",
    "data.path", "data.cache",  # What they lead to is checked by content.
    "evaluation.every", "evaluation.windows",
}  # fmt: skip
"""Settings that may change from a run's beginning to its going on; all others decide its numbers."""


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """What a run folder holds."""

    folder: Path
    recipe: Recipe
    tokenizer: Tokenizer
    checkpoint: Path
    about: dict[str, Any]
    """Of the run at the checkpoint: generators, seconds, corpus."""
    algorithm: dict[str, Any]
    """State of `AdLoCo`."""


def run_folder(folder: Path) -> Path:
    """The folder, after a check that a run lives there."""
    require((folder / RECIPE).is_file(), f"{str(folder)!r} is not a run folder (no {RECIPE} in it); give one that `adloco train` wrote")
    return folder


def read_run(folder: Path) -> StoredRun:
    """The run in a folder at its newest checkpoint; ValueError if a part is missing, damaged, foreign or changed."""
    newest = checkpoint.newest(run_folder(folder) / CHECKPOINTS)
    recipe = build_recipe(read_values(str(folder / RECIPE)))
    state = checkpoint.load(newest)
    known = isinstance(state, dict) and {"run", "algorithm"} <= state.keys()
    require(known, f"checkpoint {newest} is not that of a run; name a run folder that `adloco train` wrote")
    changed = [key for key, value in fixed_settings(recipe).items() if state["run"]["recipe"].get(key) != value]
    require(not changed, f"{', '.join(changed)} in {folder / RECIPE} is not what the run began with; restore it, or start another run")
    return StoredRun(
        folder=folder,
        recipe=recipe,
        tokenizer=load_tokenizer(folder / TOKENIZER),
        checkpoint=newest,
        about=state["run"],
        algorithm=state["algorithm"],
    )


def fixed_settings(recipe: Recipe) -> dict[str, str]:
    """The settings that a run keeps from beginning to end."""
    named = {f"{setting.section}.{setting.key}": str(setting.value) for setting in settings(recipe)}
    return {key: value for key, value in named.items() if key not in FREE_SETTINGS}


def check_corpus(stored: StoredRun, corpus: str) -> None:
    """Refuse another text than the run began with. corpus: key of the text that is there now."""
    path = stored.recipe.data.path
    where = f"the text of data.path {path!r}" if path else "the default corpus"
    require(stored.about["corpus"] == corpus, f"{where} is not what the run in {stored.folder} began with; restore it, or start another run")
