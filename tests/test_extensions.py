"""Pieces of the user's own by dotted path (docs/python.md, examples/my_pieces.py), trained with
by the command line.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from adloco.algorithms.gradient_stats import NormMeasurement, Passes
from adloco.cli.main import main
from adloco.config.recipe import build_recipe, override, read_values
from adloco.distributed.parallel.engine import Engine
from adloco.rules.batch_rules.norm_test import NormTest
from adloco.rules.moments import Moments
from adloco.rules.switch import BatchPlan
from adloco.run.trained import load_trained
from adloco.run.training_run import TrainingRun
from adloco.tasks.kinds.language_model_settings import LanguageModelSettings
from adloco.tasks.language_model import LanguageModel

EXAMPLES = Path(__file__).parents[1] / "examples"
PAGE = Path(__file__).parents[1] / "docs" / "python.md"
FLAGS = {
    "batch.rule": "my_pieces:DoublingBatch",
    "batch.every_samples": "64",
    "batch.initial": "8",
    "merge.policy": "my_pieces:MergeAllOnce",
    "wire.format": "my_pieces:Fp16",
    "inner.optimizer": "my_pieces:InnerAdagrad",
    "run.trackers": "my_pieces:JsonTracker",
    "run.checkpoint_every": "1",
    "task.kind": "my_pieces:SmoothedLanguageModel",
    "model.source": "module",
    "model.factory": "my_pieces:build_tiny",
    "model.arguments": "{ width = 8 }",
    "data.factory": "my_pieces:count_up",
    "data.arguments": "{ rows = 60 }",
    "method.num_trainers": "2",
    "method.workers_per_trainer": "2",
}


class TensorMoments(NormMeasurement):
    """Its moments are tensors, as a measurement of one's own may give them."""

    def backward(self, plan: BatchPlan, passes: Passes, engine: Engine) -> tuple[Tensor, Moments]:
        losses, moments = super().backward(plan, passes, engine)
        values = torch.tensor(dataclasses.astuple(moments), dtype=torch.float64)
        values.requires_grad_()
        return losses, Moments(*values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorTest(NormTest):
    """The norm test by these moments."""

    measurement = "tests.test_extensions:TensorMoments"


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def words(small: list[str]) -> list[str]:
    """Flags of a run with one piece of each kind."""
    pairs = [(small[at], small[at + 1]) for at in range(0, len(small), 2)]
    other = ("--model.", "--data.path")
    kept = [word for pair in pairs if not pair[0].startswith(other) for word in pair]
    kept += ["--run.tokens", "16000"]
    return [*kept, *(word for key, value in FLAGS.items() for word in (f"--{key}", value))]


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("warm_python")
def test_one_of_each_by_the_real_command_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "adloco", "train", "diloco", *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path])},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stderr) == (0, "")
    rounds = records(run)
    # A trainer has seen 4 x 8 = 32 samples after round 1 and 64 after round 2, then the one that is
    # left 64 + 4 x 16 = 128 and 128 + 4 x 32 = 256: the batch is 8 x 2^0, 2^1, 2^2 and 2^4.
    batches = [[row["requested_batch"] for row in record["trainers"]] for record in rounds]
    assert batches == [[8, 8], [8, 8], [16], [32], [128]]
    assert [len(record["merges"]) for record in rounds] == [0, 1, 0, 0, 0]
    tracked = [json.loads(line) for line in (run / "my_tracker.jsonl").read_text().splitlines()]
    assert [(line["step"], line["train_loss"]) for line in tracked] == [
        (record["tokens"], record["train_loss"]) for record in rounds
    ]
    text = (run / "recipe.toml").read_text()
    for key, value in FLAGS.items():
        if value.startswith("my_pieces:"):
            assert f'{key.split(".")[1]} = "{value}"\n' in text

    trained = load_trained(run)
    assert {tuple(tensor.shape) for tensor in trained.model.parameters()} == {(256, 8), (256,)}
    assert main(["evaluate", str(run)]) == 0
    loss = rounds[-1]["trainers"][0]["val_loss"]
    assert f"loss {loss:.4f} nats per token" in capsys.readouterr().out
    assert main(["generate", str(run), "--prompt", "a", "--tokens", "3"]) == 0
    capsys.readouterr()
    assert main(["export", str(run), "--to", str(tmp_path / "out")]) == 2
    assert "transformers cannot load the model of" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_resumed_run_is_the_whole_one(words: list[str], tmp_path: Path) -> None:
    flags = [(words[at][2:], words[at + 1]) for at in range(0, len(words), 2)]

    def create(folder: str) -> TrainingRun:
        own = [*flags, ("run.folder", str(tmp_path / folder)), ("run.trackers", "none")]
        return TrainingRun.create(build_recipe(override(read_values("diloco"), own)))

    whole = create("whole")
    list(whole.rounds())
    for record in create("parts").rounds():
        if record["round"] == 2:
            break
    assert main(["train", "--resume", str(tmp_path / "parts")]) == 0
    models = [load_trained(tmp_path / name).model for name in ("whole", "parts")]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)


