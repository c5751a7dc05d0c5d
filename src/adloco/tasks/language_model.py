"""Causal language modelling: windows of packed tokens, loss, evaluation, generation; no padding."""

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adloco.algorithms.method import Source
from adloco.data.sources import TokenSource, check_one_window, hold_out_more
from adloco.data.token_bytes import predicted_bytes
from adloco.data.token_cache import TokenCache, open_cache
from adloco.distributed.device import to_device
from adloco.errors import require
from adloco.models.attention import POSITIONS_AFTER_PADDING, check_context, without_mask
from adloco.models.transformers_versions import KEY_VALUE_CACHE
from adloco.tasks.task import TaskData

EVALUATION_WINDOWS_AT_ONCE = 32
CHECKED_TOKENS = 16
"""Number of tokens with which `validate_model` calls the model."""
LEAK = 1e-6
"""`validate_model` refuses a model whose earlier logits change by more than this, relative to the
largest logit, when the last token changes.
"""


def open_language_model(given: TaskData) -> "LanguageModel":
    """Open the task with its data."""
    data = given.data
    data.require_context()
    cache = open_cache(data, given.tokenizer)
    advice = "" if given.everything else hold_out_more(data)
    check_one_window(data, len(cache.validation), "evaluate", advice)
    return LanguageModel(cache, given.evaluation.windows)


class LanguageModel:
    """Causal language modelling on windows of a token cache."""

    def __init__(self, cache: TokenCache, windows: int) -> None:
        """
        Args:
            cache: Its text to validate on has one window at least.
            windows: Windows of an evaluation; 0: all.
        """
        self.tokenizer = cache.tokenizer
        self._cache, self._data = cache, cache.data
        self._validation = TokenSource(cache.validation, context_tokens=cache.data.context_tokens)
        self._windows = evaluation_windows(self._validation, windows)

    @property
    def corpus(self) -> str:
        return self._cache.corpus

    def matches_fingerprint(self, corpus: str) -> bool:
        return self._cache.matches_fingerprint(corpus)

    def rows_read(self) -> int | None:
        return self._cache.rows_read()

    def skipped(self) -> str:
        return self._cache.skipped()

    def configure(self, config: Any) -> Any:
        model_type = getattr(config, "model_type", "")
        if model_type in POSITIONS_AFTER_PADDING and config.pad_token_id is None:
            config.pad_token_id = self.tokenizer.padding
        tokens = self._data.context_tokens
        check_context(config, tokens, f"got {tokens}")
        return config

    def train_source(self, num_streams: int, seed: int, least: int) -> Source:
        data, needed = self._data, max(least, num_streams)
        windows = self.num_train_samples(needed)
        require(
            windows >= needed,
            f"{data.source} has {windows} windows of {data.context_tokens} tokens to train on, "
            f"but one inner step needs {needed}; "
            "give more text, hold out less of it, or lower data.context_tokens, batch.initial or "
            "method.num_trainers",
        )
        return self._cache.train_source(num_streams=num_streams, seed=seed)

    def num_train_samples(self, at_least: int) -> int:
        return self._cache.train_windows(at_least)

    def loss(self, model: Any, batch: Any) -> Tensor:
        return next_token_loss(model, batch)

    def compiled_loss(self, model: Any, batch: Any) -> Tensor:
        """`loss` without float32 copies of the logits, which are the largest tensors of a step."""
        return next_token_loss(model, batch, compiled_cross_entropy())

    def largest_source(self) -> Source:
        return self._validation

    @torch.no_grad()
    def validate_model(self, model: Any, device: torch.device) -> str:
        """Check that logits do not depend on later tokens: two inputs that differ in their last
        token alone must give the same logits before it.
        """
        model.eval()
        ids = self._validation.windows(np.array([0, 0])).to(device)[
            :, : min(CHECKED_TOKENS, self._data.context_tokens)
        ]
        ids[1, -1] = (ids[0, -1] + 1) % self.tokenizer.vocab_size
        first, second = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        sees = float((first - second).abs().max() / first.abs().max().clamp(min=1e-30)) > LEAK
        # Of the configurations of transformers only those of two-way models have it.
        decodes = hasattr(getattr(model, "config", None), "is_decoder")
        advice = (
            "take one for causal language modelling, or add is_decoder = true to model.overrides"
            if decodes
            else "its logits at a position may depend on the tokens up to it alone"
        )
        return f"the model sees the tokens that it must predict: {advice}" if sees else ""

    @torch.no_grad()
    def measure(
        self, model: nn.Module, device: torch.device, at_once: int, part: int = 0, parts: int = 1
    ) -> list[float]:
        model.eval()
        # Read at the end alone, so that the host need not wait for the device in between.
        nats = torch.zeros((), dtype=torch.float64, device=device)
        count, windows = 0, self._windows
        most = min(at_once, EVALUATION_WINDOWS_AT_ONCE)
        calls = math.ceil(math.ceil(len(windows) / parts) / most)
        for chunk in np.array_split(windows[part::parts], calls):
            ids = to_device(self._validation.windows(chunk if len(chunk) else windows[:1]), device)
            tokens = ids[:, 1:].numel() if len(chunk) else 0
            nats += next_token_loss(model, ids).double() * tokens
            count += tokens
        return [float(nats), float(self._window_bytes[part::parts].sum()), count]

    @functools.cached_property
    def _window_bytes(self) -> NDArray[np.float64]:
        """Bytes of text that the predicted tokens of each evaluated window stand for."""
        known = predicted_bytes(self.tokenizer, self._validation, self._windows)
        return np.full_like(known, np.nan) if self._cache.lost() else known


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats of logits [samples, context, vocabulary] and token ids [samples,
    context].
    """
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@functools.cache
def compiled_cross_entropy() -> Callable[[Tensor, Tensor], Tensor]:
    """`cross_entropy`, compiled as one graph for all numbers of samples."""
    return torch.compile(cross_entropy, dynamic=True)


def next_token_loss(
    model: Any, ids: Tensor, loss_fn: Callable[[Tensor, Tensor], Tensor] = cross_entropy
) -> Tensor:
    """Mean cross-entropy of each token given those before it, in nats.

    The shift is here and nowhere else: position i predicts token i + 1. (Passing labels to a
    transformers model would shift a second time.)

    Args:
        model: Called with input_ids; returns an object with logits [samples, context, vocabulary].
        ids: Token ids, int64 [samples, context + 1].
    """
    with without_mask(model):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return loss_fn(logits, ids[:, 1:])


def evaluation_windows(source: TokenSource, windows: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Indices of `windows` windows, evenly spaced over the source; of all windows for 0."""
    count = min(windows, source.num_windows) if windows else source.num_windows
    return np.linspace(0, source.num_windows - 1, count).astype(np.int64)


