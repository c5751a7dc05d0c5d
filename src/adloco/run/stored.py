"""A run folder read back: its recipe, its newest checkpoint and its tokenizer, after a check that
they belong together.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.recipe_text import named_settings
from adloco.config.sections import Recipe
from adloco.data.tokenizers import Tokenizer, load_tokenizer
from adloco.errors import require
from adloco.run import checkpoint
from adloco.tasks.task import Task

CHECKPOINTS, MODEL, RECIPE, TOKENIZER = "checkpoints", "model", "recipe.toml", "tokenizer"
FREE_SETTINGS = {
    "run.folder",
    "run.name",
    "run.device",
    "run.threads",
    "run.checkpoint_every",
    "run.keep_checkpoints",
    "run.trackers",
    # Where workers live does not change what they compute.
    "placement.shard_size",
    "placement.replica_size",
    "data.path",
    "data.dataset",
    "data.factory",
    "data.arguments",
    "data.cache",  # What they lead to is checked by content.
    "outer.on_host",
    "evaluation.every",
    "evaluation.windows",
    "profile.memory",
    "switch.pass_limit",
    "memory.gib",
    "memory.fraction",
}
"""Settings that may change from a run's beginning to its going on; all others decide its numbers.
"""


OWN_SETTINGS = {
    "run.folder",
    "run.name",
    "run.device",
    "run.threads",
    "run.trackers",
    "data.path",
    "data.dataset",
    "data.factory",
    "data.arguments",
    "data.cache",
    "profile.memory",
}
"""Settings that may differ between the ranks of one run; what the device and the paths lead to is
compared.
"""
CHANGEABLE = sorted(FREE_SETTINGS - {"run.folder", "run.name"})


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """What a run folder holds."""

    folder: Path
    recipe: Recipe
    tokenizer: Tokenizer
    checkpoint: Path
    about: dict[str, Any]
    """The run at the checkpoint: generators, seconds, corpus."""
    algorithm: dict[str, Any]
    """State of `AdLoCo`."""


def run_folder(folder: Path) -> Path:
    """The folder, after a check that a run lives there."""
    require(
        (folder / RECIPE).is_file(),
        f"{str(folder)!r} is not a run folder (no {RECIPE} in it); give one that `adloco train` "
        "wrote",
    )
    return folder


def read_run(folder: Path, flags: Sequence[tuple[str, str]] = ()) -> StoredRun:
    """The run in a folder at its newest checkpoint; ValueError if a part is missing, damaged,
    foreign or changed.

    flags: settings that are to be others from now on, of those that may.

    """
    recipe = resumed_recipe(folder, flags)
    newest = checkpoint.newest(folder / CHECKPOINTS)
    state = checkpoint.load(newest)
    known = isinstance(state, dict) and {"run", "algorithm"} <= state.keys()
    require(
        known,
        f"checkpoint {newest} is not that of a run; name a run folder that `adloco train` wrote",
    )
    fixed, begun = fixed_settings(recipe), state["run"]["recipe"]
    changed = [key for key, value in fixed.items() if begun.get(key, value) != value]
    require(
        not changed,
        f"{', '.join(changed)} in {folder / RECIPE} is not what the run began with; restore it, or "
        "start another run",
    )
    unknown = [
        key for key in fixed if key not in begun
    ]  # Another choice, which has other settings, is refused above.
    require(
        not unknown,
        f"the run in {folder} began with a version of adloco without {', '.join(unknown)}; go on "
        "with that, or start another run",
    )
    return StoredRun(
        folder=folder,
        recipe=recipe,
        tokenizer=load_tokenizer(folder / TOKENIZER),
        checkpoint=newest,
        about=state["run"],
        algorithm=state["algorithm"],
    )


def resumed_recipe(folder: Path, flags: Sequence[tuple[str, str]]) -> Recipe:
    """The recipe of a run that goes on with these settings changed."""
    for name, _ in flags:
        require(
            name in CHANGEABLE,
            f"--{name} cannot change when a run goes on; leave it out (what can: "
            f"{', '.join(CHANGEABLE)})",
        )
    path = run_folder(folder) / RECIPE
    values = read_values(str(path))
    try:
        build_recipe(values)
    except ValueError as error:
        advice = "restore it, go on with the version that began the run, or start another run"
        message = f"{path} does not fit this version of adloco: {error}; {advice}"
        raise ValueError(message) from error
    return build_recipe(override(values, flags))


def fixed_settings(recipe: Recipe) -> dict[str, str]:
    """The settings that a run keeps from beginning to end."""
    return _named(recipe, without=FREE_SETTINGS)


def shared_settings(recipe: Recipe) -> dict[str, str]:
    """The settings that all ranks of a run have alike."""
    return _named(recipe, without=OWN_SETTINGS)


def _named(recipe: Recipe, without: Collection[str]) -> dict[str, str]:
    return {key: str(value) for key, value in named_settings(recipe).items() if key not in without}


def check_corpus(stored: StoredRun, task: Task) -> None:
    """Refuse another text than the run began with."""
    data = stored.recipe.data
    where = data.source if not data.path else f"the text of {data.source}"
    require(
        task.matches_fingerprint(stored.about["corpus"]),
        f"{where} is not what the run in {stored.folder} began with; restore it, or start another "
        "run",
    )
