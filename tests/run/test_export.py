"""What is exported is what was trained: the same logits in transformers, the same loss."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from adloco.cli.main import main
from adloco.run.records import Records
from adloco.run.trained import load_trained
from adloco.run.transformers_export import export
from adloco.tasks.language_model import next_token_loss
from adloco.tasks.task import TaskData


def test_exported_is_trained(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    run, folder = tmp_path / "run", tmp_path / "exported"
    assert main(["train", "adloco", *small]) == 0
    assert main(["evaluate", str(run), "--windows", "8"]) == 0
    (tmp_path / ".exported").mkdir()  # A neighbour, as .git is of an export to git.
    said = capsys.readouterr().out
    flags = ["--license", "apache-2.0", "--language", "no,en"]
    assert main(["export", str(run), "--to", str(folder), *flags]) == 0
    assert f"from_pretrained({str(folder)!r})" in capsys.readouterr().out
    there = {path.name for path in tmp_path.iterdir() if "export" in path.name}
    assert there == {".exported", "exported"}
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder)
    trained = load_trained(run)
    ids = torch.randint(0, 256, (2, 16))
    assert torch.equal(loaded(input_ids=ids).logits, trained.model(input_ids=ids).logits)

    class Wrapped(torch.nn.Module):
        def forward(self, **inputs: Any) -> Any:
            return loaded(**inputs)

    stored = trained.stored
    given = TaskData(stored.recipe.data, stored.recipe.evaluation, stored.tokenizer)
    task = stored.recipe.task.open(given)
    total, _, count = task.measure(Wrapped(), torch.device("cpu"), 8)
    assert f"loss {total / count:.4f} nats per token" in said
    # The loss that transformers itself computes, by its own shift.
    windows = ids[:1]
    assert float(loaded(input_ids=windows, labels=windows).loss.detach()) == pytest.approx(
        float(next_token_loss(loaded, windows).detach()), rel=1e-5
    )
    generator = pipeline(
        "text-generation", model=str(folder), tokenizer=AutoTokenizer.from_pretrained(folder)
    )
    for config in (loaded.config, loaded.generation_config):  # Documents are packed between these.
        assert config.bos_token_id == config.eos_token_id == trained.stored.tokenizer.end_of_text
    text = generator("alpha", max_new_tokens=5, do_sample=False)[0]["generated_text"]
    assert text.startswith("alpha") and len(text) > len("alpha")
    # The model has 1,024 positions, of which most were never trained.
    assert generator.tokenizer.model_max_length == 32
    card = (folder / "README.md").read_text()
    assert "[method]" in card and "trained on at most 32 tokens at a time" in card
    assert str(tmp_path) not in card and 'folder = "run"' in card, "only the names of files"
    assert yaml.safe_load(card.split("---\n")[1]) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "language": ["no", "en"],
        "tags": ["adloco"],
    }
    results = dict(re.findall(r"^\| (.+) \| (.+) \|$", card, re.MULTILINE))
    summary = json.loads((run / "summary.json").read_text())
    assert results["final validation loss (nats per token)"] == f"{summary['final_val_loss']:.4f}"
    sent = float(results["sent per worker (MB)"])
    assert sent == pytest.approx(summary["bytes"] / 1e6, rel=1e-2)
    assert results["parameters"] == f"{summary['num_parameters']:,}"
    assert not {"None", "-", "0"} & set(results.values())


@pytest.mark.parametrize(("name", "text"), [("bpe:280", "in 2024"), ("bytes", "e\u0301")])
def test_a_type_whose_tokenizer_transformers_does_not_load_as_saved(
    name: str, text: str, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a qwen2, AutoTokenizer takes one that cuts numbers into digits and composes accents; in
    transformers 5.3 it takes the one that was saved.
    """
    import transformers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    (tmp_path / "text").write_text("and in 2024 it was 2024 again, " * 200)
    sizes = "hidden_size = 32, num_hidden_layers = 1, num_attention_heads = 2, "
    sizes += "num_key_value_heads = 2, intermediate_size = 64"
    qwen = shlex.split("--model.source transformers --model.name qwen2 --model.pretrained false")
    qwen += ["--model.overrides", f"{{ {sizes} }}", "--data.tokenizer", name]
    own = dict(zip(small[::2], small[1::2], strict=True))
    words = [word for pair in own.items() if not pair[0].startswith("--model.") for word in pair]
    qwen += ["--data.path", str(tmp_path / "text")]
    assert main(["train", "single", *words, *qwen]) == 0
    folder = tmp_path / "exported"
    assert main(["export", str(tmp_path / "run"), "--to", str(folder)]) == 0
    said, card = capsys.readouterr().out, (folder / "README.md").read_text()
    expected = load_trained(tmp_path / "run").stored.tokenizer.encode([text])[0]
    differs = AutoTokenizer.from_pretrained(folder)(text)["input_ids"] != expected
    assert differs or transformers.__version__ < "5.4"
    for notice in (said, card):
        told = "for a Qwen2ForCausalLM: use PreTrainedTokenizerFast.from_pretrained(" in notice
        assert told == differs
    assert PreTrainedTokenizerFast.from_pretrained(folder)(text)["input_ids"] == expected