@torch.no_grad()
def generate(
    model: Any,
    prompt: list[int],
    *,
    max_tokens: int,
    temperature: float,
    context_tokens: int,
    vocab_size: int,
    stop: int,
    seed: int,
) -> Iterator[int]:
    """Draw the token ids that continue a prompt, one at a time.

    Args:
        model: A causal language model of transformers.
        prompt: Token ids, at least one.
        max_tokens: Most ids to draw.
        temperature: Divides the logits; 0 takes the most likely token each time.
        context_tokens: The model sees this many of the latest tokens.
        vocab_size: Number of the tokenizer's ids; a model can have outputs for more, none is drawn.
        stop: Id that ends the text; it is not yielded.
    """
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    # A plain module has no key-value cache, and some models of transformers have none.
    given = inspect.signature(model.forward).parameters
    held = next((name for name in KEY_VALUE_CACHE if name in given), "")
    options: dict[str, Any] = {"use_cache": bool(held)}
    for _ in range(max_tokens):
        if len(ids) > context_tokens:  # The window slides now, which invalidates the cache.
            options = {"use_cache": False}
        seen = ids[-1:] if options.get(held) is not None else ids[-context_tokens:]
        output = model(input_ids=torch.tensor([seen], device=device), **options)
        if options["use_cache"]:
            # A recurrent_gemma takes a cache and returns none.
            cache = getattr(output, held, None)
            options = {"use_cache": cache is not None, held: cache}
        logits = output.logits[0, -1, :vocab_size].float().cpu()
        if temperature == 0:
            drawn = logits.argmax()
        else:
            drawn = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
        token = int(drawn)
        if token == stop:
            return
        ids.append(token)
        yield token
