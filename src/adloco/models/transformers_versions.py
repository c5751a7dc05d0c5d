"""Parts of transformers that differ between the versions that adloco supports, or that it needs in
another way.
"""

from typing import Any


def recompute_activations(model: Any, options: dict[str, Any]) -> None:
    """Let a model recompute activations in the backward pass.

    Args:
        model: A model of transformers.
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
    return tuple(
        getattr(core_model_loading, name) for name in names if hasattr(core_model_loading, name)
    )


def causal_attention() -> str:
    """The name under which transformers has torch's attention without a mask, for models whose
    samples have neither padding nor several texts that must not see each other.

    With "sdpa" it looks for such texts in each forward pass, for which the host waits for the GPU,
    and gives a pass that is captured as a graph another attention, with a mask.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    name = "causal_sdpa"  # Any that it has no function for masks of.
    AttentionInterface.register(name, sdpa_attention_forward)
    return name
