"""Causal language modelling: a Llama from a configuration, the loss on next tokens, evaluation and generation. No padding anywhere."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adloco.rules.checks import require
from adloco.training.data.sources import TokenSource

EVALUATION_WINDOWS_AT_ONCE = 32


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """Shape of a Llama with random weights; the defaults have 869,504 parameters with bytes."""

    hidden_size: int = 128
    """Width of the residual stream."""
    num_layers: int = 4
    """Transformer blocks."""
    num_heads: int = 4
    """Attention heads."""
    num_kv_heads: int = 4
    """Key and value heads; fewer than the attention heads for grouped-query attention."""
    intermediate_size: int = 352
    """Width of the feed-forward blocks."""
    max_position: int = 1024
    """Longest context in tokens."""
    tie_embeddings: bool = False
    """Whether the output head shares the embedding's weights."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "intermediate_size", "max_position"):
            require(getattr(self, name) > 0, f"model.{name} must be > 0, got {getattr(self, name)}")
        require(
            self.hidden_size % (2 * self.num_heads) == 0,
            f"model.hidden_size must be a multiple of 2 x model.num_heads = {2 * self.num_heads}, got {self.hidden_size}",
        )
        require(
            self.num_heads % self.num_kv_heads == 0, f"model.num_kv_heads must divide model.num_heads = {self.num_heads}, got {self.num_kv_heads}"
        )


def build_llama(shape: LlamaShape, vocab_size: int, seed: int) -> nn.Module:
    """A Llama with weights drawn from the seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=shape.max_position,
        tie_word_embeddings=shape.tie_embeddings,
    )
    torch.manual_seed(seed)
    model: nn.Module = LlamaForCausalLM(config)
    return model


def next_token_loss(model: Any, ids: Tensor) -> Tensor:
    """Mean cross-entropy of each token given those before it, in nats. ids: int64 [samples, context + 1].

    The shift is here and nowhere else: position i predicts token i + 1. (Passing labels to a transformers model would shift a second time.)
    """
    logits: Tensor = model(input_ids=ids[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def evaluation_windows(source: TokenSource, windows: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Indices of that many windows, evenly spaced over the source; all for 0."""
    count = min(windows, source.num_windows) if windows else source.num_windows
    return np.linspace(0, source.num_windows - 1, count).astype(np.int64)


@torch.no_grad()
def loss_on_windows(
    model: nn.Module, source: TokenSource, indices: np.ndarray[Any, np.dtype[np.int64]], device: torch.device, part: int = 0, parts: int = 1
) -> tuple[float, int]:
    """(sum of the losses, count) over the predicted tokens of every parts-th of these windows.

    Every part calls the model equally often, as the ranks that share a sharded model must.
    """
    model.eval()
    total, count = 0.0, 0
    calls = math.ceil(math.ceil(len(indices) / parts) / EVALUATION_WINDOWS_AT_ONCE)
    for chunk in np.array_split(indices[part::parts], calls):
        ids = source.windows(chunk if len(chunk) else indices[:1]).to(device)
        tokens = ids[:, 1:].numel() if len(chunk) else 0
        total += float(next_token_loss(model, ids)) * tokens
        count += tokens
    return total, count


@torch.no_grad()
def generate(model: Any, prompt: list[int], *, max_tokens: int, temperature: float, context_tokens: int, stop: int, seed: int) -> Iterator[int]:
    """Token ids that continue the prompt, until the stop id; temperature 0 takes the most likely token each time."""
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(max_tokens):
        # No key-value cache: the window slides once the context is full, which would invalidate it.
        logits = model(input_ids=torch.tensor([ids[-context_tokens:]], device=device), use_cache=False).logits[0, -1].float().cpu()
        token = int(logits.argmax()) if temperature == 0 else int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator))
        if token == stop:
            return
        ids.append(token)
        yield token
