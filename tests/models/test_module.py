"""A plain module of the user's own, by the dotted path of its factory."""

from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from adloco.models.fixed_values import changed_fixed
from adloco.models.module import Logits, ModuleBuilder
from adloco.models.source import Head, ModelOptions, num_bytes
from adloco.models.sources.plain_module import ModuleConfig, PlainModule


class Twice(nn.Module):
    """A model whose logits are twice the one-hot vectors of its input."""

    def __init__(self, vocab_size: int, wrapped: bool = False, lost: int = 0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.sizes, self.wrapped = (vocab_size, lost), wrapped

    def forward(self, input_ids: torch.Tensor) -> object:
        logits = 2.0 * nn.functional.one_hot(input_ids, self.sizes[0])[..., self.sizes[1] :]
        return SimpleNamespace(logits=logits) if self.wrapped else logits


class Fixed(Twice):
    """With values that no run saves, drawn from torch or from somewhere else."""

    draws = count(1)

    def __init__(self, vocab_size: int, elsewhere: int) -> None:
        super().__init__(vocab_size)
        own = torch.full((5,), float(next(self.draws))) if elsewhere else torch.randn(5)
        self.frozen = nn.Parameter(own, requires_grad=False)
        self.register_buffer("masked", torch.tensor([torch.nan, 1.0]), persistent=False)


class Positions(Twice):
    """With a table of complex numbers, whose first row is the same for each base."""

    def __init__(self, vocab_size: int, base: int) -> None:
        super().__init__(vocab_size)
        angles = torch.outer(torch.arange(64), torch.tensor(float(base)) ** -torch.arange(8))
        table = torch.polar(torch.ones_like(angles), angles)
        self.table: torch.Tensor
        self.register_buffer("table", table, persistent=False)


def not_a_module(vocab_size: int) -> int:
    return vocab_size


def builder(
    factory: str = "Twice",
    head: Head = "AutoModelForCausalLM",
    dtype: str = "fp32",
    **arguments: int,
) -> ModuleBuilder:
    source = PlainModule(factory=f"{__name__}:{factory}", arguments=arguments)
    options = ModelOptions(dtype=dtype)  # type: ignore[arg-type]
    return ModuleBuilder(config=source.config(5), head=head, options=options, seed=3)


@pytest.mark.parametrize("wrapped", [False, True])
def test_logits_as_they_are_or_of_an_object(wrapped: bool) -> None:
    output = builder(wrapped=wrapped)()(input_ids=torch.tensor([[1, 4]]), use_cache=False)
    assert isinstance(output, Logits)
    assert output.logits.tolist() == [[[0, 2, 0, 0, 0], [0, 0, 0, 0, 2]]]


def test_parameters_follow_from_the_seed_alone() -> None:
    state = torch.get_rng_state()
    first, second = builder()(), builder().whole()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(3)
    expected = torch.randn(3)
    for model in (first, second):
        assert torch.equal(next(model.parameters()), expected)


def test_sizes_and_types() -> None:
    assert (sum(each.numel() for each in builder().parameters), num_bytes(builder())) == (3, 12)
    half = builder(dtype="bf16")
    assert (num_bytes(half), next(half().parameters()).dtype) == (6, torch.bfloat16)


def test_the_configuration_is_read_back(tmp_path: Path) -> None:
    builder(lost=1).save_config(tmp_path / "model")
    expected = ModuleConfig(factory=f"{__name__}:Twice", arguments={"lost": 1}, vocab_size=5)
    assert ModuleBuilder.load_config(tmp_path / "model") == expected


def test_values_that_no_run_saves_are_built_again_alike(tmp_path: Path) -> None:
    for elsewhere in (0, 1):
        folder, build = tmp_path / str(elsewhere) / "model", builder("Fixed", elsewhere=elsewhere)
        build.save_config(folder)
        said = changed_fixed(build, folder)
        assert ("module.frozen of the model is another one than when" in said) == bool(elsewhere)
    builder("Twice").save_config(tmp_path / "none")
    assert not changed_fixed(not_a_module, tmp_path / "none")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_complex_numbers_stay_as_they_are(dtype: str) -> None:
    built = builder("Positions", dtype=dtype, base=3)()
    assert dict(built.named_buffers())["module.table"].equal(Positions(5, base=3).table)


def test_a_table_is_compared_beyond_its_first_row(tmp_path: Path) -> None:
    builder("Positions", base=3).save_config(tmp_path)
    for base in (3, 2):
        said = changed_fixed(builder("Positions", base=base), tmp_path)
        assert ("module.table of the model is another one" in said) == (base == 2)


def test_refusals() -> None:
    ids = torch.tensor([[1, 4]])
    with pytest.raises(ValueError, match=r"of shape \(1, 2, 5\) .*, got \(1, 2, 4\)"):
        builder(lost=1)()(ids)
    with pytest.raises(ValueError, match=r"must return a torch.nn.Module, got int"):
        builder("not_a_module")()
    with pytest.raises(ValueError, match=r"^model.factory .* failed when .*'depth': 2.*TypeError"):
        builder(depth=2)()
    with pytest.raises(ValueError, match="must be callable, got '"):
        builder("__name__")
    with pytest.raises(ValueError, match="source module is for language models"):
        builder(head="AutoModelForSequenceClassification")
    with pytest.raises(ValueError, match="gradient_checkpointing is for models of transformers"):
        options = ModelOptions(gradient_checkpointing=True)
        ModuleBuilder(config=builder().config, head="AutoModelForCausalLM", options=options, seed=0)
