"""Sequence classification: batches, padding that enters nothing, balanced evaluation, and runs from
rows to accuracy.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import adloco
from adloco.cli.main import main
from adloco.config.recipe import build_recipe, override, read_values
from adloco.data.byte_tokenizer import ByteTokenizer
from adloco.data.data_settings import DataSettings
from adloco.data.labelled_texts import read_texts
from adloco.models.build import ModelBuilder
from adloco.models.source import ModelOptions
from adloco.models.sources.named_model import NamedModel
from adloco.run.training_run import TrainingRun
from adloco.tasks.classification import Classification
from adloco.tasks.kinds.classification_settings import ClassificationSettings
from adloco.tasks.task import EvaluationSettings, TaskData

BERT = (
    "{ hidden_size = 32, num_hidden_layers = 1, num_attention_heads = 2, intermediate_size = 64, "
    "max_position_embeddings = 64 }"
)


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    """200 texts of any length, in one letter for each label."""
    draw = np.random.default_rng(0)
    file = tmp_path / "reviews.jsonl"
    rows = [
        {
            "text": "ab"[row % 2] * int(draw.integers(1, 32)),
            "label": row % 2,
        }
        for row in range(200)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def opened(path: Path, per_class: int = 2, context_tokens: int = 16) -> Classification:
    settings = DataSettings(path=str(path), context_tokens=context_tokens, validation_samples=40)
    task = ClassificationSettings(evaluation_per_class=per_class).open(
        TaskData(settings, EvaluationSettings())
    )
    assert isinstance(task, Classification)
    return task


def test_rows_become_batches(tmp_path: Path) -> None:
    """By hand: bytes after the token that stands for the text, cut at five; zeros where there is no
    text.
    """
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "ab", "label": 1}\n{"text": "abcdefgh", "label": 0}\n')
    data = DataSettings(context_tokens=5).at(str(file))
    found, _ = read_texts(data, "label", ByteTokenizer(), ["validation"])
    both = found["validation"]
    assert both.batch(np.array([0]), pad=9)["input_ids"].tolist() == [[0, 97, 98]]
    batch = both.batch(np.array([1, 0]), pad=9)
    assert batch["input_ids"].tolist() == [[0, 97, 98, 99, 100], [0, 97, 98, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch["labels"].tolist() == [0, 1]


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_padding_enters_neither_the_loss_nor_a_gradient(name: str, reviews: Path) -> None:
    """A batch of texts of different lengths is the mean of its texts one by one."""
    task = opened(reviews, context_tokens=30)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    config = task.configure(NamedModel(name=name, pretrained=False, overrides=sizes).config(256))
    model: Any = (
        ModelBuilder(
            config=config, head="AutoModelForSequenceClassification", options=ModelOptions(), seed=0
        )
        .whole()
        .eval()
    )
    source = task.train_source(num_streams=1, seed=0, least=4)
    batch = source.read(0, 0, 6)
    assert not batch["attention_mask"].all()
    loss = task.loss(model, batch)
    together = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    singles = [task.loss(model, source.read(0, index, 1)) for index in range(6)]
    torch.testing.assert_close(loss, sum(singles, start=torch.zeros(())) / 6, rtol=1e-5, atol=0)
    apart = torch.autograd.grad(
        sum(singles, start=torch.zeros(())) / 6, list(model.parameters()), allow_unused=True
    )
    for mine, theirs in zip(together, apart, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_workers_see_all_labels_of_rows_in_turns(reviews: Path) -> None:
    source = opened(reviews).train_source(num_streams=2, seed=0, least=4)
    labels = [source.read(stream, 0, 80)["labels"] for stream in range(2)]
    assert all(20 < int(own.sum()) < 60 for own in labels)
    assert int(torch.cat(labels).sum()) == 80, "each text once"


def test_evaluation_is_balanced_and_shared(reviews: Path) -> None:
    """The first 40 rows validate, 10 of them of class 0; a model that always says 1 is right on
    half of a balanced set.
    """
    rows = [json.loads(line) for line in reviews.read_text().splitlines()]
    for number, row in enumerate(rows):
        row["label"] = int(number % 4 != 3)
    reviews.write_text("".join(json.dumps(row) + "\n" for row in rows))

    class AlwaysOne(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
            class Output:
                logits = torch.tensor([[0.0, 1.0]]).expand(len(input_ids), 2)

            return Output

    task = opened(reviews, per_class=5)
    loss, correct, count = task.measure(AlwaysOne(), torch.device("cpu"), 64)
    assert (correct, count) == (5, 10)
    assert loss == pytest.approx(5 * (np.log(1 + np.e) - 1) + 5 * np.log(1 + np.e))
    parts = [task.measure(AlwaysOne(), torch.device("cpu"), 2, part, 3) for part in range(3)]
    assert [sum(column) for column in zip(*parts, strict=True)] == pytest.approx(
        [loss, correct, count]
    )


FLAGS = [
    "--task.kind",
    "classification",
    "--model.source",
    "transformers",
    "--model.name",
    "bert",
    "--model.pretrained",
    "false",
    "--model.overrides",
    BERT,
    "--data.context_tokens",
    "32",
    "--data.validation_samples",
    "40",
    "--task.evaluation_per_class",
    "15",
]


@pytest.mark.parametrize("recipe", [pytest.param("adloco", marks=pytest.mark.nightly), "diloco"])
def test_a_run_from_rows_to_accuracy(
    recipe: str, reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run with dropout, resumed in the middle, ends where the undisturbed run does."""
    flags = [
        *FLAGS,
        "--data.path",
        str(reviews),
        "--data.cache",
        str(tmp_path / "cache"),
        "--run.trackers",
        "none",
        "--method.sync_every",
        "10",
    ]
    assert (
        main(
            [
                "train",
                recipe,
                *flags,
                "--run.tokens",
                "60000",
                "--inner.lr",
                "5e-3",
                "--run.folder",
                str(tmp_path / "run"),
            ]
        )
        == 0
    )
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert records[-1]["val_accuracy"] >= 0.9
    assert records[-1]["val_loss"] < records[0]["val_loss"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["final_val_accuracy"] == records[-1]["val_accuracy"]
    assert summary["best_val_accuracy"] == max(record["val_accuracy"] for record in records)
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert f"accuracy {records[-1]['val_accuracy']:.2%}, over 30 texts" in said
    assert main(["evaluate", str(tmp_path / "run"), "--data.path", str(reviews)]) == 0
    assert "over 200 texts" in capsys.readouterr().out
    assert main(["generate", str(tmp_path / "run"), "--prompt", "x"]) == 2
    assert "adloco generate needs a language model" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "run"), "--windows", "3"]) == 2
    assert "is evaluated on texts; leave windows out" in capsys.readouterr().err
    with pytest.raises(ValueError, match="windows are counted of packed text"):
        adloco.load(tmp_path / "run").evaluate(windows=3)
    (tmp_path / "three.jsonl").write_text('{"text": "so", "label": 2}\n')
    three = ["--data.path", str(tmp_path / "three.jsonl")]
    assert main(["evaluate", str(tmp_path / "run"), *three]) == 2
    assert "is labelled 2, but the model has 2 classes, from 0" in capsys.readouterr().err
    assert main(["prepare", *flags, "--data.path", str(reviews)]) == 2
    assert "adloco prepare packs text into windows" in capsys.readouterr().err


