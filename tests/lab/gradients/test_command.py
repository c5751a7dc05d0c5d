"""`adloco gradients`: what it writes for a run, against per-sample gradients of the same model."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adloco.cli.main import main
from adloco.errors import NonFiniteLossError
from adloco.lab.gradients.measuring import layers, measure_gradients
from adloco.run.checkpoint import list_checkpoints
from adloco.run.trained import Trained, load_trained, own_task
from tests.conftest import small_flags
from tests.tasks.test_island_texts import both, flags_of

STREAMS = 2


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of one trainer with two workers, which has kept rounds 0, 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("gradients")
    text = folder / "text"
    text.mkdir()
    for file in sorted(corpus.iterdir())[:5]:
        shutil.copy(file, text)
    flags = ["--run.tokens", "6000", "--run.checkpoint_every", "2", "--run.keep_checkpoints", "9"]
    flags += ["--data.path", str(text), "--data.validation_fraction", "0.2"]
    flags += ["--run.precision", "fp32"]  # As the oracle computes; auto is bf16 on some machines.
    assert main(["train", "diloco", *small_flags(corpus, folder), *flags]) == 0
    return folder / "run"


def measured(run: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "gradients" / f"{name}.json").read_text())
    return content


def per_sample(trained: Trained, samples: int) -> dict[str, np.ndarray]:
    """Gradients of single samples in float64: [samples, elements] for each parameter by name."""
    task = own_task(trained, trained.stored.recipe.evaluation)
    source = task.train_source(STREAMS, seed=0, least=STREAMS)
    model = trained.model.double().eval()
    rows: dict[str, list[np.ndarray]] = {name: [] for name, _ in model.named_parameters()}
    for stream in range(STREAMS):
        for position in range(samples // STREAMS):
            model.zero_grad()
            task.loss(model, source.read(stream, position, 1)).backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                rows[name].append(parameter.grad.flatten().numpy().copy())
    return {name: np.array(row) for name, row in rows.items()}


def expected(gradients: list[np.ndarray], batch: int) -> tuple[float, float]:
    """S and |G|^2 of some parameters, from equal batches."""
    each = np.concatenate(gradients, axis=1)
    means = each.reshape(-1, batch, each.shape[1]).mean(1)
    variance = batch * float(means.var(0, ddof=1).sum())
    return variance, float((each.mean(0) ** 2).sum()) - variance / len(each)


def test_the_numbers_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gradients", str(run), "--samples", "32", "--batch", "4"]) == 0
    said = capsys.readouterr().out
    trained = load_trained(run)
    name = f"round-{trained.stored.algorithm['rounds_done']:06d}-trainer-0"
    content, gradients = measured(run, name), per_sample(trained, 32)
    assert (content["checkpoint"], content["samples"]) == (trained.stored.checkpoint.name, 32)
    assert (content["batch"], content["num_batches"]) == (4, 8)
    (first,) = (each for each in content["layers"] if each["name"] == "model.layers.0")
    in_first = [key for key in gradients if ".layers.0." in key]
    for numbers, keys in ((content["total"], list(gradients)), (first, in_first)):
        variance, norm_sq = expected([gradients[key] for key in keys], 4)
        assert numbers["parameters"] == sum(gradients[key].shape[1] for key in keys)
        assert numbers["grad_variance"] == pytest.approx(variance, rel=1e-4)
        assert numbers["grad_norm_sq"] == pytest.approx(norm_sq, rel=1e-4)
        assert numbers["noise_scale"] == pytest.approx(variance / norm_sq, rel=1e-3)
    for number in ("parameters", "grad_variance", "grad_norm_sq"):
        total = sum(each[number] for each in content["layers"])
        assert total == pytest.approx(content["total"][number])
    assert (
        f"{content['total']['noise_scale']:,.1f}" in said
        and "32 samples in 8 batches of at most 4" in said
    )
    # The report shows it.
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert "<h2>Gradients</h2>" in page and f"{content['total']['noise_scale']:,.3g}" in page


def test_an_earlier_checkpoint_is_the_model_of_then(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At round 0 the model is the initial one: its loss is that of guessing. Without a terminal a
    line says how far the pass over two batches is.
    """
    monkeypatch.setattr("adloco.cli.progress.SECONDS_PER_LINE", 0.0)
    kept = [path.name for path in list_checkpoints(run / "checkpoints")]
    assert kept[0] == "round-000000-step-00000000" and len(kept) > 2
    assert main(["gradients", str(run), "--samples", "16", "--checkpoint", "0"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("gradients:")]
    assert told == [f"gradients: {part}%" for part in (50, 100)]
    content = measured(run, "round-000000-trainer-0")
    assert (content["checkpoint"], content["tokens"]) == (kept[0], 0)
    assert content["loss"] == pytest.approx(np.log(257), rel=0.05)
    first, last = (load_trained(run, round=number).model for number in (0, None))
    differ = zip(first.parameters(), last.parameters(), strict=True)
    assert not any(torch.equal(then, now) for then, now in differ)


def test_a_rewind_drops_what_was_measured_after_it(run: Path, tmp_path: Path) -> None:
    """Those rounds are trained again, perhaps with other settings."""
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    for checkpoint in ("0", "2", "4"):
        words = ["gradients", str(copied), "--samples", "16", "--checkpoint", checkpoint]
        assert main(words) == 0
    mine = copied / "gradients" / "round-000004 (copy)-trainer-0.json"
    shutil.copy(copied / "gradients" / "round-000004-trainer-0.json", mine)
    assert main(["rewind", str(copied), "2"]) == 0
    left = sorted(path.name for path in (copied / "gradients").iterdir())
    assert left == ["round-000000-trainer-0.json", "round-000002-trainer-0.json", mine.name]


def test_all_samples(run: Path) -> None:
    """0 takes every window of the training data once."""
    trained = load_trained(run)
    task = own_task(trained, trained.stored.recipe.evaluation)
    content = measure_gradients(trained, samples=0, batch=64)
    assert content["samples"] == task.num_train_samples(1) > 200


def test_the_text_of_an_island_that_was_dropped_is_left_out(tmp_path: Path) -> None:
    """It may be gone: all samples are those of the other island."""
    (tmp_path / "numbers.txt").write_text(" ".join(str(i * i) for i in range(3000)))
    (tmp_path / "words.txt").write_text("the cat sat on the mat and the dog sat too. " * 500)
    words = [*flags_of(tmp_path, both(tmp_path)), "--run.precision", "fp32"]
    assert main(["train", "diloco", *words, "--learning_rate.shape", "constant"]) == 0
    run = tmp_path / "run"
    words = ["--method.dropped", "[1]", "--run.tokens", "8000"]
    assert main(["train", "--resume", str(run), *words]) == 0
    (tmp_path / "words.txt").unlink()
    trained = load_trained(run)
    content = measure_gradients(trained, samples=16)
    task = own_task(trained, trained.stored.recipe.evaluation)
    source = task.train_source(STREAMS, seed=0, least=STREAMS)
    with torch.no_grad():
        losses = [float(task.loss(trained.model, source.read(0, at, 1))) for at in range(16)]
    assert content["samples"] == 16
    assert content["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--samples", "-1"], "--samples must be >= 0 (0: all), got -1"),
        (["--samples", "10000000"], "the samples of the training data, got 10000000; 0 takes all"),
        (["--batch", "0"], "--batch must be > 0, got 0"),
        (["--samples", "1"], "1 samples are one batch of"),
        (["--checkpoint", "1"], "no checkpoint of round 1; those of rounds 0, 2,"),
        (["--trainer", "5"], "there is no trainer 5"),
    ],
)
def test_refusals(
    words: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(run.rglob("*"))
    assert main(["gradients", str(run), *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and message in err
    assert sorted(run.rglob("*")) == before


def test_nan_is_not_measured(run: Path) -> None:
    trained = load_trained(run)
    torch.nn.init.constant_(next(trained.model.parameters()), math.nan)
    with pytest.raises(NonFiniteLossError, match="is not finite at .*take an earlier --checkpoint"):
        measure_gradients(trained, 16)


def test_a_stream_has_no_known_end(run: Path) -> None:
    trained = load_trained(run)
    stored = trained.stored
    source = {"path": "", "dataset": "somebody/texts", "streaming": True, "validation_samples": 9}
    data = replace(stored.recipe.data, **source)
    streamed = replace(stored, recipe=replace(stored.recipe, data=data))
    with pytest.raises(ValueError, match="streams its data; give a number"):
        measure_gradients(replace(trained, stored=streamed), samples=0)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            "model.embed.weight model.layers.0.up.weight model.layers.1.norm.weight head.weight",
            "model.embed model.layers.0 model.layers.1 head",
        ),
        ("model.decoder.layers.0.fc1.bias model.decoder.norm.weight", "layers.0 norm"),
        ("0.weight 1.weight 1.bias", "0 1 1"),
        ("weight bias", "weight bias"),
        ("", ""),
    ],
)
def test_layers_of_parameters(names: str, expected: str) -> None:
    assert layers(names.split()) == expected.split()


@pytest.mark.nightly
def test_a_sharded_run(small: list[str], tmp_path: Path) -> None:
    """A worker sharded over two ranks leaves the same model as one on a single rank."""
    contents = []
    for name, ranks in (("whole", "1"), ("sharded", "2")):
        run = tmp_path / name
        flags = ["--run.folder", str(run), "--ranks", ranks, "--run.rounds", "2"]
        assert main(["train", "fsdp-norm", *small, *flags]) == 0
        assert main(["gradients", str(run), "--samples", "64"]) == 0
        contents.append(measured(run, "round-000002-trainer-0"))
    whole, sharded = contents
    for number in ("grad_variance", "grad_norm_sq", "noise_scale"):
        assert sharded["total"][number] == pytest.approx(whole["total"][number], rel=1e-3)
