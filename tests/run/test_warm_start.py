"""Warm start: a new run begins with another run's parameters, bit for bit, and with nothing else of
it.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Mamba2Config

import adloco
from adloco.cli.arguments import take_settings
from adloco.cli.main import main
from adloco.config.recipe import build_recipe, override, read_values
from adloco.models.build import ModelBuilder
from adloco.models.source import computed_by
from adloco.run.checkpoint import list_checkpoints, need
from adloco.run.trained import load_trained
from adloco.run.training_run import TrainingRun
from adloco.whole_file import checksum
from tests.conftest import small_flags


@pytest.fixture(scope="module")
def other(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run with whose model others begin: two trainers, so that one is the better."""
    folder = tmp_path_factory.mktemp("other")
    given, _ = take_settings(small_flags(corpus, folder))
    settings = dict(given) | {"run.tokens": 3000, "method.num_trainers": 2}
    run = TrainingRun.create(build_recipe(override(read_values("local-sgd"), [*settings.items()])))
    assert [*run.rounds()]
    return run.folder


def first_parts(folder: Path, part: str) -> Any:
    """A part of the checkpoint that a run writes before its first round."""
    return need(list_checkpoints(folder / "checkpoints")[0], part)


@pytest.mark.parametrize(
    "ranks",
    [1, pytest.param(2, marks=pytest.mark.nightly)],
    ids=["one process", "shards on two ranks"],
)
def test_a_run_begins_with_the_model_of_another(
    ranks: int, other: Path, small: list[str], tmp_path: Path, train: Any
) -> None:
    run = tmp_path / "run"
    words = ["--from", str(other), "--run.tokens", "1500", "--run.seed", "7"]
    words += ["--method.num_trainers", "1", "--method.workers_per_trainer", "2"]
    shards = ["--ranks", "2", "--placement.shard_size", "2"] if ranks == 2 else []
    done = train(["diloco", *small, *words, *shards])
    assert done.returncode == 0, done.stderr

    trained = load_trained(other)
    expected = [parameter.detach() for parameter in trained.model.parameters()]
    found = first_parts(run, "trainer-0")["outer"]["params"]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    numbers = first_parts(run, "run")["algorithm"]
    assert (numbers["samples"], numbers["inner_steps"], numbers["rounds_done"]) == (0, 0, 0)
    optimizers = first_parts(run, "worker-0")["inner"]["optimizers"]
    assert not any(optimizer["state"] for optimizer in optimizers), "optimizers begin without state"

    environment = json.loads((run / "environment.json").read_text())
    origin = environment["from_run"]
    checkpoint = trained.stored.checkpoint
    assert origin["run"] == str(other) and origin["checkpoint"] == checkpoint.name
    assert origin["trainer"] == trained.trainer
    tensors = f"trainer-{trained.trainer}.safetensors"
    assert origin["checksums"][tensors] == checksum(checkpoint / tensors)
    assert any("begins with the parameters of trainer" in each for each in environment["notices"])
    assert f'from_run = "{other}"' in (run / "recipe.toml").read_text()
    # Even its first round trains better than the other run's.
    first = [adloco.load(folder).records[0]["train_loss"] for folder in (run, other)]
    assert first[0] < first[1]


def test_a_resumed_run_does_without_the_other(
    other: Path, small: list[str], tmp_path: Path
) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    shutil.copytree(other, copy)
    words = ["--from", str(copy), "--run.tokens", "1200", "--learning_rate.shape", "constant"]
    assert main(["train", "diloco", *small, *words]) == 0
    shutil.rmtree(copy)
    assert main(["train", "--resume", str(run), "--run.tokens", "2400"]) == 0
    assert adloco.load(run).records[-1]["tokens"] >= 2400


