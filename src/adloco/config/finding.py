"""Finding the setting that somebody means by part of its name, or by a name from elsewhere."""

import difflib
from dataclasses import fields

from adloco.config.sections import SECTIONS, Section

ALIASES = {
    "batch": "batch.initial",
    "batch_size": "batch.initial",
    "beta1": "inner.betas",
    "clip": "method.max_grad_norm",
    "codec": "wire.format",
    "context": "data.context_tokens",
    "eval_every": "evaluation.every",
    "grad_clip": "method.max_grad_norm",
    "h": "method.sync_every",
    "inner_lr": "inner.lr",
    "k": "method.num_trainers",
    "learning_rate": "inner.lr",
    "local_steps": "method.sync_every",
    "m": "method.workers_per_trainer",
    "max_length": "data.context_tokens",
    "max_steps": "run.inner_steps",
    "micro_batch_size": "switch.max_micro_batch",
    "model": "model.shape",
    "momentum": "outer.options",
    "n": "switch.multiplier",
    "nesterov": "outer.options",
    "num_workers": "method.workers_per_trainer",
    "outer_lr": "outer.lr",
    "outer_optimizer": "outer.optimizer",
    "output": "run.folder",
    "output_dir": "run.folder",
    "per_device_train_batch_size": "switch.max_micro_batch",
    "scheduler": "learning_rate.shape",
    "seq_len": "data.context_tokens",
    "seq_length": "data.context_tokens",
    "steps": "run.inner_steps",
    "trainers": "method.num_trainers",
    "warmup": "learning_rate.warmup_fraction",
    "workers": "method.workers_per_trainer",
}
"""Names that papers and other programs use, in small letters, and the settings they stand for."""


def setting_names() -> list[str]:
    """section.key of every setting that a recipe can have, in the order of the sections."""
    names: dict[str, None] = {}
    for section, content in SECTIONS.items():
        if content.choice:
            names[f"{section}.{content.choice.key}"] = None
        every = (field for owner in _owners(content) for field in fields(owner))
        names |= {f"{section}.{field.name}": None for field in every}
    return list(names)


def switches() -> set[str]:
    """section.key of every setting that is true or false."""
    return {
        f"{section}.{field.name}"
        for section, content in SECTIONS.items()
        for owner in _owners(content)
        for field in fields(owner)
        if field.type in (bool, "bool")
    }


def settings_meant(word: str) -> list[str]:
    """The settings whose key is this word, or for which it is another name; none if none is.

    Args:
        word: Such as lr, --sync-every, H or method.h.
    """
    names = setting_names()
    key = _key(word)
    named = [name for name in names if name.partition(".")[2] == key]
    return [*named, *([ALIASES[key]] if key in ALIASES else [])]


def settings_near(word: str) -> list[str]:
    """The settings that a misspelt word may mean."""
    known = {name.partition(".")[2] for name in setting_names()} | ALIASES.keys()
    nearest = difflib.get_close_matches(_key(word), known, n=1)
    return settings_meant(nearest[0]) if nearest else []


def _owners(content: Section) -> list[type]:
    """The classes whose fields can be settings of a section."""
    chosen = content.choice.register.classes.values() if content.choice else ()
    return [*chosen, *content.parts.values()]


def _key(word: str) -> str:
    return word.lstrip("-").replace("-", "_").rpartition(".")[2].lower()
