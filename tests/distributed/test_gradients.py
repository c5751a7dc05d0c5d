"""Statistics of incoming gradients against gradients computed by other means."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from adloco.distributed.parallel import gradient_norms
from adloco.distributed.parallel.gradient_norms import (
    clip,
    incoming_gradients,
    squared_norm,
    watched,
)


class Tied(nn.Module):
    """Embedding and head share one matrix: its gradient has two contributions in each backward
    pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(ids))))


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def flat_gradient(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss_of(model, ids), list(model.parameters()))]
    ).double()


@pytest.mark.parametrize("at_once", [2**24, 50, 0])
def test_each_micro_batch_is_seen_before_accumulation_tied_weights_once(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of gradients that are squared in several lots."""
    monkeypatch.setattr(gradient_norms, "SQUARED_AT_ONCE", at_once)
    torch.manual_seed(0)
    model, ids = Tied(), torch.randint(0, 11, (6, 5))
    expected = [float(flat_gradient(model, part).square().sum()) for part in ids.split(2)]
    with incoming_gradients(list(model.parameters())) as incoming:
        seen = []
        for part in ids.split(2):
            loss_of(model, part).backward()
            seen.append(float(incoming.take()))
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected), rtol=1e-6, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_gradient_that_comes_in_parts_is_refused(reentrant: bool) -> None:
    """A block that is used twice and computed again by a backward pass of its own gives a part of
    its gradient each time, and the squares of parts do not add up to that of the sum.
    """
    torch.manual_seed(0)
    block, inputs = nn.Linear(5, 5), torch.randn(3, 5, requires_grad=True)

    def loss() -> torch.Tensor:
        once = checkpoint(block, inputs, use_reentrant=reentrant)
        return checkpoint(block, once, use_reentrant=reentrant).sum()

    parameters = list(block.parameters())
    gradients = torch.autograd.grad(block(block(inputs)).sum(), parameters)
    with incoming_gradients(parameters) as incoming:
        if reentrant:
            with pytest.raises(ValueError, match="use_reentrant=True., where False is right"):
                loss().backward()
        else:
            loss().backward()
            expected = sum(float(gradient.square().sum()) for gradient in gradients)
            assert float(incoming.take()) == pytest.approx(expected, rel=1e-6)


def test_gradients_are_added_up_apart_from_the_accumulated_ones() -> None:
    torch.manual_seed(0)
    model, ids = Tied(), torch.randint(0, 11, (6, 5))
    parameters = list(model.parameters())
    totals = [torch.zeros_like(parameter) for parameter in parameters]

    def add(index: int, gradient: torch.Tensor) -> None:
        totals[index].add_(gradient)

    for index, part in enumerate(ids.split(2)):
        with watched(parameters, add) if index != 1 else contextlib.nullcontext():
            loss_of(model, part).backward()
    flat = torch.cat([total.flatten() for total in totals]).double()
    torch.testing.assert_close(flat, flat_gradient(model, ids[:2]) + flat_gradient(model, ids[4:]))


def test_hooks_are_gone_afterwards() -> None:
    model = Tied()
    ids = torch.randint(0, 11, (4, 5))
    with incoming_gradients(list(model.parameters())) as incoming:
        pass
    loss_of(model, ids).backward()
    assert incoming.take() == 0.0


def test_squared_norm_is_summed_in_float64() -> None:
    # 2^24 + 1 ones: in float32 the sum would stop at 2^24.
    tensors = [torch.full((1,), 4096.0), torch.ones(1)]
    assert squared_norm(tensors) == 2**24 + 1
    assert squared_norm([]) == 0.0


def test_clip() -> None:
    """The last parameter has no gradient."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in (2, 1, 1)]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    clip(parameters, torch.tensor(5.0, dtype=torch.float64), 1.0)
    torch.testing.assert_close(
        torch.cat([p.grad for p in parameters if p.grad is not None]), torch.tensor([0.6, 0.0, 0.8])
    )


def test_clip_rounds_a_gradient_once_in_each_data_type() -> None:
    """A factor that is itself rounded to bf16 would be off by up to 0.4%. All are clipped once,
    whatever types the others have.
    """
    factor, parameters = 1 / torch.tensor(3.7, dtype=torch.float64), []
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        parameters.append(nn.Parameter(torch.zeros(1000, dtype=dtype)))
        parameters[-1].grad = torch.randn(1000, dtype=torch.float64).to(dtype)
    before = [each.grad.clone() for each in parameters if each.grad is not None]
    clip(parameters, torch.tensor(3.7, dtype=torch.float64), 1.0)
    for parameter, gradient in zip(parameters, before, strict=True):
        wide = torch.promote_types(gradient.dtype, torch.float32)
        expected = (gradient.to(wide) * factor.to(wide)).to(gradient.dtype)
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=0)


def test_clip_never_scales_up_where_a_device_is_not_waited_for() -> None:
    class OnGpu(torch.Tensor):
        device = torch.device("cuda")

    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.tensor([0.5])
    clip([parameter], torch.tensor(0.5, dtype=torch.float64).as_subclass(OnGpu), 1.0)
    assert parameter.grad.tolist() == [0.5]
