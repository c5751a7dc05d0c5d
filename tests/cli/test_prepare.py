"""`adloco prepare`, and training on datasets: whole, streamed, interrupted and continued."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from adloco.cli.main import main
from tests.problems import SHARED_DATA, needs_shared_data

pytest.importorskip("datasets", reason="datasets is not installed")
ROWS = 12_000


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards of short texts and a validation split."""
    folder = tmp_path_factory.mktemp("dataset")
    rng = random.Random(1)
    for name, rows in [*((f"train-{shard}", ROWS // 4) for shard in range(4)), ("validation", 60)]:
        texts = (
            " ".join(rng.choices(["one", "two", "three", "four"], k=rng.randint(5, 40)))
            for _ in range(rows)
        )
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )
    return folder


def flags(**settings: Any) -> list[str]:
    return [
        word
        for key, value in settings.items()
        for word in (f"--data.{key}", str(value).lower() if isinstance(value, bool) else str(value))
    ]


def files(cache: Path) -> dict[str, bytes]:
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    return {
        f"{folder.name}/{path.name}": path.read_bytes()
        for path in folder.iterdir()
        if path.is_file()
    }


def numbers(run: Path) -> list[Any]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["tokens"], row["train_loss"], row["val_loss"]) for row in rows]


def without_path(small: list[str]) -> list[str]:
    at = small.index("--data.path")
    return small[:at] + small[at + 2 :]