def test_a_card_is_of_the_exported_checkpoint(small: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["--run.keep_checkpoints", "9", "--run.checkpoint_every", "1"]
    assert main(["train", "diloco", *small, *words]) == 0
    first, *_ = Records(run).read()
    export(load_trained(run, round=1), tmp_path / "exported")
    card = (tmp_path / "exported" / "README.md").read_text()
    results = dict(re.findall(r"^\| (.+) \| (.+) \|$", card, re.MULTILINE))
    loss = f"{first['val_loss']:.4f}"
    assert results["final validation loss (nats per token)"] == loss
    assert results["best validation loss (nats per token)"] == loss
    assert results["tokens"] == f"{first['tokens']:,}"


def test_a_classifier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import pipeline

    rows = "".join(
        json.dumps({"text": ("good " if row % 2 else "bad ") + "x" * (row % 9), "label": row % 2})
        + "\n"
        for row in range(80)
    )
    (tmp_path / "rows.jsonl").write_text(rows)
    sizes = (
        "{ hidden_size = 32, num_hidden_layers = 1, num_attention_heads = 2, intermediate_size = "
        '64, max_position_embeddings = 32, problem_type = "multi_label_classification" }'
    )
    words = shlex.split(
        "--task.kind classification --model.source transformers --model.name bert "
        "--model.pretrained false --data.context_tokens 16 --data.validation_samples 20 "
        "--task.evaluation_per_class 10 --run.tokens 8000 --inner.optimizer adamw "
        "--inner.lr 5e-3 --run.trackers none"
    )
    words += ["--model.overrides", sizes, "--data.path", str(tmp_path / "rows.jsonl")]
    words += ["--data.cache", str(tmp_path / "cache"), "--run.folder", str(tmp_path / "run")]
    assert main(["train", "single", *words]) == 0
    export = ["export", str(tmp_path / "run"), "--to", str(tmp_path / "exported")]
    assert main([*export, "--labels", "bad,good,fair"]) == 2
    assert "--labels must be 2 different names, one for each class, got 'bad,good,fair'" in (
        capsys.readouterr().err
    )
    assert main([*export, "--labels", "bad,good"]) == 0
    assert 'license: "unknown"' in (tmp_path / "exported" / "README.md").read_text()
    classifier = pipeline("text-classification", model=str(tmp_path / "exported"))
    trained = load_trained(tmp_path / "run")
    ids = torch.tensor(trained.stored.tokenizer.encode_whole(["good xxx"], 16))
    assert classifier.tokenizer("good xxx")["input_ids"] == ids[0].tolist()
    trained.model.eval()
    logits = trained.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0]
    expected = dict(zip(("bad", "good"), torch.softmax(logits, 0).tolist(), strict=True))
    found = {each["label"]: each["score"] for each in classifier("good xxx", top_k=2)}
    assert found == pytest.approx(expected, abs=1e-5)
    assert abs(found["good"] - 0.5) > 0.1, "it has learned something"