def test_rows_left_out_of_both_splits_are_counted(tmp_path: Path) -> None:
    """Three rows of one split and two of the other are counted; if both splits are cut from the
    same rows, each row is counted once.
    """
    rows = [{"text": "good" if row % 2 else "bad", "label": row % 2} for row in range(20)]
    for split, empty in (("train", 3), ("test", 2)):
        lines = [*rows, *({"text": " ", "label": 0} for _ in range(empty))]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    two = DataSettings(dataset=str(tmp_path), validation_split="test", bad_rows="skip")
    assert (
        ClassificationSettings(evaluation_per_class=2)
        .open(TaskData(two, EvaluationSettings()))
        .skipped()
        .startswith("5 of 45 rows were left out")
    )
    one = DataSettings(path=str(tmp_path / "train.jsonl"), validation_samples=6, bad_rows="skip")
    assert (
        ClassificationSettings(evaluation_per_class=2)
        .open(TaskData(one, EvaluationSettings()))
        .skipped()
        .startswith("3 of 23 rows were left out")
    )
    alone = TaskData(one, EvaluationSettings(), everything=True)
    assert ClassificationSettings().open(alone).skipped().startswith("3 of 9 rows were left out")


def test_a_resumed_run_pads_as_it_did(
    reviews: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Llama looks for the last token that is not its padding, which here is not the tokenizer's
    end of text.
    """
    llama = (
        "{ hidden_size = 32, num_hidden_layers = 1, num_attention_heads = 2, intermediate_size = "
        "64, pad_token_id = 1 }"
    )
    flags = [
        *FLAGS,
        "--model.name",
        "llama",
        "--model.overrides",
        llama,
        "--data.path",
        str(reviews),
        "--data.cache",
        str(tmp_path / "cache"),
    ]
    more = [
        "--run.trackers",
        "none",
        "--method.sync_every",
        "5",
        "--run.tokens",
        "5000",
        "--run.checkpoint_every",
        "1",
    ]
    assert main(["train", "single", *flags, *more, "--run.folder", str(tmp_path / "whole")]) == 0
    words = [*flags, *more, "--run.folder", str(tmp_path / "parts")]
    settings = [
        (flag.removeprefix("--"), value)
        for flag, value in zip(words[::2], words[1::2], strict=True)
    ]
    stopped = TrainingRun.create(build_recipe(override(read_values("single"), settings)))
    rounds = stopped.rounds()
    next(rounds)
    rounds.close()
    assert main(["train", "--resume", str(tmp_path / "parts")]) == 0
    whole, parts = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "parts")
    )
    assert [(row["train_loss"], row["val_loss"]) for row in parts] == [
        (row["train_loss"], row["val_loss"]) for row in whole
    ]
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "parts")]) == 0
    said = capsys.readouterr().out.partition("loss ")[2]
    assert float(said.partition(" nats per text")[0]) == pytest.approx(
        whole[-1]["val_loss"], rel=0.005
    )


def test_classes_that_are_missing_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If rows are sorted by label, the first rows are all of one class."""
    file = tmp_path / "sorted.jsonl"
    file.write_text(
        "".join(
            json.dumps({"text": f"text {row}", "label": row // 100}) + "\n" for row in range(200)
        )
    )
    words = [
        "train",
        "single",
        *FLAGS,
        "--data.path",
        str(file),
        "--data.cache",
        str(tmp_path / "cache"),
        "--run.folder",
        str(tmp_path / "run"),
    ]
    assert main(words) == 2
    assert (
        "task.evaluation_per_class is 15, but class 1 has 0 texts; lower it (0: all there are), "
        "or hold out more" in capsys.readouterr().err
    )
    assert main([*words, "--data.samples", "90", "--data.validation_samples", "30"]) == 2
    assert (
        "the texts to train on have 1 class, and 0 of the 30 to validate on are of others; "
        "data.samples takes the first rows" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("held_out", "others"), [([2, 0], 1), ([2, 0, 1], 0), ([2, 3], 2), ([2], 1), ([0], 0)]
)
def test_classes_that_nobody_trains_on(held_out: list[int], others: int, tmp_path: Path) -> None:
    """Others are refused, as of rows sorted by label, if half of the texts to validate on are of
    them, and a rare one is named.
    """
    file = tmp_path / "rows.jsonl"
    labels = [*held_out, *(row % 2 for row in range(8))]
    file.write_text(
        "".join(json.dumps({"text": f"text {at}", "label": at}) + "\n" for at in labels)
    )
    data = DataSettings(path=str(file), validation_samples=len(held_out))
    given = TaskData(data, EvaluationSettings())
    settings = ClassificationSettings(evaluation_per_class=0)
    if others:
        said = f"have 2 classes, and {others} of the {len(held_out)} to validate on are of others"
        with pytest.raises(ValueError, match=said):
            settings.open(given)
        return
    named = "no text to train on has class 2, of some to validate on" if 2 in held_out else ""
    assert settings.open(given).skipped() == named


def shuffled_rows() -> list[dict[str, Any]]:
    """Rows in another order each time."""
    rows = [{"text": f"text {row}", "label": row % 2} for row in range(40)]
    random.shuffle(rows)
    return rows


def test_rows_of_a_function_are_read_once() -> None:
    """It may give others the next time, of which some would be in both splits."""
    data = DataSettings(
        factory="tests.tasks.test_classification:shuffled_rows", validation_samples=20
    )
    found, _ = read_texts(data, "label", ByteTokenizer())
    texts = [
        tuple(split.ids[begin:end])
        for split in found.values()
        for begin, end in zip(split.starts, split.starts[1:], strict=False)
    ]
    assert len(set(texts)) == 40


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--data.context_tokens", "80"],
            "data.context_tokens must be <= 64, the longest context of the model, where texts have",
        ),
        (
            ["--model.name", "roberta", "--data.context_tokens", "64"],
            "data.context_tokens must be <= 63, the longest context of the model (whose positions "
            "begin at 1",
        ),
        (
            ["--task.evaluation_per_class", "500"],
            "task.evaluation_per_class is 500, but class 0 has 20 texts; lower it (0: all there "
            "are)",
        ),
        (["--task.label_column", "stars"], "stars"),
        (["--data.context_tokens", "1"], "data.context_tokens must be >= 2, got 1"),
        (
            ["--data.path", "", "--data.dataset", "some/one", "--data.streaming", "true"],
            "data.streaming is for language models: a classification",
        ),
        (
            ["--data.tokenizer", "bpe:300"],
            "data.tokenizer must be bytes or a Hugging Face tokenizer here, got 'bpe:300'",
        ),
        (
            ["--task.kind", "regression"],
            "task.kind must be one of classification, language-model, or a class of your own as "
            "package.module:Name, got 'regression'",
        ),
    ],
)
def test_refusals(
    flags: list[str],
    message: str,
    reviews: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [json.loads(line) | {"text": "x" * 100} for line in reviews.read_text().splitlines()]
    reviews.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert (
        main(
            [
                "train",
                "single",
                *FLAGS,
                "--data.path",
                str(reviews),
                "--run.folder",
                str(tmp_path / "run"),
                *flags,
            ]
        )
        == 2
    )
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
