"""Models by shape and by name: sizes, draws that do not depend on the placement, options, and what
is refused.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.utils import import_utils

from adloco import AdLoCo, BatchGuards, Batching, InnerAdamW, Method, Problem, Syncing, place
from adloco.distributed.dtensor import gather_shards
from adloco.distributed.testing import run_on_ranks
from adloco.models.attention import FULLY_CAUSAL, attends_to_all
from adloco.models.build import ModelBuilder
from adloco.models.source import Head, ModelOptions, entries_of
from adloco.models.sources.llama import LlamaShape
from adloco.models.sources.named_model import NamedModel
from adloco.run.model_flops import flops_per_token
from adloco.tasks.language_model import cross_entropy, next_token_loss
from tests.problems import build_llama, cases, tokens

ROOT = Path(__file__).parents[2]
TINY = LlamaShape(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)


def builder(
    config: Any, head: Head = "AutoModelForCausalLM", weights: str = "", **options: Any
) -> ModelBuilder:
    return ModelBuilder(
        config=config, head=head, options=ModelOptions(**options), seed=3, weights=weights
    )


@pytest.mark.parametrize(
    ("shape", "vocabulary", "parameters"),
    [
        ("nano", 256, 869_504),
        ("microllama", 256, 304_636_928),
        ("tinyllama", 256, 1_100_048_384),
        ("openllama-3b", 256, 3_426_473_600),
    ],
)
def test_parameter_counts(shape: Any, vocabulary: int, parameters: int) -> None:
    built = builder(LlamaShape(shape=shape).config(vocabulary))
    assert sum(each.numel() for each in built.parameters) == parameters


def test_sizes_replace_those_of_the_shape() -> None:
    config = LlamaShape(shape="microllama", num_layers=2, num_heads=2, hidden_size=64).config(256)
    assert (
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.hidden_size,
    ) == (2, 2, 2, 64)
    assert (config.intermediate_size, config.vocab_size, config.rms_norm_eps) == (
        5632,
        32_000,
        1e-5,
    )


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("bert", "AutoModelForSequenceClassification"),
        ("gpt2", "AutoModelForCausalLM"),
        ("llama", None),
    ],
)
def test_drawn_weights_have_the_moments_of_the_library_s(name: str, head: Any) -> None:
    """Filled part by part: every tensor has the mean and deviation that transformers itself gives
    it, and fixed values are equal.
    """
    import transformers

    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "vocab_size": 300,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    head = head or "AutoModelForCausalLM"
    config = NamedModel(name=name, pretrained=False, overrides=sizes).config(300)
    torch.manual_seed(0)
    theirs = getattr(transformers, head).from_config(config)
    ours = builder(config, head).whole()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for key, tensor in theirs.state_dict().items():
        mine = ours.state_dict()[key].float()
        assert float(mine.mean()) == pytest.approx(float(tensor.float().mean()), abs=0.005), key
        assert (
            float(mine.std()) == pytest.approx(float(tensor.float().std()), rel=0.1, abs=1e-6)
            or mine.numel() < 200
        ), key
    for (key, tensor), (_, mine) in zip(theirs.named_buffers(), ours.named_buffers(), strict=True):
        assert tensor.equal(mine), key


def test_a_sliding_window_of_zero_is_none() -> None:
    """transformers would hide all tokens; TOML has no null with which to switch a window off."""
    config = NamedModel(name="mistral", pretrained=False, overrides={"sliding_window": 0})
    assert config.config(300).sliding_window is None


@pytest.mark.skipif("gemma4_text" not in CONFIG_MAPPING, reason="transformers is older")
def test_layers_whose_heads_differ_in_width() -> None:
    """transformers raises an error where their width is asked for."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 300,
    }
    config = NamedModel(name="gemma4_text", pretrained=False, overrides=sizes).config(300)
    assert entries_of(config)["head_dim"] == 16
    assert flops_per_token(builder(config).whole(), 16) is None


