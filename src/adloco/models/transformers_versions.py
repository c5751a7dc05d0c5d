"""Parts of transformers that differ between the versions that adloco supports."""

from typing import Any

KEY_VALUE_CACHE = ("cache", "past_key_values")
"""Name of a model's key-value cache in transformers, from 5.24 on and before."""


def recompute_activations(model: Any, options: dict[str, Any]) -> None:
    """Let a model recompute activations in the backward pass.

    options: Keyword arguments for `torch.utils.checkpoint.checkpoint`.
    """
    # 5.23 has a new name, and warns of the old one.
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(options)


def has_extra_files(config: Any) -> bool:
    """True if some weights are in files of their own (5.23 and later)."""
    return bool(getattr(type(config), "extra_files", ()))


def known_changes() -> tuple[type, ...]:
    """Kinds of rules that say which key in a file belongs to which tensor of a model."""
    from transformers import core_model_loading

    # 5.6 and later have PrefixChange.
    names = ("WeightRenaming", "PrefixChange", "WeightConverter")
    return tuple(kind for name in names if (kind := getattr(core_model_loading, name, None)))
