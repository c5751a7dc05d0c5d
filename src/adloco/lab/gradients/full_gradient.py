"""The full gradient of a model over many samples, and the noise of the gradients of batches.

N samples are cut into J batches, which are the groups of one test step of all samples: S and |G|^2
follow from the squared norms of their mean gradients and of the full one, as in a norm test
(`rules/moments.py`). They are sums over parameters, and hold for any part of the model.

Memory beside the model: the gradient of one batch, the full gradient in at least float32, and a
number for each batch and parameter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from adloco.algorithms.method import Source
from adloco.distributed.device import autocast, to_device
from adloco.distributed.dtensor import zeros_like
from adloco.distributed.parallel.gradient_norms import squared_norms, trainable
from adloco.rules.moments import GradientEstimate, estimate, group_moments
from adloco.rules.switch import balanced


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The place of a batch's samples in the data."""

    stream: int
    position: int
    samples: int


def cut_into_batches(samples: int, batch: int, streams: Sequence[int]) -> list[Batch]:
    """The first `samples` samples of a source's streams in batches of at most `batch` samples.

    Each stream gives as many samples as the others, or one more or less. So as many samples as an
    epoch has are all its samples.
    """
    found = []
    for stream, own in zip(streams, balanced(samples, len(streams)), strict=True):
        sizes = balanced(own, -(-own // batch)) if own else ()
        starts = accumulate(sizes, initial=0)
        found += [
            Batch(stream=stream, position=start, samples=size)
            for start, size in zip(starts, sizes, strict=False)
        ]
    return found


@dataclass(frozen=True, kw_only=True)
class FullGradient:
    """What is known of the full gradient, parameter by parameter."""

    loss: float
    """Mean loss over the samples."""
    sizes: Sequence[int]
    """Samples of each batch."""
    norms_sq: Tensor
    """|g_j|^2 of each batch and parameter, float64 [batches, parameters]."""
    full_norms_sq: Tensor
    """|F|^2 of each parameter, float64 [parameters]."""

    def estimate(self, chosen: list[int]) -> GradientEstimate:
        """Unbiased estimates of S and |G|^2 from two batches or more; `plugin_norm_sq` is |F|^2.

        chosen: Indices of the parameters that count.
        """
        norms_sq = self.norms_sq[:, chosen].sum(1).tolist()
        found = estimate(
            group_moments(self.sizes, norms_sq, float(self.full_norms_sq[chosen].sum()))
        )
        assert found is not None, "one batch has none to be compared with"
        return found


def full_gradient(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    source: Source,
    batches: Sequence[Batch],
    *,
    at_once: int,
    precision: torch.dtype | None = None,
    advance: Callable[[int], None] = lambda samples: None,
) -> FullGradient:
    """Compute the gradient of every batch.

    Args:
        model: It is put into evaluation mode: dropout is off, and running statistics are used and
            stay as they are.
        loss_fn: (model, batch) -> mean loss over the samples of the batch.
        at_once: Most samples in one forward and backward pass; larger batches accumulate.
        precision: Type of autocast; None: the model's own type.
        advance: Called with the number of samples after each batch.
    """
    params, samples = trainable(model), sum(batch.samples for batch in batches)
    device = params[0].device
    model.eval()
    full = [zeros_like(each, torch.promote_types(each.dtype, torch.float32)) for each in params]
    loss, norms_sq = 0.0, []
    for batch in batches:
        start = batch.position
        for part in balanced(batch.samples, -(-batch.samples // at_once)):
            read = to_device(source.read(batch.stream, start, part), device)
            with autocast(device, precision):
                share = loss_fn(model, read) * (part / batch.samples)
            share.backward()
            loss += float(share.detach()) * batch.samples / samples
            start += part
        norms_sq.append(_take_gradients(params, full, batch.samples / samples))
        advance(batch.samples)
    return FullGradient(
        loss=loss,
        sizes=[batch.samples for batch in batches],
        norms_sq=torch.stack(norms_sq),
        full_norms_sq=torch.stack(squared_norms(full)).cpu(),
    )


def _take_gradients(params: Sequence[Tensor], full: Sequence[Tensor], share: float) -> Tensor:
    """Add this share of the gradients to the full one, and free them; |g|^2 of each parameter."""
    norms_sq = []
    for total, parameter in zip(full, params, strict=True):
        # A parameter that nothing uses has no gradient.
        gradient = torch.zeros_like(total) if parameter.grad is None else parameter.grad
        norms_sq += squared_norms([gradient])
        total.add_(gradient, alpha=share)
        parameter.grad = None
    return torch.stack(norms_sq).cpu()
