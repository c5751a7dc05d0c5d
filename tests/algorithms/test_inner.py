"""The inner optimizers: a step of each by hand, the parameters it covers, and what it refuses."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from adloco import InnerAdamW, InnerMuon, InnerSGD
from adloco.algorithms import muon_step

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LR, DECAY = 0.25, 0.5


def layer(dtype: torch.dtype, size: int) -> nn.Linear:
    """A square layer with gradients of 1 down to 0, too large for one vector register."""
    model = nn.Linear(size, size)
    for parameter in model.parameters():
        count = parameter.numel()
        parameter.data = torch.linspace(0.5, 1.5, count).view_as(parameter).to(dtype)
        gradient = torch.tensor([1.0, -0.01, 1e-5, 0.0]).repeat(count)[:count]
        parameter.grad = gradient.view_as(parameter).to(dtype)
    return model


def numbers(tensor: torch.Tensor | None) -> Any:
    assert tensor is not None
    return tensor.detach().float().numpy()


def step_is(
    inner: Any,
    model: nn.Linear,
    weight: Any,
    bias: Any,
    *,
    computed_in: torch.dtype | None = None,
) -> None:
    """One step gives these numbers, up to two roundings in the type that it computes in."""
    precision = 2 * torch.finfo(computed_in or model.weight.dtype).eps
    for optimizer in inner(model):
        optimizer.step()
    np.testing.assert_allclose(numbers(model.weight), weight, rtol=precision, atol=precision)
    np.testing.assert_allclose(numbers(model.bias), bias, rtol=precision, atol=precision)


def adamw_by_hand(start: Any, gradient: Any, decay: float) -> Any:
    """AdamW's first step, whose averages are the gradient and its square whatever the betas."""
    return start * (1 - LR * decay) - LR * gradient / (np.abs(gradient) + 1e-8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_of_adamw(dtype: torch.dtype) -> None:
    model = layer(dtype, 9)
    weight = adamw_by_hand(numbers(model.weight), numbers(model.weight.grad), DECAY)
    bias = adamw_by_hand(numbers(model.bias), numbers(model.bias.grad), 0.0)
    step_is(InnerAdamW(lr=LR, weight_decay=DECAY), model, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_of_sgd(dtype: torch.dtype) -> None:
    model = layer(dtype, 9)
    # The first step's momentum is the gradient itself.
    start = numbers(model.weight)
    weight = start - LR * (numbers(model.weight.grad) + DECAY * start)
    bias = numbers(model.bias) - LR * numbers(model.bias.grad)
    step_is(InnerSGD(lr=LR, weight_decay=DECAY), model, weight, bias)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_of_muon(dtype: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon_step, "native_bf16", lambda device: native)
    size = 16
    model = layer(dtype, size)
    model.weight.grad = (0.01 * torch.eye(size)).to(dtype)
    # Each of the 16 singular values is 1/4 of the Frobenius norm. Five steps of the quintic
    # s -> 3.4445 s - 4.775 s^3 + 2.0315 s^5 take it close to 1, and the directions stay.
    value = 1 / math.sqrt(size)
    for _ in range(5):
        value = 3.4445 * value - 4.775 * value**3 + 2.0315 * value**5
    # match_rms_adamw: the step is 0.2 sqrt(the larger side) times the learning rate.
    length = LR * 0.2 * math.sqrt(size) * value
    weight = numbers(model.weight) * (1 - LR * DECAY) - length * np.eye(size)
    bias = adamw_by_hand(numbers(model.bias), numbers(model.bias.grad), 0.0)
    # Orthogonalised in bfloat16, whatever the type of the parameters, unless it is emulated.
    inner, computed_in = InnerMuon(lr=LR, weight_decay=DECAY), torch.bfloat16 if native else None
    step_is(inner, model, weight, bias, computed_in=computed_in)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_muon_in_either_type(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in float32 are those of torch's Muon but for the rounding of bf16, and their singular
    values are those of the quintic steps on the singular values.
    """
    torch.manual_seed(0)
    starts, gradients = torch.randn(shape), torch.randn(3, *shape)
    ends = []
    for native in (True, False):
        monkeypatch.setattr(muon_step, "native_bf16", lambda device, native=native: native)
        layer = nn.Linear(shape[1], shape[0], bias=False)
        layer.weight.data.copy_(starts)
        (muon,) = InnerMuon(lr=0.1, weight_decay=0.1)(layer)
        for gradient in gradients:
            layer.weight.grad = gradient.clone()
            muon.step()
        ends.append(layer.weight.detach() - starts)
    assert float((ends[0] - ends[1]).norm() / ends[1].norm()) < 0.02
    coefficients = (3.4445, -4.775, 2.0315)
    found = torch.linalg.svdvals(muon_step.orthogonal(gradients[0], 5, coefficients, 1e-7))
    values = torch.linalg.svdvals(gradients[0].double())
    values = values / values.norm()
    for _ in range(5):
        values = sum(c * values**power for c, power in zip(coefficients, (1, 3, 5), strict=True))
    torch.testing.assert_close(
        found.double().sort().values, values.sort().values, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("make", [InnerAdamW, InnerSGD, InnerMuon])
def test_every_trainable_parameter_is_covered_once(make: Any) -> None:
    parts = {"embed": nn.Embedding(5, 4), "body": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
    frozen = nn.Linear(4, 4).requires_grad_(False)
    optimizers = make()(nn.ModuleDict({**parts, "frozen": frozen}))
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    covered = [id(parameter) for group in groups for parameter in group["params"]]
    wanted = [id(parameter) for part in parts.values() for parameter in part.parameters()]
    assert sorted(covered) == sorted(wanted)
    for group in groups:
        matrices = all(parameter.ndim >= 2 for parameter in group["params"])
        assert (group["weight_decay"] > 0) == matrices


def test_muon_takes_the_matrices_that_are_not_excluded() -> None:
    names = ("embed", "body", "lm_head")
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in names})
    for inner, taken in [
        (InnerMuon(), ["body"]),
        (InnerMuon(exclude=("body", "embed")), ["lm_head"]),
        (InnerMuon(exclude=()), ["embed", "body", "lm_head"]),
    ]:
        (group,) = inner(model)[0].param_groups
        assert list(map(id, group["params"])) == [id(model[name].weight) for name in taken]


def test_the_settings_reach_torch() -> None:
    model = nn.Linear(3, 3)
    (sgd,) = InnerSGD(lr=0.1, momentum=0.7)(model)
    assert (sgd.param_groups[0]["lr"], sgd.param_groups[0]["momentum"]) == (0.1, 0.7)
    (adamw,) = InnerAdamW(lr=0.2, betas=(0.5, 0.6))(model)
    assert (adamw.param_groups[0]["lr"], adamw.param_groups[0]["betas"]) == (0.2, (0.5, 0.6))
    muon, rest = InnerMuon(lr=0.3, momentum=0.8, betas=(0.1, 0.2))(model)
    assert (muon.param_groups[0]["lr"], muon.param_groups[0]["momentum"]) == (0.3, 0.8)
    assert (rest.param_groups[0]["lr"], rest.param_groups[0]["betas"]) == (0.3, (0.1, 0.2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: InnerAdamW(lr=0), "^lr must be > 0, got 0"),
        (lambda: InnerSGD(weight_decay=-1), "^weight_decay must be >= 0, got -1"),
        (lambda: InnerSGD(momentum=1.0), r"^momentum must be in \[0, 1\), got 1.0"),
        (lambda: InnerMuon(momentum=-0.1), r"^momentum must be in \[0, 1\), got -0.1"),
        (lambda: InnerAdamW(betas=(0.9, 1.0)), r"^betas must be two .* got \(0.9, 1.0\)"),
        (lambda: InnerMuon(betas=(-0.5, 0.9)), r"^betas must be two .* got \(-0.5, 0.9\)"),
        (lambda: InnerMuon()(nn.LayerNorm(3)), "hidden matrices, and this one has none; use adamw"),
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