def test_refusals(small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path), "--to", str(tmp_path / "x")]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    assert main(["train", "single", *small]) == 0
    (tmp_path / "there").mkdir()
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "there")]) == 2
    assert "exists already; give a folder that does not" in capsys.readouterr().err
    (tmp_path / "file").touch()
    below = str(tmp_path / "file" / "model")
    assert main(["export", str(tmp_path / "run"), "--to", below]) == 2
    assert f"--to '{below}' cannot be made (" in capsys.readouterr().err
    assert (
        main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "y"), "--trainer", "7"]) == 2
    )
    assert (
        main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "y"), "--labels", "a,b"]) == 2
    )
    assert "names the classes of a classifier" in capsys.readouterr().err
    assert not (tmp_path / "y").exists()


@pytest.mark.parametrize(
    ("name", "padding"),
    [
        ("llama", "<pad>"),
        ("bert", "<end>"),
        pytest.param("bert", "<pad>", marks=pytest.mark.nightly),
    ],
)
def test_a_classifier_reads_off_where_its_padding_begins(
    name: str, padding: str, tmp_path: Path
) -> None:
    """Its padding is the tokenizer's, or the end of a text if that has none; 0, which a bert takes
    by default, is the id of a word.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        PreTrainedTokenizerFast,
    )

    words = ["a", "<pad>", "<end>", *"bcdefgh"]
    bare = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, "a"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    own = {"pad_token": padding} if padding == "<pad>" else {}
    own["padding_side"] = "left"  # A run pads on the right, whatever its tokenizer does.
    fast = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<end>", **own)
    fast.save_pretrained(tmp_path / "tokenizer")
    texts = [" ".join("abcdefgh"[row % 8 :][: 1 + row % 5]) for row in range(80)]
    rows = (json.dumps({"text": text, "label": row % 2}) for row, text in enumerate(texts))
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    sizes = "vocab_size = 10, hidden_size = 16, num_hidden_layers = 1, num_attention_heads = 2, "
    sizes += "intermediate_size = 32, max_position_embeddings = 32"
    flags = {
        "task.kind": "classification",
        "task.evaluation_per_class": "5",
        "model.source": "transformers",
        "model.name": name,
        "model.pretrained": "false",
        "model.overrides": f"{{ {sizes} }}",
        "data.path": str(tmp_path / "rows.jsonl"),
        "data.tokenizer": str(tmp_path / "tokenizer"),
        "data.context_tokens": "8",
        "data.cache": str(tmp_path / "cache"),
        "data.validation_samples": "20",
        "run.tokens": "2000",
        "run.trackers": "none",
        "run.folder": str(tmp_path / "run"),
    }
    given = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
    assert main(["train", "single", *given]) == 0
    export(load_trained(tmp_path / "run"), tmp_path / "exported")
    model: Any = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert tokenizer.pad_token_id == model.config.pad_token_id == words.index(padding)
    assert tokenizer("bad")["input_ids"] == fast("bad")["input_ids"], "no word is special"
    with torch.no_grad():
        together = model(**tokenizer(texts[:10], padding=True, return_tensors="pt")).logits
        alone = [model(**tokenizer(text, return_tensors="pt")).logits for text in texts[:10]]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-6)


def test_a_text_begins_with_the_end_of_the_one_before(small: list[str], tmp_path: Path) -> None:
    """The tokenizer's own token for a beginning was never trained."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = ["<begin>", "<end>", *"abcdefgh"]
    bare = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, "a"))
    bare.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bare, bos_token="<begin>", eos_token="<end>", unk_token="a"
    )
    fast.save_pretrained(tmp_path / "tokenizer")
    own = ["--data.tokenizer", str(tmp_path / "tokenizer"), "--data.path", str(tmp_path / "text")]
    (tmp_path / "text").write_text("a b c d e f g h " * 500)
    assert main(["train", "single", *small, "--run.tokens", "1000", *own]) == 0
    export(load_trained(tmp_path / "run"), tmp_path / "exported")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported")
    assert tokenizer.bos_token == tokenizer.eos_token == "<end>"
    assert tokenizer("a b")["input_ids"] == [2, 3]