def test_a_body_draws_what_only_it_has() -> None:
    """An xlstm's `_init_weights` reads the embeddings of the body, which its head has not."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_heads": 2}
    drawn = builder(NamedModel(name="xlstm", pretrained=False, overrides=sizes).config(256)).whole()
    assert 0.1 < drawn.backbone.embeddings.weight.detach().std() < 0.13  # sqrt(2 / (5 x 32)).


def test_no_token_of_another_tokenizer_is_padding_from_scratch(tmp_path: Path) -> None:
    """A language model has no padding, and the row of a padding token would stay zero."""
    assert NamedModel(name="olmo", pretrained=False).config(300).pad_token_id is None
    own = NamedModel(name="olmo", pretrained=False, overrides={"pad_token_id": 7}).config(300)
    assert own.pad_token_id == 7
    own.save_pretrained(tmp_path)
    assert NamedModel(name=str(tmp_path), pretrained=False).config(300).pad_token_id is None
    assert NamedModel(name=str(tmp_path), pretrained=True).config(300).pad_token_id == 7


@pytest.mark.parametrize("name", sorted({"xlm", "nomic_bert"} & {*CONFIG_MAPPING}))
def test_types_that_need_a_padding_token_have_one(name: str) -> None:
    """Not all are in each version of transformers."""
    assert NamedModel(name=name, pretrained=False).config(300).pad_token_id is not None


def test_draws_depend_on_the_seed_and_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, second = build_llama(TINY, 16, 3), build_llama(TINY, 16, 3)
    assert torch.get_rng_state().equal(before)
    assert all(a.equal(b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not any(
        a.equal(b)
        for a, b in zip(first.parameters(), build_llama(TINY, 16, 4).parameters(), strict=True)
        if a.std() > 0
    )


def test_tied_weights_stay_tied() -> None:
    model: Any = build_llama(
        LlamaShape(
            hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64, tie_embeddings=True
        ),
        16,
        0,
    )
    assert model.lm_head.weight is model.model.embed_tokens.weight


def on_ranks(shards: int, replicas: int) -> list[Tensor]:
    """Parameters of both workers at the start, and of the first after a round; the model is built
    without memory and filled where it lives.
    """
    built = builder(TINY.config(16))
    run = AdLoCo(
        Problem(
            build_model=built,
            fill=built.fill,
            loss_fn=next_token_loss,
            data=tokens(200, 2, vocabulary=16),
        ),
        Method(sync_every=2, workers_per_trainer=2),
        inner=InnerAdamW(),
        syncing=Syncing(outer=None),
        batching=Batching(guards=BatchGuards(initial=8)),
        placement=place(2, torch.device("cpu"), 1, shards, replicas),
    )
    start = [
        parameter.detach().clone()
        for parameter in gather_shards(list(next(iter(run.workers.values())).replica.params))
    ]
    assert all(torch.isfinite(parameter).all() for parameter in start)
    run.round()
    return [
        *start,
        *(
            parameter.detach().clone()
            for parameter in gather_shards(list(next(iter(run.workers.values())).replica.params))
        ),
    ]


@pytest.mark.parametrize(
    ("ranks", "shards", "replicas"),
    cases(
        {"2 ranks": (2, 1, 1), "shards": (2, 2, 1), "replicas": (2, 1, 2), "HSDP": (4, 2, 2)},
        default=("2 ranks",),
    ),
)
def test_filled_models_are_the_same_on_every_placement(
    ranks: int, shards: int, replicas: int
) -> None:
    expected = on_ranks(1, 1)
    for mine, theirs in zip(
        expected, run_on_ranks(on_ranks, ranks, shards, replicas)[0], strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    half = len(expected) // 2
    for mine, theirs in zip(expected[:half], build_llama(TINY, 16, 3).parameters(), strict=True):
        assert mine.equal(theirs)


def peak_of_a_rank(shards: int) -> tuple[int, int]:
    """(most elements alive at once while the model is filled, elements of the model)."""
    built = builder(
        LlamaShape(hidden_size=32, num_layers=8, num_heads=2, intermediate_size=64).config(16)
    )
    most = 0

    def fill(model: nn.Module, part: nn.Module) -> None:
        nonlocal most
        built.fill(model, part)
        most = max(
            most,
            sum(
                parameter.to_local().numel()
                if hasattr(parameter, "to_local")
                else parameter.numel()
                for parameter in model.parameters()
                if not parameter.is_meta
            ),
        )

    run = AdLoCo(
        Problem(
            build_model=built,
            fill=fill,
            loss_fn=next_token_loss,
            data=tokens(200, 1, vocabulary=16),
        ),
        Method(num_trainers=1, workers_per_trainer=1, sync_every=2),
        inner=InnerAdamW(),
        syncing=Syncing(outer=None),
        batching=Batching(guards=BatchGuards(initial=8)),
        placement=place(1, torch.device("cpu"), 1, shards, 1),
    )
    return most, run.num_parameters


@pytest.mark.nightly
def test_no_rank_ever_holds_the_whole_of_a_sharded_model() -> None:
    for most, elements in run_on_ranks(peak_of_a_rank, 4, 4):
        assert most < 0.45 * elements  # A quarter, and one of eight blocks whole.


class Asked(TorchDispatchMode):
    """What a computation reads back on the host, and the masks that its attention is given."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.masks, self.attentions = 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += "_local_scalar_dense" in str(func)
        if "scaled_dot_product" in str(func):
            self.attentions += 1
            given = [*args[3:], *(kwargs or {}).values()]
            self.masks += any(isinstance(each, Tensor) for each in given)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_a_llama_s_pass_reads_nothing_back_and_has_no_mask(
    captured: bool, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would ask the GPU whether a sample has several texts, and build a mask where it
    is captured; the numbers are those of its own attention, which the model has otherwise.
    """
    model = builder(replace(TINY, num_kv_heads=kv_heads).config(256)).whole()
    ids = torch.arange(4 * 17).reshape(4, 17)
    expected = cross_entropy(model(input_ids=ids[:, :-1], use_cache=False).logits, ids[:, 1:])
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: captured)
    with Asked() as asked:
        assert torch.equal(next_token_loss(model, ids), expected)
    assert (asked.reads, asked.masks, asked.attentions) == (0, 0, 2)
    with Asked() as asked:
        model(input_ids=ids, use_cache=False)
    assert (asked.reads > 0, asked.masks > 0) == (not captured, captured), "nothing needs doing"


SIZES_OF_LIBRARY = {
    **dict.fromkeys(("hidden_size", "n_embd"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_attention_heads", "n_head"), 2),
    **dict.fromkeys(("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    "num_key_value_heads": 1,
    "intermediate_size": 64,
    "head_dim": 16,
    "sliding_window": None,
    "pad_token_id": None,
}


@pytest.mark.parametrize("family", FULLY_CAUSAL)
def test_passes_of_other_families_do_without_a_mask(family: str) -> None:
    """The same numbers, and nothing is read back."""
    assert f"`{family}`" in (ROOT / "docs" / "data-and-models.md").read_text()
    config = AutoConfig.for_model(family, **SIZES_OF_LIBRARY)
    config.vocab_size = 64
    model = builder(config).whole()
    ids = torch.arange(4 * 17).reshape(4, 17).remainder(64)
    expected = cross_entropy(model(input_ids=ids[:, :-1], use_cache=False).logits, ids[:, 1:])
    with Asked() as asked:
        assert torch.equal(next_token_loss(model, ids), expected)
    assert (asked.reads, asked.masks, asked.attentions) == (0, 0, 2)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("mistral", {"sliding_window": 4}), ("gemma3_text", {}), ("gpt_oss", {}), ("bert", {})],
)
def test_masks_that_models_need_are_kept(family: str, changes: dict[str, Any]) -> None:
    assert not attends_to_all(AutoConfig.for_model(family, **changes))


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    ids = tokens(4, 1, vocabulary=16).read(0, 0, 4)
    gradients = []
    for checkpointing in (False, True):
        model: Any = builder(TINY.config(16), gradient_checkpointing=checkpointing).whole().train()
        recomputes = any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
        assert recomputes == checkpointing
        next_token_loss(model, ids).backward()  # type: ignore[no-untyped-call]
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-8) for a, b in zip(*gradients, strict=True))


def test_parameters_in_bf16() -> None:
    assert {
        parameter.dtype for parameter in builder(TINY.config(16), dtype="bf16").whole().parameters()
    } == {torch.bfloat16}


def test_pretrained_weights_come_only_when_asked_for(tmp_path: Path) -> None:
    trained: Any = build_llama(TINY, 16, 9)
    trained.save_pretrained(tmp_path)
    asked = NamedModel(name=str(tmp_path), pretrained=True)
    loaded = builder(asked.config(16), weights=asked.weights).whole()
    assert all(a.equal(b) for a, b in zip(loaded.parameters(), trained.parameters(), strict=True))
    shape = NamedModel(name=str(tmp_path), pretrained=False)
    assert shape.weights == ""
    drawn = builder(shape.config(16)).whole()
    assert not torch.equal(next(drawn.parameters()), next(trained.parameters()))


@pytest.mark.parametrize(
    ("settings", "vocabulary", "message"),
    [
        (
            {"name": "nowhere/nothing", "pretrained": False},
            16,
            "^model.name 'nowhere/nothing' could not be loaded .*allowed are a folder",
        ),
        (
            {"name": "FOLDER", "pretrained": True},
            300,
            "has 16 embeddings, fewer than the 300 ids of the tokenizer; set data.tokenizer",
        ),
        ({"name": "CODE", "pretrained": False}, 16, "^model.name .* could not be loaded"),
    ],
)
def test_refusals(
    settings: dict[str, Any],
    vocabulary: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    build_llama(TINY, 16, 9).save_pretrained(tmp_path / "folder")  # type: ignore[operator]
    (tmp_path / "code").mkdir()
    # Code of its own: never run, whatever it claims.
    about = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}
    (tmp_path / "code" / "config.json").write_text(json.dumps(about))
    (tmp_path / "code" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    names = {"FOLDER": str(tmp_path / "folder"), "CODE": str(tmp_path / "code")}
    with pytest.raises(ValueError, match=message):
        NamedModel(**(settings | {"name": names.get(settings["name"], settings["name"])})).config(
            vocabulary
        )
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "t5"}, "^model.name 't5' is a t5, which no task here trains"),
        ({"name": "vit"}, "^model.name 'vit' is a vit, which no task here trains"),
        (
            {"name": "bert", "overrides": {"hiden_size": 3}},
            "^model.overrides has 'hiden_size', which .* does not have; did you mean 'hidden_size'",
        ),
        ({"name": "gpt2", "overrides": {"vocab_size": "a"}}, "^model.overrides do not fit 'gpt2'"),
        (
            {"name": "mixtral", "overrides": {"output_router_logits": True}},
            "^model.name 'mixtral' has output_router_logits = true, but the auxiliary loss of",
        ),
        (
            {"name": "bert", "overrides": {"hidden_size": 33}},
            "no AutoModelForCausalLM of a bert can be built with these sizes",
        ),
    ],
)
def test_models_that_no_task_trains(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        builder(NamedModel(**({"pretrained": False} | settings)).config(16))()


def test_weights_that_nobody_draws_are_not_whatever_was_in_memory() -> None:
    """transformers' first GPT has no initialisation for its own kind of linear layer."""
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2}
    with pytest.raises(
        ValueError,
        match="initialise all weights of a openai-gpt .*; it can only start from trained weights",
    ):
        builder(NamedModel(name="openai-gpt", pretrained=False, overrides=sizes).config(16)).whole()


def test_weights_that_lack_a_part_are_refused(tmp_path: Path) -> None:
    """Weights with two of three layers, or without the language model's head, are refused; a new
    classification head is drawn.
    """
    build_llama(TINY, 16, 9).save_pretrained(tmp_path / "two")  # type: ignore[operator]
    longer = NamedModel(
        name=str(tmp_path / "two"), pretrained=True, overrides={"num_hidden_layers": 3}
    )
    with pytest.raises(
        ValueError,
        match="lack 9 tensors of the model, such as model.layers.2.*; leave its sizes as they are",
    ):
        builder(longer.config(16), weights=longer.weights)()
    two = NamedModel(name=str(tmp_path / "two"), pretrained=True)
    classifier: Any = builder(
        two.config(16), "AutoModelForSequenceClassification", weights=two.weights
    ).whole()
    classifier.save_pretrained(tmp_path / "classifier")
    headless = NamedModel(name=str(tmp_path / "classifier"), pretrained=True)
    with pytest.raises(ValueError, match="lack 1 tensors of the model, such as lm_head.weight"):
        builder(headless.config(16), weights=headless.weights)()
