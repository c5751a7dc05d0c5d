"""Dropout from random generators of our own: one for each micro-batch of a worker, seeded by the
data stream and the position of the first sample.

So a resumed run draws the same masks without saved generator states, workers of one process do not
disturb one another, and a second pass over the same samples (inner products, recomputed
activations) gets the same masks. Other random numbers come from torch's global generator, also
those of less usual dropout (of channels, of nn.LSTM, AlphaDropout).
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_open: ContextVar["OwnDropout | None"] = ContextVar("open", default=None)
_alike = ContextVar("alike", default=False)
"""True in a pass that will be computed again with the same draws, and in that second one."""


def _computed_again_otherwise() -> bool:
    """True in a checkpoint of a model's own, whose second pass knows no generator but torch's."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return not _alike.get() and (hooks is not None or not torch.is_grad_enabled())


class OwnDropout(TorchFunctionMode):
    """A context in which dropout and attention with dropout draw from one generator.

    It affects only the thread that has opened it.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __enter__(self) -> "OwnDropout":
        self._token = _open.set(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        _open.reset(self._token)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _computed_again_otherwise():
            return func(*args, **kwargs)
        if func is functional.multi_head_attention_forward:
            # Its body runs outside of this context, so it gets its dropout and attention by name.
            own = {"dropout": self._dropout, "scaled_dot_product_attention": self._attention}
            inside = FunctionType(func.__code__, scope := func.__globals__ | own)
            scope[func.__name__] = inside  # Which it names where another context is open, too.
            inside.__defaults__, inside.__kwdefaults__ = func.__defaults__, func.__kwdefaults__
            return inside(*args, **kwargs)
        if func is functional.dropout:
            return self._dropout(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def again(self) -> "OwnDropout":
        """A copy that will draw the same numbers as this one from now on."""
        return OwnDropout(self._generator.clone_state())

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0:
            return input
        if p == 1:
            return input.mul_(0) if inplace else input * 0
        kept = torch.empty_like(input).bernoulli_(1 - p, generator=self._generator).div_(1 - p)
        return input.mul_(kept) if inplace else input * kept

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention, with dropout from separate operators: the fused one takes no generator."""
        if not dropout_p:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            key, value = (
                tensor.repeat_interleave(query.size(-3) // tensor.size(-3), -3)
                for tensor in (key, value)
            )
        scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
        scores = query @ key.transpose(-2, -1) * scale
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        # A query that may attend to nothing (padding) gets zeros, as from the fused operator.
        weights = scores.softmax(-1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
        return self._dropout(weights, dropout_p) @ value


def own_dropout(seed: int, stream: int, position: int, device: torch.device) -> OwnDropout:
    """The dropout context for the micro-batch of a stream whose first sample has this position."""
    return OwnDropout(torch.Generator(device).manual_seed(mixed_seed(seed, stream, position)))


def uses_dropout(model: nn.Module) -> bool:
    """True if any module of the model has a positive dropout rate.

    A rate is a float attribute of a module that is named p or has "drop" in its name.
    """
    named = [(name, value) for module in model.modules() for name, value in vars(module).items()]
    return any(
        isinstance(value, float) and value > 0 and (name == "p" or "drop" in name)
        for name, value in named
    )


def recomputed_alike() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts for activation checkpointing (`context_fn` of torch.utils.checkpoint).

    The second one makes the recomputation draw the same masks as the first pass.
    """
    draws = _open.get()
    return _Alike(nullcontext()), _Alike(draws.again() if draws else nullcontext())


class _Alike(AbstractContextManager[None]):
    """A context within another one, in which passes are known to draw the same."""

    def __init__(self, inner: AbstractContextManager[Any]) -> None:
        self._inner = inner

    def __enter__(self) -> None:
        self._token = _alike.set(True)
        self._inner.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._inner.__exit__(*exception)
        _alike.reset(self._token)


def mixed_seed(*parts: object) -> int:
    """A seed from a hash of all parts, so it changes if any of them does."""
    return int.from_bytes(hashlib.sha256(" ".join(map(str, parts)).encode()).digest()[:7], "big")
