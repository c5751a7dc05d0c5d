"""The recipes whose model and data come from the hub, on local copies of these: C4 rows, IMDB
reviews, their tokenizers and shapes.
"""

import json
from pathlib import Path

import pytest

from adloco.cli.main import main
from tests.problems import SHARED_DATA, needs_shared_data

TINY_LLAMA = (
    "{ hidden_size = 32, num_hidden_layers = 1, num_attention_heads = 2, num_key_value_heads = 2, "
    "intermediate_size = 48 }"
)
TINY_BERT = (
    "{ hidden_size = 32, num_hidden_layers = 1, num_attention_heads = 2, intermediate_size = 64 }"
)
SMALL_BERT = (
    "{ hidden_size = 128, num_hidden_layers = 2, num_attention_heads = 2, intermediate_size = 256 }"
)
HUB = SHARED_DATA / "hub_like"


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def common(tmp_path: Path) -> list[str]:
    return [
        "--data.cache",
        str(tmp_path / "cache"),
        "--run.folder",
        str(tmp_path / "run"),
        "--run.trackers",
        "none",
        "--model.pretrained",
        "false",
    ]


@needs_shared_data
@pytest.mark.nightly
def test_c4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stream, the Llama tokenizer, four trainers that merge, and the micro-batch found under a
    budget.
    """
    flags = [
        "--data.dataset",
        str(HUB / "allenai" / "c4"),
        "--data.tokenizer",
        str(SHARED_DATA / "tokenizers" / "llama2"),
        "--model.name",
        str(SHARED_DATA / "configs" / "MicroLlama"),
        "--model.overrides",
        TINY_LLAMA,
        "--data.samples",
        "100",
        "--data.validation_samples",
        "20",
        "--data.context_tokens",
        "32",
        "--run.tokens",
        "6000",
        "--method.sync_every",
        "3",
        "--inner.lr",
        "5e-3",
        "--evaluation.windows",
        "8",
        "--memory.gib",
        "3",
    ]
    assert main(["train", "adloco-paper", *flags, *common(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "merged into" in said and "the largest micro-batch that fits is" in said
    rows = records(tmp_path / "run")
    assert rows[-1]["val_loss"] < rows[0]["val_loss"]
    # What was found stands in the run's recipe, so that a resume keeps it.
    assert 'max_micro_batch = "auto"' not in (tmp_path / "run" / "recipe.toml").read_text()


@needs_shared_data
@pytest.mark.nightly
def test_imdb(tmp_path: Path) -> None:
    flags = [
        "--data.dataset",
        str(HUB / "stanfordnlp" / "imdb"),
        "--data.tokenizer",
        str(SHARED_DATA / "tokenizers" / "bert-base-uncased"),
        "--model.name",
        "bert",
        "--model.overrides",
        TINY_BERT,
        "--task.evaluation_per_class",
        "10",
        "--run.tokens",
        "20000",
        "--method.sync_every",
        "3",
        "--memory.gib",
        "3",
    ]
    assert main(["train", "adloco-imdb", *flags, *common(tmp_path)]) == 0
    rows = records(tmp_path / "run")
    assert len(rows[0]["trainers"]) == 4 and [len(row["merges"]) for row in rows[:2]] == [0, 1]
    assert all(
        row["val_accuracy"] * 20 == pytest.approx(round(row["val_accuracy"] * 20)) for row in rows
    )  # Of ten texts of each class.


@needs_shared_data
@pytest.mark.nightly
def test_a_small_bert_from_scratch_is_clearly_better_than_chance(tmp_path: Path) -> None:
    """AdLoCo with two trainers is evaluated on all 1,000 test reviews."""
    flags = [
        "--task.kind",
        "classification",
        "--model.source",
        "transformers",
        "--model.name",
        "bert",
        "--model.overrides",
        SMALL_BERT,
        "--data.dataset",
        str(HUB / "stanfordnlp" / "imdb"),
        "--data.validation_split",
        "test",
        "--batch.initial",
        "16",
        "--batch.minimum",
        "16",
        "--data.tokenizer",
        str(SHARED_DATA / "tokenizers" / "bert-base-uncased"),
        "--switch.max_micro_batch",
        "16",
        "--run.tokens",
        "500000",
        "--evaluation.every",
        "4",
    ]
    assert main(["train", "adloco", *flags, *common(tmp_path)]) == 0
    last = records(tmp_path / "run")[-1]
    assert last["val_accuracy"] > 0.65  # Four standard errors above 0.59, let alone 0.5.
    assert last["val_loss"] < 0.65  # log 2 is 0.693.
