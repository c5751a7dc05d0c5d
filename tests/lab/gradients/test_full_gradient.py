"""The full gradient and its noise, against per-sample gradients of a plain loop in float64."""

import gc
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from adloco import TensorSource
from adloco.lab.gradients.full_gradient import Batch, cut_into_batches, full_gradient
from tests.problems import BlockLM, next_token, tokens

SAMPLES = 23


class Dropped(nn.Module):
    """A regression with dropout, running statistics and a parameter that nothing uses."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.norm, self.drop = nn.BatchNorm1d(3), nn.Dropout(rate)
        self.linear, self.idle = nn.Linear(3, 1), nn.Parameter(torch.ones(2))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.linear(self.drop(self.norm(inputs)))
        return output


def squares(model: nn.Module, inputs: Tensor) -> Tensor:
    loss: Tensor = model(inputs).square().mean()
    return loss


def gradient_rows(model: nn.Module, loss_fn: Any, batches: list[Any]) -> list[list[np.ndarray]]:
    """The mean gradient of each batch, for each parameter flat in float64."""
    rows = []
    for batch in batches:
        model.zero_grad()
        loss_fn(model, batch).backward()
        rows.append(
            [
                np.zeros(each.numel())
                if each.grad is None
                else each.grad.double().flatten().numpy().copy()
                for each in model.parameters()
            ]
        )
    model.zero_grad()
    return rows


def check(
    found: Any, rows: list[list[np.ndarray]], sizes: list[int], owners: list[int], rel: float
) -> None:
    """Compare every number with NumPy's.

    Args:
        found: What is known of the full gradient.
        rows: Gradients of single samples or of batches, for each parameter.
        sizes: Samples of each row.
        owners: Number of the batch of each row.
        rel: Tolerated relative error.
    """
    weights, group = np.array(sizes, dtype=float), np.array(owners)
    whole = np.array([np.concatenate(row) for row in rows])
    full = np.average(whole, axis=0, weights=weights)
    count = [int(weights[group == batch].sum()) for batch in range(max(owners) + 1)]
    means = np.array(
        [
            np.average(whole[group == batch], axis=0, weights=weights[group == batch])
            for batch in range(len(count))
        ]
    )
    assert found.sizes == count
    variance = (np.array(count) @ (means - full) ** 2) / (len(count) - 1)
    edges = np.cumsum([0, *(part.size for part in rows[0])])
    indices = range(len(rows[0]))
    parts = [[*indices], *([index] for index in indices)]
    for part, (begin, end) in zip(parts, [(0, edges[-1]), *itertools.pairwise(edges)], strict=True):
        seen, grad_variance = found.estimate(part), variance[begin:end].sum()
        assert seen.grad_variance == pytest.approx(grad_variance, rel=rel, abs=1e-15)
        norm_sq = (full[begin:end] ** 2).sum()
        assert seen.plugin_norm_sq == pytest.approx(norm_sq, rel=rel, abs=1e-15)
        unbiased = norm_sq - grad_variance / weights.sum()
        assert seen.grad_norm_sq == pytest.approx(unbiased, rel=10 * rel, abs=1e-9 * norm_sq)


@pytest.mark.parametrize(("batch", "at_once"), [(5, 8), (5, 2), (1, 1)])
def test_equals_per_sample_truth(batch: int, at_once: int) -> None:
    """A tied language model, batches of unequal sizes from two streams, accumulated or not."""
    source = tokens(60, num_streams=2)
    batches = cut_into_batches(SAMPLES, batch, range(2))
    if batch == 5:
        assert [each.samples for each in batches] == [4, 4, 4, 4, 4, 3]
    model, done = BlockLM(), list[int]()
    found = full_gradient(model, next_token, source, batches, at_once=at_once, advance=done.append)
    assert done == [each.samples for each in batches]
    assert all(parameter.grad is None for parameter in model.parameters())
    owners = [number for number, each in enumerate(batches) for _ in range(each.samples)]
    samples = [
        source.read(each.stream, each.position + offset, 1)
        for each in batches
        for offset in range(each.samples)
    ]
    check(found, gradient_rows(BlockLM(), next_token, samples), [1] * SAMPLES, owners, 1e-9)
    losses = [float(next_token(BlockLM(), sample).detach()) for sample in samples]
    assert found.loss == pytest.approx(np.mean(losses))


def test_a_gradient_known_by_hand() -> None:
    """loss = w x has the gradient x: here 1, 2, 6 and 7 in batches of two.

    g = 1.5 and 6.5, F = 4, S = (2 * 2.5^2 + 2 * 2.5^2) / 1 = 25, |G|^2 = 16 - 25 / 4 = 9.75.
    """

    class Given:
        num_streams = 1

        def read(self, stream: int, position: int, count: int) -> Tensor:
            return torch.tensor([[1.0], [2], [6], [7]])[position : position + count]

    found = full_gradient(
        nn.Linear(1, 1, bias=False),
        lambda model, inputs: model(inputs).mean(),
        Given(),
        cut_into_batches(4, 2, range(1)),
        at_once=2,
    )
    assert (found.full_norms_sq.tolist(), found.norms_sq.tolist()) == ([16], [[2.25], [42.25]])
    assert (found.estimate([0]).grad_variance, found.estimate([0]).grad_norm_sq) == (25, 9.75)


def test_dropout_is_off_and_buffers_stay() -> None:
    source = TensorSource(torch.randn(20, 3, generator=torch.manual_seed(0)), num_streams=1)
    batches = cut_into_batches(20, 6, range(1))
    model = Dropped(0.5)
    before = [buffer.clone() for buffer in model.buffers()]
    found = full_gradient(model, squares, source, batches, at_once=6)
    plain = Dropped(0.0).eval()
    read = [source.read(0, each.position, each.samples) for each in batches]
    rows, sizes = gradient_rows(plain, squares, read), [each.samples for each in batches]
    check(found, rows, sizes, list(range(len(sizes))), 1e-5)
    assert found.full_norms_sq[0] == 0, "the idle parameter, which is the module's own"
    for now, then in zip(model.buffers(), before, strict=True):
        assert torch.equal(now, then)


def test_half_precision_is_added_up_in_more() -> None:
    """Batch gradients are those of a bfloat16 model, but their mean is not rounded to bfloat16."""
    source, batches = tokens(60, num_streams=1), cut_into_batches(60, 1, range(1))
    model = BlockLM().to(torch.bfloat16)
    found = full_gradient(model, next_token, source, batches, at_once=4)
    read = [source.read(0, each.position, 1) for each in batches]
    rows = gradient_rows(model, next_token, read)
    check(found, rows, [1] * 60, list(range(60)), 1e-5)


def test_memory_of_two_gradients() -> None:
    """While a gradient is made, three tensors have the shape of the parameter: itself, its gradient
    and the full gradient. One more is the gradient before it is accumulated.
    """
    model, counts = nn.Linear(37, 41, bias=False), []

    def count(_: Tensor) -> None:
        tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
        counts.append(sum(each.shape == model.weight.shape for each in tensors))

    model.weight.register_post_accumulate_grad_hook(count)
    source = TensorSource(torch.randn(6, 37, generator=torch.manual_seed(0)), num_streams=1)
    full_gradient(model, squares, source, cut_into_batches(6, 2, range(1)), at_once=2)
    assert len(counts) == 3 and max(counts) <= 4


@pytest.mark.parametrize(("samples", "streams"), [(12, 1), (11, 2), (13, 5), (3, 5)])
def test_an_epoch_is_read_once(samples: int, streams: int) -> None:
    batches = cut_into_batches(samples, 4, range(streams))
    assert max(batch.samples for batch in batches) <= 4
    assert batches[0] == Batch(stream=0, position=0, samples=batches[0].samples)
    if samples < streams:
        assert [batch.stream for batch in batches] == [0, 1, 2]
        return
    source = TensorSource(torch.arange(samples), num_streams=streams)
    read = [source.read(batch.stream, batch.position, batch.samples) for batch in batches]
    assert sorted(torch.cat(read).tolist()) == list(range(samples))
