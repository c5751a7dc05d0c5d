"""What the attention of a model of transformers sees: which tokens, and how many at once."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from adloco.errors import require

FULLY_CAUSAL = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "phi", "phi3", "gpt2", "gpt_neox", "olmo"),
    *("olmo2", "smollm3", "granite", "starcoder2", "glm4"),
)
"""Types of models whose tokens see all tokens before them and nothing else, unless `attends_to_all`
says otherwise."""


def attends_to_all(config: Any) -> bool:
    """True if each token of a model sees all tokens before it, whatever the batch: attention needs
    no mask but the causal one.
    """
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    return (
        getattr(config, "model_type", "") in FULLY_CAUSAL
        and set(kinds) == {"full_attention"}
        and not getattr(config, "sliding_window", None)
    )


@contextmanager
def without_mask(model: Any) -> Iterator[None]:
    """A context in which a model for which `attends_to_all` is true makes no mask but the causal
    one: for samples that have neither padding nor several texts that must not see each other.

    Otherwise it looks for such texts in each forward pass, for which the host waits for the GPU,
    and gives a pass that is captured as a graph another attention, with a mask. Other models are
    left as they are.
    """
    config: Any = getattr(getattr(model, "module", model), "config", None)  # DDP wraps a model.
    if getattr(config, "_attn_implementation", "") != "sdpa" or not attends_to_all(config):
        yield
        return
    config._attn_implementation = _causal_attention()
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"


@cache
def _causal_attention() -> str:
    """A name under which transformers has torch's attention, but no function for masks."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    name = "causal_sdpa"
    AttentionInterface.register(name, sdpa_attention_forward)
    return name


POSITIONS_AFTER_PADDING = (
    *("roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod", "camembert"),
    *("data2vec-text", "esm", "ibert", "layoutlmv3", "lilt", "longformer", "luke", "markuplm"),
)
"""Types of models that count positions from the id after their padding's, which they must have."""


def longest_context(config: Any) -> float:
    """Most tokens that a model sees at once; infinite if its configuration has no limit."""
    longest: int = getattr(config, "max_position_embeddings", None) or 0
    # An xlnet has -1.
    return longest - _first_position(config) if longest > 0 else math.inf


def _first_position(config: Any) -> int:
    """The position of a sample's first token."""
    model_type = getattr(config, "model_type", "")
    if model_type == "mpnet":  # In its code, the id of padding is 1 whatever the configuration's.
        return 2
    return config.pad_token_id + 1 if model_type in POSITIONS_AFTER_PADDING else 0


def check_context(config: Any, most: int, found: str) -> None:
    """Raise ValueError if a model does not see this many tokens at once.

    Args:
        most: Tokens of the longest sample.
        found: The end of the message, which says what was found.
    """
    longest, first = longest_context(config), _first_position(config)
    advice = (
        f" (whose positions begin at {first}, after the id of its padding; give it more in "
        "model.overrides, as max_position_embeddings, or another pad_token_id)"
    )
    require(
        most <= longest,
        f"data.context_tokens must be <= {longest}, the longest context of the model"
        f"{advice if first else ''}, {found}",
    )
