"""The full gradient of a model over many samples, and the deviation of each batch's gradient from
it (`deviations.py`), in two passes over the same batches.

Memory beside the model: the gradient of one batch, the full gradient in at least float32, a
difference of one parameter at a time, and three numbers per batch and two per parameter.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from adloco.algorithms.method import Source
from adloco.distributed.device import autocast, to_device
from adloco.distributed.dtensor import zeros_like
from adloco.distributed.parallel.gradient_norms import squares, trainable
from adloco.lab.gradients.deviations import BatchGradient, Deviations
from adloco.rules.switch import balanced


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The place of a batch's samples in the data."""

    stream: int
    position: int
    samples: int


def cut_into_batches(samples: int, batch: int, num_streams: int) -> list[Batch]:
    """The first `samples` samples of a source in batches of at most `batch` samples.

    Each stream gives as many samples as the others, or one more or less. So as many samples as an
    epoch has are all its samples.
    """
    found = []
    for stream, own in enumerate(balanced(samples, num_streams)):
        sizes = balanced(own, -(-own // batch)) if own else ()
        starts = accumulate(sizes, initial=0)
        found += [
            Batch(stream=stream, position=start, samples=size)
            for start, size in zip(starts, sizes, strict=False)
        ]
    return found


@dataclass(frozen=True, kw_only=True)
class FullGradient:
    """The model, samples and loss of the gradients."""

    model: nn.Module
    """It is put into evaluation mode: dropout is off, and running statistics are used and stay as
    they are.
    """
    loss_fn: Callable[[Any, Any], Tensor]
    """(model, batch) -> mean loss over the samples of the batch."""
    source: Source
    at_once: int
    """Most samples in one forward and backward pass; larger batches accumulate."""
    precision: torch.dtype | None = None
    """Type of autocast; None: the model's own type."""

    def deviations(
        self, batches: Sequence[Batch], advance: Callable[[int], None] = lambda samples: None
    ) -> Deviations:
        """Compute the full gradient, then each batch's deviation from it.

        Args:
            batches: The batches, at least two.
            advance: Called with the number of samples after each batch of each of the two passes.
        """
        params, samples = trainable(self.model), sum(batch.samples for batch in batches)
        self.model.eval()
        full = [zeros_like(each, torch.promote_types(each.dtype, torch.float32)) for each in params]
        loss = 0.0
        for batch, mean_loss in self._backward(batches, params, advance):
            loss += mean_loss * batch.samples / samples
            for total, parameter in zip(full, params, strict=True):
                if parameter.grad is not None:
                    total.add_(parameter.grad, alpha=batch.samples / samples)
        scatters = torch.zeros(len(params), dtype=torch.float64)
        measured = []
        for batch, _ in self._backward(batches, params, advance):
            norms_sq, apart_sq = _squared(params, full)
            scatters += batch.samples * apart_sq
            measured.append(
                BatchGradient(
                    samples=batch.samples,
                    norm_sq=float(norms_sq.sum()),
                    deviation_sq=float(apart_sq.sum()),
                )
            )
        return Deviations(
            batches=measured,
            full_norms_sq=torch.stack([squares(total) for total in full]).tolist(),
            scatters=scatters.tolist(),
            loss=loss,
        )

    def _backward(
        self,
        batches: Sequence[Batch],
        params: Sequence[nn.Parameter],
        advance: Callable[[int], None],
    ) -> Iterator[tuple[Batch, float]]:
        """Leave the mean gradient of one batch after the other in `grad`; yields its mean loss."""
        device = params[0].device
        for batch in batches:
            loss, start = 0.0, batch.position
            for part in balanced(batch.samples, -(-batch.samples // self.at_once)):
                read = to_device(self.source.read(batch.stream, start, part), device)
                with autocast(device, self.precision):
                    share = self.loss_fn(self.model, read) * (part / batch.samples)
                share.backward()  # type: ignore[no-untyped-call]
                loss, start = loss + float(share.detach()), start + part
            yield batch, loss
            for parameter in params:
                parameter.grad = None
            advance(batch.samples)


def _squared(params: Sequence[nn.Parameter], full: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """|g|^2 and |g - F|^2 of each parameter, float64 on the CPU. No gradient is a zero one."""
    rows = []
    for parameter, total in zip(params, full, strict=True):
        gradient = torch.zeros_like(total) if parameter.grad is None else parameter.grad
        rows.append(torch.stack([squares(gradient), squares(gradient.to(total.dtype) - total)]))
    norms_sq, apart_sq = torch.stack(rows, dim=1).cpu()
    return norms_sq, apart_sq
