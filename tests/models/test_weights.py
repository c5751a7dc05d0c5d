"""Trained weights read part by part are those that from_pretrained gives, bit for bit; where they
cannot be, from_pretrained reads them.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import transformers
from torch import nn

from adloco import AdLoCo, BatchGuards, Batching, InnerAdamW, Method, Problem, Syncing, place
from adloco.config.recipe import build_recipe, override, read_values
from adloco.distributed.dtensor import gather_shards
from adloco.distributed.testing import run_on_ranks
from adloco.models.build import ModelBuilder
from adloco.models.source import Head, ModelOptions
from adloco.models.sources.named_model import NamedModel
from adloco.run.start import model_builder
from adloco.tasks.language_model import next_token_loss
from tests.problems import cases, tokens

CAUSAL: Head = "AutoModelForCausalLM"
CLASSIFIER: Head = "AutoModelForSequenceClassification"
SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "vocab_size": 40,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def save(
    folder: Path, name: str, head: str, *, shard: str = "10GB", **overrides: Any
) -> dict[str, torch.Tensor]:
    """Save a small model with parameters that no initialisation gives, as if it were trained."""
    config = transformers.CONFIG_MAPPING[name](**(SIZES | overrides))
    torch.manual_seed(11)
    model = getattr(transformers, head).from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.1, 0.3)
    model.save_pretrained(folder, max_shard_size=shard)
    return dict(model.state_dict())


def builder(
    folder: Path | str, head: Head, overrides: dict[str, Any] | None = None, **options: Any
) -> ModelBuilder:
    source = NamedModel(name=str(folder), pretrained=True, overrides=overrides or {})
    return ModelBuilder(
        config=source.config(40),
        head=head,
        options=ModelOptions(**options),
        seed=3,
        weights=source.weights,
    )


def assert_equal(ours: Any, theirs: Any) -> None:
    """Compare every parameter and buffer, also unsaved ones, with names, order, types and ties."""
    for kind in ("named_parameters", "named_buffers"):
        mine, expected = dict(getattr(ours, kind)()), dict(getattr(theirs, kind)())
        assert list(mine) == list(expected), "the same names; what is tied has one"
        for name, tensor in expected.items():
            assert mine[name].dtype == tensor.dtype, name
            assert mine[name].equal(tensor), name
            assert mine[name].requires_grad == tensor.requires_grad, name
    assert list(ours.state_dict()) == list(theirs.state_dict())


def from_library(folder: Path | str, head: Head, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    return getattr(transformers, head).from_pretrained(folder, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "saved_as", "head", "overrides"),
    [
        ("llama", CAUSAL, CAUSAL, {}),
        ("llama", CAUSAL, CAUSAL, {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("llama", CAUSAL, CLASSIFIER, {}),
        ("gpt2", CAUSAL, CAUSAL, {}),
        ("gpt2", "AutoModel", CAUSAL, {}),
        ("gpt2", CAUSAL, CLASSIFIER, {}),
        ("bert", CLASSIFIER, CLASSIFIER, {"num_labels": 3}),
        ("bert", "AutoModel", CLASSIFIER, {}),
        ("bert", "AutoModelForMaskedLM", CLASSIFIER, {}),
        ("bert", CAUSAL, CAUSAL, {"is_decoder": True}),
        ("distilbert", "AutoModelForMaskedLM", CLASSIFIER, {}),
        ("qwen3", CAUSAL, CAUSAL, {"tie_word_embeddings": True}),
        ("gpt_neox", CAUSAL, CAUSAL, {}),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_weights_are_those_of_from_pretrained(
    name: str, saved_as: str, head: Head, overrides: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    """A head or pooler that is not stored is drawn with the same values, too."""
    save(tmp_path, name, saved_as, **overrides)
    ours = builder(tmp_path, head, dtype=dtype)
    assert ours.stored.only_whole == ""
    before = torch.get_rng_state()
    built = ours.whole()
    assert torch.get_rng_state().equal(before)
    assert_equal(
        built, from_library(tmp_path, head, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    )


@pytest.mark.parametrize("name", ["marian", "roformer"])
def test_frozen_parameters_are_found_again_in_a_run_s_folder(name: str, tmp_path: Path) -> None:
    """transformers freezes the positions of these, so no checkpoint has them."""
    sizes = {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2}
    sizes |= {"decoder_ffn_dim": 32, "embedding_size": 32, "max_position_embeddings": 16}
    saved = save(tmp_path / "trained", name, CAUSAL, is_decoder=True, **sizes)
    (frozen,) = (key for key in saved if "embed_positions" in key)
    began = builder(tmp_path / "trained", CAUSAL, {"is_encoder_decoder": False})
    began.save_config(tmp_path / "model")
    config = ModelBuilder.load_config(tmp_path / "model")
    again = ModelBuilder(config=config, head=CAUSAL, options=ModelOptions(), seed=3).whole()
    parameters = dict(again.named_parameters())
    assert not parameters[frozen].requires_grad and parameters[frozen].equal(saved[frozen])
    others = [key for key in saved if parameters.get(key, saved[key]).requires_grad]
    assert not any(parameters[key].equal(saved[key]) for key in others), "they are drawn"
    source = NamedModel(name=str(tmp_path / "model"), pretrained=False)
    scratch = replace(began, config=source.config(16), weights="").whole()
    assert not dict(scratch.named_parameters())[frozen].equal(saved[frozen])


def test_of_several_files_and_with_checkpointing(tmp_path: Path) -> None:
    save(tmp_path, "llama", CAUSAL, shard="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours = builder(tmp_path, CAUSAL, gradient_checkpointing=True)
    assert ours.stored.only_whole == ""
    assert_equal(ours.whole(), from_library(tmp_path, CAUSAL))


@pytest.mark.parametrize("shard", ["10GB", "40KB"])
def test_of_the_hub_s_cache(shard: str) -> None:
    """The cache is as a download leaves it, and the network is not used."""
    cache = Path(os.environ["HF_HOME"]) / "hub" / f"models--adloco--tiny-{shard}"
    save(cache / "snapshots" / "0123abcd", "gpt2", CAUSAL, shard=shard)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0123abcd")
    ours = builder(f"adloco/tiny-{shard}", CAUSAL)
    assert ours.stored.only_whole == ""
    assert_equal(ours.whole(), from_library(f"adloco/tiny-{shard}", CAUSAL))


def change(
    folder: Path, edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
) -> None:
    file = folder / "model.safetensors"
    stored = safetensors.torch.load_file(file)
    safetensors.torch.save_file(
        edit({key: tensor.clone() for key, tensor in stored.items()}),
        file,
        metadata={"format": "pt"},
    )


def test_old_names_and_what_the_model_does_not_have(tmp_path: Path) -> None:
    """The files are like those of the first BERT, with LayerNorm.gamma, a saved counter of
    positions and heads for other tasks.
    """
    save(tmp_path, "bert", "AutoModelForMaskedLM")
    extra = {
        "bert.embeddings.position_ids": torch.arange(512)[None],
        "cls.seq_relationship.weight": torch.zeros(2, 32),
    }
    change(tmp_path, lambda stored: {_old(key): tensor for key, tensor in stored.items()} | extra)
    ours = builder(tmp_path, CLASSIFIER)
    assert ours.stored.only_whole == ""
    assert any("gamma" in key for _, key in ours.stored.places.values())
    assert_equal(ours.whole(), from_library(tmp_path, CLASSIFIER))


def _old(key: str) -> str:
    return key.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
        "LayerNorm.bias", "LayerNorm.beta"
    )


def as_bin(folder: Path) -> None:
    torch.save(
        safetensors.torch.load_file(folder / "model.safetensors"), folder / "pytorch_model.bin"
    )
    (folder / "model.safetensors").unlink()


def both_ends(folder: Path) -> None:
    change(
        folder,
        lambda stored: stored | {"lm_head.weight": stored["model.embed_tokens.weight"].clone()},
    )


def the_other_end(folder: Path) -> None:
    change(
        folder,
        lambda stored: {
            key.replace("model.embed_tokens", "lm_head"): tensor for key, tensor in stored.items()
        },
    )


@pytest.mark.parametrize(
    ("name", "edit", "reason"),
    [
        ("llama", as_bin, "they are not safetensors alone"),
        ("llama", both_ends, "tied weights are stored under other names"),
        ("llama", the_other_end, "tied weights are stored under other names"),
        ("mixtral", lambda folder: None, "they are split or merged"),
    ],
)
def test_what_only_the_library_can_put_together(
    name: str, edit: Callable[[Path], None], reason: str, tmp_path: Path
) -> None:
    save(tmp_path, name, CAUSAL, tie_word_embeddings=name == "llama")
    edit(tmp_path)
    ours = builder(tmp_path, CAUSAL)
    assert ours.stored.only_whole == reason
    assert ours.filling is None
    assert_equal(ours.whole(), from_library(tmp_path, CAUSAL))


@pytest.mark.parametrize(
    ("edit", "overrides", "message"),
    [
        (
            lambda stored: {key: tensor for key, tensor in stored.items() if "layers.2" not in key},
            {},
            "lack 9 tensors of the model, such as model.layers.2",
        ),
        (
            lambda stored: {
                key: tensor for key, tensor in stored.items() if "model.norm" not in key
            },
            {},
            "lack 1 tensors of the model, such as model.norm",
        ),
        (
            lambda stored: stored,
            {"intermediate_size": 24},
            "could not be loaded .RuntimeError.; give a folder with weights",
        ),
        (
            lambda stored: stored,
            {"num_hidden_layers": 5},
            "lack 9 tensors of the model, such as model.layers.4",
        ),
    ],
)
def test_refusals_are_those_of_weights_read_whole(
    edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    overrides: dict[str, Any],
    message: str,
    tmp_path: Path,
) -> None:
    save(tmp_path, "llama", CAUSAL)
    change(tmp_path, edit)
    with pytest.raises(ValueError, match=message):
        builder(tmp_path, CAUSAL, overrides).whole()


def test_a_damaged_or_absent_file_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "llama", CAUSAL)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="the weights of model.name .* could not be loaded"):
        builder(tmp_path, CAUSAL).whole()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="the weights of model.name .* could not be loaded"):
        builder(tmp_path, CAUSAL).whole()


def test_a_head_for_other_classes_is_refused(tmp_path: Path) -> None:
    save(tmp_path, "bert", CLASSIFIER, num_labels=5)
    with pytest.raises(ValueError, match="a head among them must have 3 classes, as here"):
        builder(tmp_path, CLASSIFIER, {"num_labels": 3}).whole()


@pytest.mark.parametrize("in_float32", [{}, {"lm_head": torch.float32}])
def test_an_adapter_beside_the_weights_is_refused(
    in_float32: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without PEFT, transformers reads the weights as if there were none."""
    save(tmp_path, "llama", CAUSAL)
    llama = transformers.LlamaForCausalLM
    monkeypatch.setattr(llama, "_get_dtype_plan", lambda self, dtype: in_float32)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="has an adapter .* merge it into its model"):
        builder(tmp_path, CAUSAL).whole()