def test_what_does_not_fit_is_refused(
    other: Path, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, sentence in (
        (["--model.num_layers", "2"], "(num_hidden_layers is 1 there and 2 here)"),
        # All tensors have the same shapes.
        (
            ["--model.num_heads", "4", "--model.num_kv_heads", "4"],
            "num_attention_heads is 2 there and 4 here",
        ),
        (["--data.tokenizer", "bpe:300"], "has another tokenizer; set data.tokenizer to 'bytes'"),
    ):
        assert main(["train", "diloco", *small, *words, "--from", str(other)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("adloco: the ") and error.count("\n") == 1
        assert sentence in error
        assert not (tmp_path / "run").exists()
    assert main(["train", "--resume", str(other), "--from", str(other)]) == 2
    assert "--from begins a new run" in capsys.readouterr().err
    assert main(["train", *small, "--from", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_what_a_run_may_change_of_the_model_that_it_begins_with(tmp_path: Path) -> None:
    sizes: Any = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    plain = computed_by(LlamaConfig(**sizes))
    other: Any = {"attention_dropout": 0.1, "max_position_embeddings": 99, "pad_token_id": 3}
    assert computed_by(LlamaConfig(**sizes, dtype="bfloat16", **other)) == plain
    for changed in ({"rms_norm_eps": 1e-3}, {"hidden_act": "gelu"}, {"num_attention_heads": 4}):
        assert computed_by(LlamaConfig(**(sizes | changed))) != plain
    # A file has lists where a new configuration has tuples.
    mamba = Mamba2Config()
    mamba.save_pretrained(tmp_path)
    assert computed_by(mamba) == computed_by(ModelBuilder.load_config(tmp_path))


def test_a_tokenizer_that_was_trained_is_taken_from_the_other_run(
    small: list[str], corpus: Path, tmp_path: Path
) -> None:
    settings, _ = take_settings([*small, "--run.tokens", "600", "--data.tokenizer", "bpe:300"])
    given = dict(settings)
    first = adloco.train("diloco", **given)
    text = tmp_path / "text.txt"
    text.write_text((corpus / "00.txt").read_text() * 3)
    given |= {"data.path": text, "run.folder": tmp_path / "second"}
    with pytest.raises(ValueError, match="has another tokenizer; set data.tokenizer to '") as error:
        adloco.train("diloco", from_run=first.folder, **given)
    given["data.tokenizer"] = str(error.value).rpartition("data.tokenizer to ")[2].strip("'")
    assert adloco.train("diloco", from_run=first.folder, **given).finished


class Blended(nn.Module):
    """A model with a frozen embedding, and a part that comes in over the first passes, which a
    buffer counts.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 16).requires_grad_(False)
        self.mix, self.head = nn.Linear(16, 16), nn.Linear(16, vocab_size)
        self.register_buffer("passes", torch.tensor(0))

    def forward(self, ids: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        state = self.embed(ids)
        logits: Tensor = self.head(state + (self.passes / 10).clamp(max=1.0) * self.mix(state))
        return logits


def test_what_is_not_trained_is_the_other_run_s_too(small: list[str], tmp_path: Path) -> None:
    """Counts: in a run that begins with the model at hardly any rate, and wherever it is loaded.
    Frozen parameters, which no checkpoint has, must be drawn by the same seed.
    """
    given, _ = take_settings([*small, "--run.tokens", "3000", "--inner.optimizer", "adamw"])
    made = {"model.source": "module", "model.factory": f"{__name__}:Blended"}
    kept = {name: value for name, value in given if not name.startswith("model.")}
    settings = kept | made | {"run.folder": str(tmp_path / "first"), "run.seed": 5}
    first = adloco.train("single", **{"inner.lr": 0.01}, **settings)
    loss = first.records[-1]["val_loss"]

    other = {"run.folder": str(tmp_path / "second"), "inner.lr": 1e-9}
    begun = {"from_run": str(tmp_path / "first")} | settings | other
    second = adloco.train("single", **begun)
    assert second.records[0]["val_loss"] == pytest.approx(loss)
    for folder in ("first", "second"):
        found = adloco.load(tmp_path / folder).evaluate(windows=8)["loss"]
        assert found == pytest.approx(loss)
    elsewhere = {"run.folder": str(tmp_path / "third"), "run.seed": 7}
    with pytest.raises(ValueError, match=r"are not trained, .* give run\.seed 5, by which they"):
        adloco.train("single", **begun | elsewhere)
    assert not (tmp_path / "third").exists()