def test_bad_pieces_are_one_sentence(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, message in [
        (["--run.trackers", "my_pieces:Nobody"], "run.trackers 'my_pieces:Nobody' cannot be found"),
        (["--model.factory", "my_pieces:build"], "'my_pieces:build' cannot be found: module"),
        (["--model.arguments", "{ depth = 2 }"], "model.factory 'my_pieces:build_tiny' failed"),
        (["--data.factory", "my_pieces:Nobody"], "'my_pieces:Nobody' cannot be found: module"),
        (["--data.factory", "my_pieces:TinyModel"], "'my_pieces:TinyModel' failed when it was"),
        (["--data.arguments", "{ row = 3 }"], "data.factory 'my_pieces:count_up' failed when it"),
        (["--inner.lr", "-1.0"], "inner.lr must be > 0, got -1.0 (recipe section [inner])"),
        (["--model.gradient_checkpointing", "true"], "model.gradient_checkpointing is for models"),
    ]:
        assert main(["train", "diloco", *words, *flags]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_measures_may_be_numbers_of_numpy_and_torch(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, measured = LanguageModel.measure, LanguageModelSettings.measured

    def measure(*given: Any) -> list[Any]:
        return [torch.tensor(number, dtype=torch.float64) for number in plain(*given)]

    def of_numpy(task: LanguageModelSettings, means: list[float]) -> dict[str, Any]:
        return {name: np.float32(number) for name, number in measured(task, means).items()}

    monkeypatch.setattr(LanguageModel, "measure", measure)
    monkeypatch.setattr(LanguageModelSettings, "measured", of_numpy)
    assert main(["train", "single", *small, "--run.tokens", "4000"]) == 0
    assert isinstance(records(tmp_path / "run")[-1]["val_bits_per_byte"], float)


def test_the_page_names_every_piece_and_only_those() -> None:
    shown = set(re.findall(r"`(my_pieces:\w+)`", PAGE.read_text()))
    assert shown == {value for value in FLAGS.values() if value.startswith("my_pieces:")}


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_moments_of_ones_own_may_be_tensors(small: list[str], tmp_path: Path) -> None:
    words = ["train", "diloco", *small, "--run.tokens", "4096", "--batch.rule"]
    assert main([*words, "norm-test"]) == 0
    (tmp_path / "run").rename(tmp_path / "numbers")
    assert main([*words, "tests.test_extensions:TensorTest"]) == 0
    one, two = (records(tmp_path / name) for name in ("numbers", "run"))
    for name in ("requested_batch", "grad_variance"):
        expected = [line["trainers"][0][name] for line in one]
        assert [line["trainers"][0][name] for line in two] == pytest.approx(expected)