@pytest.mark.nightly
def test_prepare_killed_and_gone_on_with_by_another_number_of_processes(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["single", *flags(dataset=dataset, validation_split="validation")]
    assert main(["prepare", *given, *flags(cache=tmp_path / "whole"), "--processes", "1"]) == 0
    out = capsys.readouterr().out
    (folder,) = (path for path in (tmp_path / "whole").iterdir() if path.is_dir())
    meta = json.loads((folder / "meta.json").read_text())
    numbers = (
        f"{meta['train']:,} tokens to train on and {meta['validation']:,} to validate on, from "
        "12,060 texts in 12,060 rows"
    )
    assert out == f"{folder}: {numbers}\n"

    words = [
        sys.executable,
        "-m",
        "adloco",
        "prepare",
        *given,
        *flags(cache=tmp_path / "cut"),
        "--processes",
        "1",
    ]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not [
        path
        for path in (tmp_path / "cut").glob("*/meta.json")
        if json.loads(path.read_text())["chunks"] >= 3
    ]:
        assert time.monotonic() < deadline, "nothing was prepared"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (cut,) = (tmp_path / "cut").glob("*/meta.json")
    assert 3 <= json.loads(cut.read_text())["chunks"] < meta["chunks"], (
        "it was done before it could be killed"
    )
    assert main(["prepare", *given, *flags(cache=tmp_path / "cut"), "--processes", "2"]) == 0
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    # A run finds it, and a stream, too.
    assert main(["prepare", *given, *flags(cache=tmp_path / "cut"), "--processes", "2"]) == 0
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_a_text_that_is_shorter_than_one_window(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is prepared, and what a run would refuse is said at once; 5 of 100 bytes are held
    out, and each part has an end of the text.
    """
    (tmp_path / "short.txt").write_text("a" * 100)
    given = ["prepare", *flags(path=tmp_path / "short.txt", cache=tmp_path / "cache")]
    for context, words in ((96, "97, and there are 96 to train"), (6, "7, and there are 6 to")):
        assert main([*given, *flags(context_tokens=context), "--processes", "1"]) == 2
        said = capsys.readouterr()
        assert "tokens to train on and" in said.out
        assert (
            f"is too short for one window of {context} tokens: a window takes {words}" in said.err
        )
    assert "to evaluate on; give more text, hold out more of it" in said.err
    assert main([*given, *flags(context_tokens=5), "--processes", "1"]) == 0, "one window"
    (tmp_path / "splits").mkdir()
    for split, text in (("train", "a" * 100), ("validation", "a")):
        (tmp_path / "splits" / f"{split}.jsonl").write_text(json.dumps({"text": text}))
    given[1:3] = flags(dataset=tmp_path / "splits", validation_split="validation")
    assert main([*given, *flags(context_tokens=5), "--processes", "1"]) == 2
    assert "give more text, name another data.validation_split" in capsys.readouterr().err


def test_a_bad_row_late_in_a_preparation(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(dataset, tmp_path / "copy")
    with (copy / "train-0.jsonl").open("a") as file:
        file.write('{"text": ""}\n')
    given = [
        "single",
        *flags(dataset=copy, validation_split="validation", samples=4000, cache=tmp_path / "cache"),
    ]
    for processes in ("1", "2"):
        assert main(["prepare", *given, "--processes", processes]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert (
            "train-0.jsonl row 3001 holds no text in column 'text'; fill or remove it, or "
            "leave such rows out with data.bad_rows skip"
        ) in error
        (meta,) = (tmp_path / "cache").glob("*/meta.json")
        assert (
            json.loads(meta.read_text())["rows"] == 60 + 3000 // 256 * 256
        )  # All whole chunks before it.
    assert main(["prepare", *given, *flags(bad_rows="skip"), "--processes", "1"]) == 0
    assert (
        "1 of 4060 rows were left out, as data.bad_rows says (1 x empty text)"
        in capsys.readouterr().out
    )


@pytest.mark.nightly
def test_preparing_a_path_and_an_endless_stream(
    corpus: Path,
    small: list[str],
    dataset: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = flags(path=corpus, cache=tmp_path / "cache", tokenizer="bpe:300")
    assert main(["prepare", "single", *given, "--processes", "2"]) == 0
    before = files(tmp_path / "cache")
    assert (
        main(["train", "single", *small, *flags(tokenizer="bpe:300"), "--run.tokens", "500"]) == 0
    )
    assert files(tmp_path / "cache") == before
    capsys.readouterr()
    for words, message in [
        (
            flags(dataset=dataset, validation_split="validation", streaming=True),
            "data.streaming is true, so say how much to prepare; set data.samples",
        ),
        (["--processes", "0"], "--processes must be >= 1, got 0"),
    ]:
        assert main(["prepare", "single", *words]) == 2
        assert message in capsys.readouterr().err


def test_a_streamed_run_resumes_bit_for_bit(
    dataset: Path, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from adloco.run.training_run import TrainingRun

    streamed = [
        *without_path(small),
        *flags(dataset=dataset, validation_split="validation", streaming=True),
        "--run.checkpoint_every",
        "1",
    ]
    assert (
        main(
            [
                "train",
                "diloco",
                *streamed,
                *flags(cache=tmp_path / "one"),
                "--run.folder",
                str(tmp_path / "whole"),
            ]
        )
        == 0
    )
    cached = json.loads(next((tmp_path / "one").glob("*/meta.json")).read_text())
    assert cached["complete"] is False
    written = (tmp_path / "whole" / "metrics.jsonl").read_text()
    records = [json.loads(line) for line in written.splitlines()]
    assert records[-1]["rows_read"] == cached["rows"]
    log = (tmp_path / "whole" / "train.log").read_text()
    assert f"  {cached['rows']:,} rows read" in log
    # Two processes that share a cache, cut off after three rounds, and resumed after the cache
    # was lost.
    words = [
        "train",
        "diloco",
        *streamed,
        *flags(cache=tmp_path / "two"),
        "--run.folder",
        str(tmp_path / "cut"),
    ]
    assert main(words) == 0
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    kept = sorted((tmp_path / "cut" / "checkpoints").iterdir())
    shutil.rmtree(kept[-1])
    shutil.rmtree(tmp_path / "two")
    run = TrainingRun.resume(tmp_path / "cut")
    assert not run.finished
    assert len(list(run.rounds())) == 1
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    assert main(["evaluate", str(tmp_path / "cut")]) == 0


@pytest.mark.nightly
def test_ranks_that_share_a_stream(dataset: Path, small: list[str], tmp_path: Path) -> None:
    streamed = [
        *without_path(small),
        *flags(dataset=dataset, validation_split="validation", streaming=True),
        "--run.tokens",
        "8000",
    ]
    assert (
        main(
            [
                "train",
                "diloco",
                *streamed,
                *flags(cache=tmp_path / "one"),
                "--run.folder",
                str(tmp_path / "alone"),
            ]
        )
        == 0
    )
    words = [
        "train",
        "diloco",
        *streamed,
        *flags(cache=tmp_path / "two"),
        "--run.folder",
        str(tmp_path / "ranks"),
        "--ranks",
        "2",
    ]
    assert main(words) == 0
    assert numbers(tmp_path / "ranks") == numbers(tmp_path / "alone")
    assert files(tmp_path / "one") == files(tmp_path / "two")


@needs_shared_data
@pytest.mark.nightly
@pytest.mark.parametrize("streaming", [False, True])
def test_c4_with_the_llama_vocabulary(streaming: bool, small: list[str], tmp_path: Path) -> None:
    given = flags(
        dataset=SHARED_DATA / "hub_like" / "allenai" / "c4",
        config="en",
        validation_split="validation",
        validation_samples=20,
        samples=0 if streaming else 100,
        streaming=streaming,
        tokenizer=SHARED_DATA / "tokenizers" / "llama2",
    )
    assert main(["train", "single", *without_path(small), *given, "--run.tokens", "3000"]) == 0
    metrics = numbers(tmp_path / "run")
    assert metrics[-1][2] < metrics[0][2] < 11
    (meta,) = (tmp_path / "cache").glob("*/meta.json")
    assert json.loads(meta.read_text())["rows"] == (20 + 256 if streaming else 120)


@pytest.mark.nightly
@needs_shared_data
def test_a_stream_of_c4_cut_in_the_middle_prepares_the_same_cache(tmp_path: Path) -> None:
    from adloco.data.data_settings import DataSettings
    from adloco.data.token_cache import begin_cache

    given = {
        "dataset": str(SHARED_DATA / "hub_like" / "allenai" / "c4"),
        "config": "en",
        "validation_split": "validation",
        "samples": 700,
        "tokenizer": str(SHARED_DATA / "tokenizers" / "llama2"),
    }
    assert (
        main(
            [
                "prepare",
                "single",
                *flags(**given, streaming=True, cache=tmp_path / "whole"),
                "--processes",
                "1",
            ]
        )
        == 0
    )
    cut = begin_cache(DataSettings(**given, streaming=True, cache=str(tmp_path / "cut")))
    cut.at_least(200_000)
    assert not cut.store.state.complete
    assert (
        main(["prepare", "single", *flags(**given, cache=tmp_path / "cut"), "--processes", "1"])
        == 0
    )
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