def test_fewer_layers_than_are_stored(tmp_path: Path) -> None:
    stored = save(tmp_path, "llama", CAUSAL)
    short = builder(tmp_path, CAUSAL, {"num_hidden_layers": 2}).whole()
    assert all(tensor.equal(stored[key]) for key, tensor in short.state_dict().items())


def test_other_weights_have_another_digest(tmp_path: Path) -> None:
    save(tmp_path / "one", "llama", CAUSAL)
    save(tmp_path / "same", "llama", CAUSAL)
    save(tmp_path / "other", "llama", CAUSAL)
    change(
        tmp_path / "other",
        lambda stored: stored | {"model.norm.weight": stored["model.norm.weight"] + 1e-3},
    )
    one, same, other = (
        builder(tmp_path / name, CAUSAL).stored.digest() for name in ("one", "same", "other")
    )
    assert one == same != other


def other_files(folders: list[Path]) -> str:
    """Error message of a rank whose files differ from the first rank's."""
    os.chdir(folders[torch.distributed.get_rank()])
    flags = {"model.source": "transformers", "model.name": "model", "model.pretrained": "true"}
    recipe = build_recipe(override(read_values("diloco"), list(flags.items())))
    task: Any = SimpleNamespace(
        tokenizer=SimpleNamespace(vocab_size=40), configure=lambda config: config
    )
    try:
        model_builder(recipe, task, None, place(2, torch.device("cpu"), 1, 1, 1))
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_with_other_files_are_refused(tmp_path: Path) -> None:
    """Each rank reads its own files, so nothing else would reveal the difference."""
    for name in ("one", "other"):
        save(tmp_path / name / "model", "llama", CAUSAL)
    change(
        tmp_path / "other" / "model",
        lambda stored: stored | {"model.norm.weight": stored["model.norm.weight"] + 1e-3},
    )
    said = run_on_ranks(other_files, 2, [tmp_path / "one", tmp_path / "other"])
    expected = "the weights or the configuration of model.name differ between ranks; give all of "
    assert said == ["", f"{expected}them the same"]


