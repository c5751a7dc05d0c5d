"""The inner optimizers: a step of each by hand, the parameters it covers, and what it refuses."""

import math
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import BertConfig, GPT2Config, LlamaConfig

from adloco import InnerAdamW, InnerMuon, InnerSGD
from adloco.algorithms import muon_step
from adloco.algorithms.muon_step import Muon, orthogonal, step_length
from adloco.algorithms.optimizer_state import complete_state, float_states, load_optimizer
from adloco.distributed.dtensor import gather_shards
from adloco.rules.learning_rate import LearningRate
from tests.problems import make_run

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


def polarised(values: Any) -> Any:
    """Singular values after Muon's five steps."""
    for _ in range(5):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    return values


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
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_many_small_steps_are_not_rounded_away(kind: str, dtype: torch.dtype) -> None:
    """Each is less than half of the way to the next number in bf16. So is the weight decay."""
    inner: Any = InnerAdamW(lr=1e-3) if kind == "adamw" else InnerMuon(lr=1e-3, weight_decay=0.1)
    ends = []
    for each in (torch.float64, dtype):
        model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)).to(each)
        generator = torch.Generator().manual_seed(0)
        start = torch.linspace(0.5, 1.5, 36).view(6, 6).to(dtype)
        with torch.no_grad():
            model[0].weight.copy_(start)
            model[0].bias.fill_(1.0)
        optimizers = inner(model)
        for _ in range(300):
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.grad = (noise + 0.5).to(dtype).to(each)
            for optimizer in optimizers:
                optimizer.step()
        ends.append(model)
    for wanted, found in zip(*(model.parameters() for model in ends), strict=True):
        moved = (wanted.detach() - (start if wanted.ndim == 2 else wanted.round().detach())).abs()
        far = (found.detach().double() - wanted.detach()).abs()
        spacing = torch.finfo(dtype).eps * wanted.detach().abs().clamp(min=1.0)
        assert float(far.mean()) <= 0.04 * float(moved.mean()) + float(spacing.mean())


