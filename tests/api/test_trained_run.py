"""`adloco.load`: records, model and summary are those in the run's folder."""

import json
import sys
from operator import methodcaller
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import adloco
from adloco.cli.main import main
from adloco.cli.terminal import printable
from adloco.config.setting_words import take_settings
from tests.conftest import small_flags


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> adloco.TrainedRun:
    """A finished run of two trainers."""
    flags = small_flags(corpus, tmp_path_factory.mktemp("load"))
    settings, _ = take_settings([*flags, "--run.tokens", "4000", "--method.num_trainers", "2"])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("adloco.cli.training_loop.write_report", lambda folder: None)
        return adloco.train("diloco", **dict(settings))


def test_tables_have_the_records(run: adloco.TrainedRun) -> None:
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert run.records == lines
    rounds = run.dataframe()
    assert list(rounds["round"]) == [line["round"] for line in lines]
    assert list(rounds["val_loss"]) == [line["val_loss"] for line in lines]
    expected = [line["trainers"][1]["train_loss"] for line in lines]
    assert list(rounds["trainer-1/train_loss"]) == expected
    trainers = run.dataframe("trainers")
    assert list(trainers[trainers["trainer"] == 1]["train_loss"]) == expected
    assert list(trainers["tokens"]) == [line["tokens"] for line in lines for _ in range(2)]
    assert len(run.dataframe("workers")) == 4 * len(lines)
    steps = (run.folder / "steps.jsonl").read_text().splitlines()
    assert list(run.dataframe("steps")["loss"]) == [json.loads(line)["loss"] for line in steps]
    with pytest.raises(ValueError, match="rows must be one of rounds, trainers, workers, steps"):
        run.dataframe("round")  # type: ignore[arg-type]


def test_without_pandas_a_sentence_says_what_to_install(
    run: adloco.TrainedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ValueError, match=r"pip install 'adloco\[pandas\]', or use records"):
        run.dataframe()


def test_the_model_is_the_one_that_was_evaluated(run: adloco.TrainedRun) -> None:
    assert isinstance(run.model, nn.Module)
    assert not run.model.training, "dropout and running statistics would change what it says"
    last = run.records[-1]
    assert run.evaluate()["loss"] == pytest.approx(last["val_loss"], rel=1e-6)
    assert last["trainers"][run.trainer]["val_loss"] == last["val_loss"]
    other = adloco.load(run.folder, trainer=1 - run.trainer)
    assert other.evaluate()["loss"] == pytest.approx(
        last["trainers"][other.trainer]["val_loss"], rel=1e-6
    )
    assert run.tokenizer.decode(run.tokenizer.encode(["alpha"])[0]) == "alpha"
    assert run.summary["final_val_loss"] == last["val_loss"]
    assert run.recipe.method.num_trainers == 2


def test_text_is_continued_as_by_the_command(
    run: adloco.TrainedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--tokens", "20", "--seed", "3", "--prompt", "alpha "]
    assert main(["generate", str(run.folder), *words]) == 0
    text = run.generate("alpha ", tokens=20, seed=3)
    assert text.startswith("alpha ") and len(text) > 10
    assert printable(text) == capsys.readouterr().out.removesuffix("\n")
    with pytest.raises(ValueError, match="temperature must be 0, or >= 1e-06 and finite, got -1"):
        run.generate("", tokens=5, temperature=-1)
    assert run.generate("alpha ", tokens=np.int64(20), seed=np.int64(3)) == text  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokens must be a whole number, got 2.5"):
        run.generate("", tokens=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="temperature must be a number, got 'hot'"):
        run.generate("", temperature="hot")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="windows must be a whole number, got 2.5"):
        run.evaluate(windows=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="data.path '' names no text"):
        run.evaluate(data="")
    with pytest.raises(ValueError, match="the prompt holds bytes that are no UTF-8 text"):
        run.generate("a\udcff")


def test_a_run_is_shown_in_a_line_and_in_a_table(run: adloco.TrainedRun) -> None:
    last = run.records[-1]
    facts = f"rounds {last['round']}, tokens {last['tokens']:,}, val_loss {last['val_loss']:.4f}"
    expected = f"<adloco run {str(run.folder)!r}: recipe diloco, state finished, {facts}>"
    assert repr(run) == expected
    assert f"<th>val_loss</th><td>{last['val_loss']:.4f}</td>" in methodcaller("_repr_html_")(run)


def test_no_run_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a run folder"):
        adloco.load(tmp_path)