def asked(
    folder: Path, shards: int, replicas: int
) -> tuple[list[list[str]], list[torch.Tensor], int]:
    """(keys read for each part, the worker's whole parameters, most elements that were alive at
    once).
    """
    built = builder(folder, CAUSAL)
    places = built.stored.places
    original, reads, most = safetensors.safe_open, list[list[str]](), 0

    class Recording:
        def __init__(self, *args: Any, **settings: Any) -> None:
            self.file = original(*args, **settings)

        def __enter__(self) -> Any:
            self.open = self.file.__enter__()
            return self

        def __exit__(self, *args: Any) -> None:
            self.file.__exit__(*args)

        def get_tensor(self, key: str) -> torch.Tensor:
            reads[-1].append(key)
            tensor: torch.Tensor = self.open.get_tensor(key)
            return tensor

    def fill(model: nn.Module, part: nn.Module) -> None:
        nonlocal most
        reads.append([])
        built.fill(model, part)
        most = max(most, sum(_held(parameter) for parameter in model.parameters()))

    import adloco.models.weights as weights

    weights.safe_open = Recording
    try:
        run = AdLoCo(
            Problem(
                build_model=built,
                fill=fill,
                loss_fn=next_token_loss,
                data=tokens(200, 1, vocabulary=16),
            ),
            Method(sync_every=2),
            inner=InnerAdamW(),
            syncing=Syncing(outer=None),
            batching=Batching(guards=BatchGuards(initial=8)),
            placement=place(1, torch.device("cpu"), 1, shards, replicas),
        )
    finally:
        weights.safe_open = original
    assert sorted(key for part in reads for key in part) == sorted(
        key for _, key in places.values()
    )
    start = [
        parameter.detach().clone()
        for parameter in gather_shards(list(next(iter(run.workers.values())).replica.params))
    ]
    run.round()
    return reads, start, most


def _held(parameter: Any) -> int:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return 0 if local.is_meta else int(local.numel())


@pytest.mark.parametrize(
    ("shards", "replicas"),
    cases({"shards": (2, 1), "replicas": (1, 2)}, default=("shards",)),
)
def test_each_rank_reads_a_block_at_a_time(shards: int, replicas: int, tmp_path: Path) -> None:
    stored = save(tmp_path, "llama", CAUSAL, num_hidden_layers=8)
    total = sum(tensor.numel() for tensor in stored.values())
    block = sum(tensor.numel() for key, tensor in stored.items() if "layers.0." in key)
    for reads, start, most in run_on_ranks(asked, 2, tmp_path, shards, replicas):
        assert [{".".join(key.split(".")[:3]) for key in part} for part in reads[:8]] == [
            {f"model.layers.{index}"} for index in range(8)
        ]
        assert sorted(reads[8]) == [
            "lm_head.weight",
            "model.embed_tokens.weight",
            "model.norm.weight",
        ]
        assert all(
            mine.equal(theirs)
            for mine, theirs in zip(start, from_library(tmp_path, CAUSAL).parameters(), strict=True)
        )
        assert shards == 1 or most <= 0.5 * (total + block) + 64, "its shards, and one block whole"