def test_a_mean_of_squares_that_would_stand_still_in_bf16_is_refused() -> None:
    with pytest.raises(ValueError, match=r"betas \(inner.betas\) must be <= 0.99 .*got"):
        InnerAdamW(betas=(0.9, 0.999))(nn.Linear(2, 2).bfloat16())
    with pytest.raises(ValueError, match=r"momentum \(inner.momentum\) must be <= 0.99 .*got"):
        InnerMuon(momentum=0.995)(nn.Linear(2, 2).bfloat16())
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    for betas in ((0.9, 0.999), (0.995, 0.9)):
        with pytest.raises(ValueError, match="must be <= 0.99"):
            InnerAdamW(betas=betas)(mixed)
    with pytest.raises(ValueError, match="must be <= 0.99"):
        InnerMuon(momentum=0.995)(mixed)
    assert InnerMuon(momentum=0.99, betas=(0.99, 0.99))(mixed)
    with pytest.raises(ValueError, match="inner.optimizer sgd must have parameters of four bytes"):
        InnerSGD()(nn.Linear(2, 2).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adamw_resumes_parameters_in_any_order_of_memory(dtype: torch.dtype) -> None:
    """States are saved row by row; the fused kernel walks through memory."""

    def step(model: nn.ParameterList, optimizer: torch.optim.Optimizer) -> None:
        for index, parameter in enumerate(model):
            seed = torch.Generator().manual_seed(index)
            parameter.grad = torch.empty_like(parameter).copy_(
                torch.randn(parameter.shape, generator=seed)
            )
        optimizer.step()

    last = torch.channels_last
    drawn = [torch.randn(5, 7).t(), torch.randn(2, 3, 4, 4).to(memory_format=last)]
    start = [each.to(dtype) for each in drawn]
    whole, parts = (nn.ParameterList([each.clone() for each in start]) for _ in range(2))
    assert not whole[0].is_contiguous()
    (undisturbed,), (before,) = InnerAdamW(lr=LR)(whole), InnerAdamW(lr=LR)(parts)
    for model, optimizer in ((whole, undisturbed), (parts, before)):
        step(model, optimizer)
    (after,) = InnerAdamW(lr=LR)(parts)
    load_optimizer(after, gather_shards(before.state_dict()))
    for model, optimizer in ((whole, undisturbed), (parts, after)):
        step(model, optimizer)
    assert all(one.equal(other) for one, other in zip(whole, parts, strict=True))


def test_adamw_refuses_gaps_in_memory() -> None:
    """torch's fused kernel steps such a parameter as if it had none."""
    with pytest.raises(ValueError, match=r"shape \(6, 3\) has gaps in memory.*\.contiguous\(\)"):
        InnerAdamW()(nn.ParameterList([torch.randn(6, 8)[:, :3]]))


def test_a_step_of_sgd() -> None:
    model = layer(torch.float32, 9)
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
    value = polarised(1 / math.sqrt(size))
    # match_rms_adamw: the step is 0.2 sqrt(the larger side) times the learning rate.
    length = LR * 0.2 * math.sqrt(size) * value
    weight = numbers(model.weight) * (1 - LR * DECAY) - length * np.eye(size)
    bias = adamw_by_hand(numbers(model.bias), numbers(model.bias.grad), 0.0)
    # Orthogonalised in bfloat16, whatever the type of the parameters, unless it is emulated.
    inner, computed_in = InnerMuon(lr=LR, weight_decay=DECAY), torch.bfloat16 if native else None
    step_is(inner, model, weight, bias, computed_in=computed_in)


def moved_by_muon(
    shapes: Sequence[tuple[int, int]], inner: Any, *, native: bool
) -> list[torch.Tensor]:
    """How far three steps of a Muon move matrices, with gradients that are drawn with a seed."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(columns, rows, bias=False) for rows, columns in shapes)
    starts = [layer.weight.detach().clone() for layer in layers]
    with patch.object(muon_step, "native_bf16", lambda device: native):
        (muon,) = inner(layers)
        for _ in range(3):
            for layer in layers:
                layer.weight.grad = torch.randn_like(layer.weight)
            muon.step()
    return [layer.weight.detach() - start for layer, start in zip(layers, starts, strict=True)]


def torch_muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    settings: Any = {"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9}
    return [torch.optim.Muon(model.parameters(), **settings, adjust_lr_fn="match_rms_adamw")]


def test_muon_is_that_of_torch() -> None:
    """To the rounding of bf16 where both compute in it, and near it in float32. Matrices of one
    shape are orthogonalised together.
    """
    shapes, inner = [(24, 40), (40, 24), (16, 16), (24, 40)], InnerMuon(lr=0.1, weight_decay=0.1)
    theirs = moved_by_muon(shapes, torch_muon, native=True)
    for native, tolerance in ((True, 0.004), (False, 0.02)):
        for mine, other in zip(moved_by_muon(shapes, inner, native=native), theirs, strict=True):
            assert float((mine - other).norm() / other.norm()) < tolerance


@pytest.mark.parametrize("momentum", [0.9, 0.99, 0.0])
def test_muon_mixes_momentum_and_gradient(momentum: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps by the formula, u <- m u + (1 - m) g and a step by (1 - m) g + m u."""
    monkeypatch.setattr(muon_step, "native_bf16", lambda device: False)
    rng = np.random.default_rng(0)
    gradients = rng.normal(size=(3, 8, 12))
    layer = nn.Linear(12, 8, bias=False)
    wanted, slow = numbers(layer.weight).copy(), np.zeros((8, 12))
    (muon,) = InnerMuon(lr=LR, weight_decay=0, momentum=momentum)(layer)
    for gradient in gradients:
        layer.weight.grad = torch.tensor(gradient, dtype=torch.float32)
        muon.step()
        slow = momentum * slow + (1 - momentum) * gradient
        mixed = (1 - momentum) * gradient + momentum * slow
        left, values, right = np.linalg.svd(mixed, full_matrices=False)
        values = values / np.linalg.norm(values)
        wanted_values = polarised(values)
        wanted = wanted - LR * 0.2 * math.sqrt(12) * (left * wanted_values @ right)
    np.testing.assert_allclose(numbers(layer.weight), wanted, rtol=1e-4, atol=1e-6)


def test_singular_values() -> None:
    """They are those of the polynomial, and so in the range that is promised."""
    promised = polarised(torch.logspace(-2, 0, 10_000, dtype=torch.float64))
    assert float(promised.min()) > 0.68 and float(promised.max()) < 1.14
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(2, 20, 12, generator=generator, dtype=torch.float64)
    left, right = torch.linalg.qr(drawn)[0], torch.linalg.qr(drawn[:, :12])[0]
    logarithmic = torch.logspace(-2, 0, 12, dtype=torch.float64)
    given = torch.stack([logarithmic, torch.ones_like(logarithmic)])
    stack = left @ (given[:, :, None] * right)
    wanted = polarised(given / given.norm(dim=1, keepdim=True)).sort(descending=True).values
    for matrices in (stack, stack.mT):
        found = muon_step.orthogonal(matrices)
        torch.testing.assert_close(torch.linalg.svdvals(found), wanted)


@pytest.mark.parametrize("transposed", [False, True])
def test_muon_splits_stacked_matrices(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks along the longer side move as matrices of their own, however they are stacked, and in
    a stack of more matrices than they have rows.

    In float32 on every machine: the lengths of blocks are rounded in the type that is computed in.
    """
    monkeypatch.setattr(muon_step, "native_bf16", lambda device: False)

    def blocks(matrix: torch.Tensor) -> list[torch.Tensor]:
        return list((matrix.mT if transposed else matrix).split([8, 4, 4]))

    torch.manual_seed(0)
    stacked = torch.randn(3, 16, 8)
    shapes = [(8, 8), (4, 8), (4, 8)]
    apart = nn.ModuleList(nn.Linear(columns, rows, bias=False) for rows, columns in shapes)
    whole = nn.ModuleList(
        nn.Linear(*((16, 8) if transposed else (8, 16)), bias=False) for _ in range(20)
    )
    for layer, part in zip(apart, stacked[0].split([8, 4, 4]), strict=True):
        layer.weight.data.copy_(part)
    for layer in whole:
        layer.weight.data.copy_(stacked[0].mT if transposed else stacked[0])
    (one,) = InnerMuon(lr=0.1)(apart)
    (other,) = InnerMuon(lr=0.1, split={"weight": [8, 4, 4]})(whole)
    for gradient in stacked[1:]:
        for layer, part in zip(apart, gradient.split([8, 4, 4]), strict=True):
            layer.weight.grad = part.clone()
        for layer in whole:
            layer.weight.grad = (gradient.mT if transposed else gradient).clone()
        one.step()
        other.step()
    for mine in whole:
        for layer, part in zip(apart, blocks(mine.weight), strict=True):
            torch.testing.assert_close(layer.weight, part)


def test_blocks_of_a_square_matrix_are_rows() -> None:
    """As a joint layer of keys and values has them, if these are half as wide as the model."""
    assert muon_step.blocks_of((4, 4), [1, 3]) == [
        (slice(0, 1), slice(None)),
        (slice(1, 4), slice(None)),
    ]


def test_muon_leaves_alone_what_has_no_gradient() -> None:
    """Zeros, none in a group whose other matrices have one, and none in a whole group."""
    layers = nn.ModuleList(nn.Linear(3, 4, bias=False) for _ in range(4))
    (muon,) = InnerMuon(lr=0.1, split={"3": 2})(layers)
    starts = [layer.weight.detach().clone() for layer in layers]
    muon.step()
    layers[0].weight.grad, layers[1].weight.grad = torch.ones(4, 3), torch.zeros(4, 3)
    assert muon.step(torch.is_grad_enabled), "a closure computes gradients"
    same = [layer.weight.equal(start) for layer, start in zip(layers, starts, strict=True)]
    assert same == [False, True, True, True]


@pytest.mark.parametrize("make", [InnerAdamW, InnerSGD, InnerMuon])
def test_every_trainable_parameter_is_covered_once(make: Any) -> None:
    parts = {"embed": nn.Embedding(5, 4), "body": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}
    frozen = nn.Linear(4, 4).requires_grad_(False)
    optimizers = make(weight_decay=0.1)(nn.ModuleDict({**parts, "frozen": frozen}))
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
    model["convolution"] = nn.Conv1d(4, 4, 2)
    for inner, taken in [
        (InnerMuon(), ["body"]),
        (InnerMuon(exclude=("body", "embed")), ["lm_head"]),
        (InnerMuon(exclude=()), ["embed", "body", "lm_head"]),
    ]:
        (group,) = inner(model)[0].param_groups
        assert list(map(id, group["params"])) == [id(model[name].weight) for name in taken]


@pytest.mark.parametrize(
    ("head", "taken"), [(nn.Linear(4, 4, bias=False), 1), (nn.Identity(), 2), (None, 2)]
)
@pytest.mark.parametrize("wrap", [lambda model: model, nn.Sequential], ids=["bare", "wrapped"])
def test_muon_leaves_alone_the_output_layer_that_a_model_names(
    head: Any, taken: int, wrap: Any
) -> None:
    """Also in DistributedDataParallel and in modules of one's own, which have no such method."""

    class Named(nn.Sequential):
        def get_output_embeddings(self) -> Any:
            return head

    last = head if taken == 1 else nn.Linear(4, 4, bias=False)
    (group,) = InnerMuon()(wrap(Named(nn.Linear(4, 4, bias=False), last)))[0].param_groups
    assert len(group["params"]) == taken


def test_the_settings_reach_torch() -> None:
    model = nn.Linear(3, 3)
    (sgd,) = InnerSGD(lr=0.1, momentum=0.7)(model)
    assert (sgd.param_groups[0]["lr"], sgd.param_groups[0]["momentum"]) == (0.1, 0.7)
    (adamw,) = InnerAdamW(lr=0.2, betas=(0.0, 0.6))(model)
    assert (adamw.param_groups[0]["lr"], adamw.param_groups[0]["betas"]) == (0.2, (0.0, 0.6))
    assert adamw.param_groups[0]["fused"]
    (alone,) = InnerAdamW()(nn.Linear(3, 3, bias=False))
    assert len(alone.param_groups) == 1, "without vectors there is no group of them"
    muon, rest = InnerMuon(lr=0.3, momentum=0.8, betas=(0.1, 0.2))(model)
    assert (muon.param_groups[0]["lr"], muon.param_groups[0]["momentum"]) == (0.3, 0.8)
    assert (rest.param_groups[0]["lr"], rest.param_groups[0]["betas"]) == (0.3, (0.1, 0.2))
    muon, rest = InnerMuon(lr=0.3, adamw_ratio=2.5)(model)
    assert (muon.param_groups[0]["lr"], rest.param_groups[0]["lr"]) == (0.3, 0.75)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: InnerAdamW(lr=0), "^lr must be > 0, got 0"),
        (lambda: InnerSGD(weight_decay=-1), "^weight_decay must be >= 0, got -1"),
        (lambda: InnerSGD(momentum=1.0), r"^momentum must be in \[0, 1\), got 1.0"),
        (lambda: InnerMuon(momentum=-0.1), r"^momentum must be in \[0, 1\), got -0.1"),
        (lambda: InnerMuon(adamw_ratio=0), "^adamw_ratio must be > 0, got 0"),
        (lambda: InnerAdamW(betas=(0.9, 1.0)), r"^betas must be two .* got \[0.9, 1.0\]"),
        (lambda: InnerAdamW(betas=(0.9,)), r"^betas must be two .* got \[0.9\]"),  # type: ignore[arg-type]
        (lambda: InnerMuon(betas=(-0.5, 0.9)), r"^betas must be two .* got \[-0.5, 0.9\]"),
        (lambda: InnerMuon(split={"qkv": 0}), r"^split must have a number .*, got qkv = 0"),
        (lambda: InnerMuon(split={"qkv": []}), r"^split must have a number .*, got qkv = \[\]"),
        (lambda: InnerMuon(split={"qkv": "3"}), r"^split must have a number .*, got qkv = '3'"),
        (
            lambda: InnerMuon(split={"qkv": 3})(nn.Linear(4, 4)),
            "^inner.split names 'qkv', which is in the name of no hidden matrix",
        ),
        (
            lambda: InnerMuon(split={"weight": 3})(nn.Linear(4, 4)),
            "^inner.split of weight must give blocks of 4 in all, got weight = 3",
        ),
        (
            lambda: InnerMuon(split={"weight": 10**15})(nn.Linear(4, 4)),
            "^inner.split of weight must give blocks of 4 in all, got weight = 1000",
        ),
        (
            lambda: InnerMuon(split={"weight": [1, 2]})(nn.Linear(4, 4)),
            r"^inner.split of weight must give blocks of 4 in all, got weight = \[1, 2\]",
        ),
        (lambda: InnerMuon()(nn.LayerNorm(3)), "hidden matrices, and this one has none; use adamw"),
        (
            lambda: InnerMuon()(nn.ParameterList([torch.empty(0, 3)])),
            "hidden matrices, and this one has none; use adamw",
        ),
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("own", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("computed", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_muon_rounds_a_step_once(
    own: torch.dtype, computed: torch.dtype, as_tensor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it computes in; with a learning rate in a tensor, too, as in a captured update."""
    monkeypatch.setattr(muon_step, "native_bf16", lambda device: computed == torch.bfloat16)
    computed = computed if computed == torch.bfloat16 else torch.promote_types(own, computed)
    generator = torch.Generator().manual_seed(1)
    matrix, gradient = (torch.randn(6, 9, generator=generator).to(own) for _ in range(2))
    momentum = torch.zeros_like(matrix).lerp(gradient, 1 - 0.9)
    given = gradient.lerp(momentum, 0.9).to(computed)
    direction = orthogonal(given[None])[0].double()
    lr = float(torch.tensor(0.02))
    wide = torch.promote_types(own, torch.float32)
    decayed = (matrix.to(wide) * (1 - lr * 0.1)).double()
    expected = (decayed - lr * step_length((6, 9)) * direction).to(wide).to(own)

    parameter = nn.Parameter(matrix.clone())
    parameter.grad = gradient
    muon = Muon([parameter], lr=lr, weight_decay=0.1, momentum=0.9)
    if as_tensor:
        muon.param_groups[0]["lr"] = torch.tensor(lr)
    muon.step()
    spacing = torch.finfo(own).eps if own == torch.bfloat16 else 1e-6
    far = ((parameter.detach().double() - expected.double()).abs() / expected.abs().double()).max()
    # One rounding may fall to the other side of a tie.
    assert (parameter.detach() == expected).double().mean() > 0.9 or own != torch.bfloat16
    assert far <= spacing


@pytest.mark.parametrize(
    ("config", "head", "taken"),
    [
        (GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=8, eos_token_id=0), "CausalLM", []),
        (
            BertConfig(num_hidden_layers=1, num_attention_heads=1, hidden_size=4, vocab_size=8),
            "SequenceClassification",
            ["bert.pooler.dense.weight"],
        ),
        (LlamaConfig(num_hidden_layers=1, num_attention_heads=1, hidden_size=4), "CausalLM", []),
    ],
    ids=["gpt2", "bert", "llama"],
)
def test_muon_takes_no_embedding_and_no_head_of_other_names(
    config: Any, head: str, taken: list[str]
) -> None:
    """GPT-2's are wte, which is its output layer too, and wpe."""
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    (group,) = InnerMuon()(model)[0].param_groups
    found = {id(parameter) for parameter in group["params"]}
    names = [name for name, each in model.named_parameters() if id(each) in found]
    layers = ("attn", "attention", "mlp", "intermediate", ".output")
    assert any(part in name for name in names for part in layers)
    assert [name for name in names if not any(part in name for part in layers)] == taken


def test_an_optimizer_that_counts_in_its_groups_goes_on_counting() -> None:
    """It has no state of parameters, so all that is saved stands in the groups."""

    class Slower(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.param_groups[0]["steps"] = 0

        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["steps"] += 1

    before, now = (Slower([nn.Parameter(torch.ones(2))]) for _ in range(2))
    before.step()
    load_optimizer(now, before.state_dict())
    assert now.param_groups[0]["steps"] == 1


def test_an_own_optimizer_goes_on_with_its_rate_and_the_types_of_its_state() -> None:
    """torch gives state the type of its parameter, in which a count beyond 2^24 is another."""

    class Own(torch.optim.SGD):
        pass

    own: dict[str, Any] = {
        "exact": torch.tensor([1 / 3, 0.0], dtype=torch.float64),
        "count": torch.tensor(2**24 + 1),
        "list": [torch.ones(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.uint8)],
        "number": 3,
    }
    parameter = nn.Parameter(torch.ones(2))
    before, now = (Own([parameter], lr=rate) for rate in (0.1, 0.2))
    before.state[parameter] = own
    before.state["all"] = {"steps": 3, "exact": torch.ones(1)}
    load_optimizer(now, before.state_dict())
    assert now.param_groups[0]["lr"] == 0.1
    assert now.state["all"].keys() == {"steps", "exact"}
    assert [name for _, name, _ in float_states(now)] == ["exact", "list"]
    complete_state(now)
    state = now.state[parameter]
    for name in ("exact", "count"):
        assert state[name].dtype == own[name].dtype
        assert state[name].equal(own[name])
    assert [each.dtype for each in state["list"]] == [torch.bfloat16, torch.uint8]
    state["exact"].zero_()
    assert own["exact"].any(), "what is loaded is a copy"


def test_a_state_that_a_scheduler_changed_keeps_its_rate() -> None:
    """Also one from a version of torch in which a group had fewer settings."""
    parameter = nn.Parameter(torch.ones(2))
    before, now = (torch.optim.SGD([parameter], lr=rate, momentum=0.9) for rate in (0.1, 0.2))
    scheduler = torch.optim.lr_scheduler.StepLR(before, step_size=1, gamma=0.5)
    parameter.grad = torch.ones(2)
    before.step()
    scheduler.step()
    saved = before.state_dict()
    del saved["param_groups"][0]["maximize"]
    load_optimizer(now, saved)
    assert now.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize(
    ("build", "completed"), [(torch.optim.Adam, True), (torch.optim.NAdam, False)]
)
def test_a_state_that_begins_with_zeros_is_completed(build: Any, completed: bool) -> None:
    """NAdam begins with a product of 1. A count of steps has no dimensions, like a parameter."""
    scalar, vector, missing = (nn.Parameter(torch.ones(shape)) for shape in ((), (2,), (3,)))
    scalar.grad, vector.grad = torch.ones(()), torch.ones(2)
    optimizer = build([scalar, vector, missing])
    optimizer.step()
    complete_state(optimizer)
    shapes = {name: tuple(tensor.shape) for name, tensor in optimizer.state[missing].items()}
    wanted = {"step": (), "exp_avg": (3,), "exp_avg_sq": (3,)}
    assert shapes == (wanted if completed else {})
    assert not any(tensor.any() for tensor in optimizer.state[missing].values())


def test_a_state_of_a_tensor_class_of_its_own_is_refused() -> None:
    """torchao's 8-bit AdamW has such ones, which torch's functions for many tensors refuse."""

    class Quantised(torch.Tensor):
        pass

    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter] = {"mean": torch.zeros(2).as_subclass(Quantised)}
    with pytest.raises(ValueError, match="state mean of SGD is of the class Quantised, which"):
        float_states(optimizer)


def test_an_optimizer_with_a_scheduler_of_torch_needs_no_closure() -> None:
    """The scheduler puts a function in the place of `step`, whose signature has `self`."""

    def scheduled(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return optimizer

    run, plain = make_run(inner=scheduled), make_run()
    assert run.round() == plain.round()


def test_a_wrapper_without_the_state_of_an_optimizer_is_refused() -> None:
    """Lookahead of the package pytorch_optimizer has such a state, of two parts."""

    class Wrapper(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"base_optimizer": super().state_dict()}

    run = make_run(inner=lambda model: Wrapper(model.parameters()))
    run.round()
    with pytest.raises(ValueError, match=r"state_dict\(\) of Wrapper lacks the state and param_"):
        run.state_dict()


def test_moments_take_the_type_of_another_model_and_counts_keep_theirs() -> None:
    whole, short = (nn.Parameter(torch.ones(2, dtype=each)) for each in (None, torch.bfloat16))
    before, now = torch.optim.NAdam([whole]), torch.optim.NAdam([short])
    for parameter, optimizer in ((whole, before), (short, now)):
        parameter.grad = torch.ones_like(parameter)
        load_optimizer(now, before.state_dict())
        optimizer.step()
    assert now.state[short]["exp_avg"].dtype == torch.bfloat16
    assert now.state[short]["mu_product"].dtype == torch.float32


def test_settings_that_decide_the_state_stay_those_of_the_state() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    before = torch.optim.Adam([parameter], lr=0.1)
    before.step()
    now = torch.optim.Adam([parameter], lr=0.2, weight_decay=0.3, amsgrad=True)
    load_optimizer(now, before.state_dict())
    now.step()
    group = now.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["amsgrad"]) == (0.2, 0.3, False)
    # RMSprop has a buffer only with momentum; SGD's can change, and is a setting.
    for build, kept in ((torch.optim.RMSprop, 0.9), (torch.optim.SGD, 0.5)):
        old, new = (build([parameter], lr=0.1, momentum=momentum) for momentum in (0.9, 0.5))
        old.step()
        load_optimizer(new, old.state_dict())
        assert new.param_groups[0]["momentum"] == kept


def test_a_state_of_another_optimizer_is_refused() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    parameters[0].grad = torch.ones(2)
    before = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    before.step()
    with pytest.raises(ValueError, match=r"with dampening, momentum, nesterov, which Adam has not"):
        load_optimizer(torch.optim.Adam(parameters), before.state_dict())


def test_a_state_of_an_optimizer_that_takes_other_parameters_is_refused() -> None:
    """As that of a run whose Muon took embeddings."""
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("embed", "body")})
    (before, _), (now, _) = InnerMuon(exclude=("other", "body"))(model), InnerMuon()(model)
    both = InnerMuon(exclude=())(model)[0]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    both.step()
    before.step()
    load_optimizer(now, before.state_dict())
    with pytest.raises(ValueError, match=r"groups of \[1\] parameters here and had \[2\] when"):
        load_optimizer(now, both.state_dict())


def test_adamw_counts_each_step_of_short_parameters_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a parameter is cut into slices of several batches."""
    monkeypatch.setattr("adloco.algorithms.short_types.SLICE", 4)
    parameter, spare = (nn.Parameter(torch.ones(10, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = InnerAdamW().build([parameter, spare])
    for _ in range(3):
        parameter.grad = torch.ones_like(parameter)
        assert optimizer.step(torch.is_grad_enabled), "a closure computes gradients"
    assert optimizer.state[parameter]["step"] == 3
    assert spare.eq(1).all() and spare not in optimizer.state, "it had no gradient"


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex64))


class Quantised(nn.Parameter):
    """Shows the integers that it is made of, by torch's protocol for such tensors."""

    codes = torch.ones(3, dtype=torch.int8)

    def __tensor_flatten__(self) -> Any:
        return ["codes"], None


class InIntegers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Quantised(torch.ones(3))


class InOneMemory(nn.Module):
    """Two layers that are tied by their data alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight.data = self.first.weight.data


class Repeating(nn.Module):
    def __init__(self, times: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("scale", torch.ones(1).expand(times))


class SparseGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 1, sparse=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.embedding(inputs[:, 0].long().clamp(0, 8))
        return result


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"inner": lambda model: torch.optim.Optimizer(model.parameters(), {})},
            "inner gives Optimizer, whose groups have no learning rate lr",
        ),
        (
            {"inner": lambda model: torch.optim.LBFGS(model.parameters())},
            r"inner gives LBFGS, whose step\(\) needs a closure",
        ),
        ({"build_model": Complex}, "parameter phase is complex, and syncs send real numbers"),
        ({"build_model": InIntegers}, r"parameter weight is quantised \(Quantised\), and syncs"),
        ({"build_model": InOneMemory}, r"first.weight and second.weight are two in one memory"),
        (
            {"build_model": lambda: nn.ModuleList([Repeating(3), Repeating(1)])},
            "scale of a Repeating repeats values in memory",
        ),
        ({"build_model": SparseGradients, "max_grad_norm": 1.0}, "a parameter has a sparse grad"),
        ({"loss_fn": lambda model, batch: model(batch[0])}, r"got a tensor of shape \[4, 1\]"),
        ({"loss_fn": lambda model, batch: model(batch[0]).mean().item()}, "output; got float"),
        ({"loss_fn": lambda model, batch: batch[0].mean()}, r"got a tensor of shape \[\]"),
    ],
)
def test_what_cannot_train_is_refused_in_one_sentence(changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_run(**{"inner": InnerSGD(lr=0.1)} | changes).round()


def test_a_rate_that_is_a_tensor_is_the_number_in_it() -> None:
    def run(rate: Any) -> Any:
        made = make_run(
            inner=lambda model: torch.optim.Adam(model.parameters(), lr=rate),
            learning_rate=LearningRate(shape="cosine", total_tokens=96),
        )
        return [made.round() for _ in range(2)][-1].train_loss

    assert run(torch.tensor(0.125)) == run(0.125)
