"""Whole runs: their files, their numbers, resuming bit for bit."""

import gc
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adloco.cli.main import main
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.setting_words import take_settings
from adloco.config.shipped import shipped_recipes
from adloco.distributed.testing import run_on_ranks
from adloco.options import option_metrics
from adloco.run import saving, training_run
from adloco.run.checkpoint import list_all, list_checkpoints
from adloco.run.environment import describe_environment
from adloco.run.training_run import TrainingRun
from tests.problems import SHARED_DATA, cases, needs_shared_data, without_timings

SHAKESPEARE = SHARED_DATA / "tinyshakespeare" / "input.txt"
MERGING = ["--merge.first_round", "2", "--merge.every", "3", "--batch.maximum", "24"]
SHORT = [*MERGING, "--run.rounds", "6"]
"""Merges after rounds 2 and 5, and a round after them."""
METRICS = {
    "round",
    "tokens",
    "samples",
    "inner_steps",
    "syncs",
    "bytes_communicated",
    "bytes_sent",
    "bytes_inside",
    "bytes_ddp_equivalent",
    "seconds",
    "tokens_per_second",
    "mfu",
    "rows_read",
    "train_loss",
    "val_loss",
    "val_perplexity",
    "val_bits_per_byte",
    "learning_rate",
    "memory_bytes",
    "memory",
    "sync",
    "trainers",
    "workers",
    "merges",
}
TRAINER = {
    "trainer",
    "workers",
    "requested_batch",
    "worker_batch",
    "micro_batch",
    "accumulation_steps",
    "rounded_up",
    "grad_variance",
    "grad_norm_sq",
    "noise_scale",
    "train_loss",
    "val_loss",
    "val_perplexity",
    "val_bits_per_byte",
    "cosine_similarity",
    "wire_error",
    "distance_to_mean",
}
FROM_THE_HUB = ("adloco-imdb", "adloco-paper", "diloco-paper")
"""Recipes whose model and data come from the hub; test_classification.py and test_hub_recipes.py
run most of them on local copies.
"""
SUMMARY = {
    "sample",
    "final_val_loss",
    "best_val_loss",
    "final_val_perplexity",
    "best_val_perplexity",
    "final_val_bits_per_byte",
    "best_val_bits_per_byte",
    "tokens",
    "syncs",
    "bytes",
    "bytes_sent",
    "bytes_inside",
    "compression_ratio",
    "cosine_similarity",
    "wire_error",
    "exposed_seconds",
    "hidden_seconds",
    "corpus",
    "peak_bytes_per_second",
    "seconds",
    "rounds",
    "skipped_steps",
    "restarts",
    "interruptions",
    "tokens_repeated",
    "seconds_lost",
    "goodput",
    "num_parameters",
    "recipe",
}


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in file.read_text().splitlines()]


def test_a_run_on_a_cpu_names_its_processor() -> None:
    known = getattr(torch.cpu, "get_capabilities", dict)().get("cpu_name")
    if not known:
        pytest.skip("this torch does not know the name")
    assert describe_environment(torch.device("cpu"), None, seed=0)["device"] == known


def numbers(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the machine."""
    return [without_timings(line) for line in lines(folder / "metrics.jsonl")]


@pytest.mark.parametrize(
    "name",
    cases(
        {name: (name,) for name in shipped_recipes() if name not in FROM_THE_HUB},
        default=("adloco", "ddp-norm"),
    ),
)
def test_every_shipped_recipe_runs_and_learns(name: str, small: list[str], tmp_path: Path) -> None:
    assert main(["train", name, *small, "--run.tokens", "16000"]) == 0
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} == {
        ".lock",
        "recipe.toml",
        "environment.json",
        "metrics.jsonl",
        "steps.jsonl",
        "starts.jsonl",
        "checkpoints",
        "report.html",
        "summary.json",
        "tokenizer",
        "train.log",
        "model",
    }
    metrics, summary, steps = (
        lines(folder / "metrics.jsonl"),
        json.loads((folder / "summary.json").read_text()),
        lines(folder / "steps.jsonl"),
    )
    assert all(
        set(line) >= METRICS and set(row) >= TRAINER for line in metrics for row in line["trainers"]
    )
    added = option_metrics().values()
    of_options = {metric.name for metric in added if metric.aggregation == "sum"}
    assert set(summary) == SUMMARY | of_options
    assert (summary["recipe"], summary["rounds"], summary["tokens"]) == (
        name,
        len(metrics),
        metrics[-1]["tokens"],
    )
    assert summary["tokens"] == 16000
    losses = [line["val_loss"] for line in metrics if line["val_loss"] is not None]
    assert losses[-1] < losses[0]
    # Step losses add up to the counters: samples of all steps, and the loss of the first round.
    assert sum(step["samples"] for step in steps) == metrics[-1]["samples"]
    first = [step for step in steps if step["round"] == 1]
    assert sum(step["loss"] * step["samples"] for step in first) / sum(
        step["samples"] for step in first
    ) == pytest.approx(metrics[0]["train_loss"])
    titles = {"Loss", "Batch of each trainer", "Communication", "Memory by phase of a round"}
    titles |= {of.title() for of in ("trainers", "workers") if len(metrics[0][of]) > 1}
    measured = any(row["noise_scale"] for line in metrics for row in line["trainers"])
    titles |= {"Gradient statistics"} if measured else set()
    titles |= {"Syncs"} if summary["syncs"] else set()
    page = (folder / "report.html").read_text()
    assert set(re.findall("<section>\n<h2>(.*)</h2>", page)) == titles
    # In packed bytes any four letters occur now and then.
    packed = r"<script type=.text/plain.*?</script>"
    text = re.sub(packed, "", page, flags=re.DOTALL)
    assert "http" not in text.replace("http-equiv", "")
    assert build_recipe(read_values(str(folder / "recipe.toml"))).run.folder == str(folder)


@pytest.mark.parametrize(
    "choices",
    [
        pytest.param(
            shlex.split(
                "--batch.rule warmup --batch.batches [12,16] --batch.after_samples [99,300]"
            ),
            marks=pytest.mark.nightly,
        ),
        shlex.split(
            "--merge.policy largest-with-smallest --merge.streams balance --learning_rate.shape wsd"
        ),
        pytest.param(
            shlex.split("--merge.policy none --inner.optimizer sgd --learning_rate.shape constant"),
            marks=pytest.mark.nightly,
        ),
        shlex.split(
            "--inner.optimizer muon --learning_rate.coupling sqrt --outer.optimizer Adam "
            "--outer.lr 0.001 --outer.options {}"
        ),
        shlex.split(
            "--merge.parameters uniform --merge.inner_state mean "
            "--merge.outer_momentum reset --merge.requested_batch sum"
        ),
        pytest.param(
            shlex.split(
                "--model.tie_embeddings true --model.num_kv_heads 1 --switch.mode always "
                "--batch.grow_only true --run.precision bf16"
            ),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["warmup", "largest-with-smallest", "sgd", "muon", "fates", "tied"],
)
def test_choices_of_a_recipe_run_and_learn(
    choices: list[str], small: list[str], tmp_path: Path
) -> None:
    assert main(["train", "adloco", *small, "--run.tokens", "8000", *choices]) == 0
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    assert metrics[-1]["val_loss"] < metrics[0]["val_loss"]


@needs_shared_data
def test_a_text_file_trains(small: list[str], tmp_path: Path) -> None:
    words = ["--data.path", str(SHAKESPEARE), "--data.validation_fraction", "0.1"]
    assert main(["train", "diloco", *small, *words]) == 0
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["final_val_loss"] < 4.5


def test_merges_accumulation_and_traffic_are_recorded(small: list[str], tmp_path: Path) -> None:
    words = shlex.split("--batch.eta 0.2 --batch.maximum 64 --run.tokens 40000")
    assert main(["train", "adloco", *small, *MERGING, *words]) == 0
    metrics = lines(tmp_path / "run" / "metrics.jsonl")
    merged = [line for line in metrics if line["merges"]]
    assert len(merged) == 1
    merge = merged[0]["merges"][0]
    assert merge["weights"].keys() == {"0", "1"}
    assert sum(merge["weights"].values()) == pytest.approx(1)
    assert max(row["accumulation_steps"] for line in metrics for row in line["trainers"]) > 1
    assert 0 < metrics[-1]["bytes_communicated"] < metrics[-1]["bytes_ddp_equivalent"]
    assert "trainer 1" in (tmp_path / "run" / "report.html").read_text()


def test_what_a_wire_format_does_is_recorded_and_drawn(small: list[str], tmp_path: Path) -> None:
    fragments = shlex.split(
        "--wire.format int4 --wire.feedback params --wire.feedback_decay 1 "
        "--streaming.fragments 2 --streaming.tau 1"
    )
    assert main(["train", "diloco", *small, *fragments]) == 0
    folder = tmp_path / "run"
    metrics, summary = (
        lines(folder / "metrics.jsonl"),
        json.loads((folder / "summary.json").read_text()),
    )
    for line in metrics:
        sync, (trainer,) = line["sync"], line["trainers"]
        # 128 values cross as 68 bytes and were 512, less what pads the last block of each tensor.
        assert 7 < sync["compression_ratio"] < 512 / 68
        assert 0 < trainer["wire_error"] < 1 / 3
        assert -1 <= trainer["cosine_similarity"] <= 1
        assert 0 <= sync["hidden_seconds"] <= sync["transfer_seconds"]
        assert sync["exposed_seconds"] > 0
        assert sync["peak_bytes_per_second"] is None, "in one process nothing crosses a link"
    assert (summary["wire_error"], summary["cosine_similarity"]) == tuple(
        metrics[-1]["trainers"][0][key] for key in ("wire_error", "cosine_similarity")
    )
    assert summary["hidden_seconds"] == pytest.approx(
        sum(line["sync"]["hidden_seconds"] for line in metrics)
    )
    assert summary["hidden_seconds"] > 0, "a fragment in flight is summed beside the steps"
    assert summary["compression_ratio"] == pytest.approx(metrics[0]["sync"]["compression_ratio"])
    page = (folder / "report.html").read_text()
    assert all(
        label in page
        for label in (
            "compressed by",
            "lost by the wire",
            "cosine of workers",
            "hidden: training",
            "<h2>Syncs</h2>",
        )
    )
    assert "rate of sending" not in page


UNTIL = """
import sys
from pathlib import Path
from adloco.run.training_run import TrainingRun
folder, rounds = sys.argv[1:]
for record in TrainingRun.resume(Path(folder)).rounds():
    if record["round"] == int(rounds):
        break
"""


@pytest.mark.usefixtures("warm_python")
def test_resume_is_bit_for_bit_across_merges_twice(small: list[str], tmp_path: Path) -> None:
    """All rounds at once give what 1, 3 more in a new process, and the rest in this one give;
    merges happen after rounds 2 and 5.
    """
    trainers = ["--method.num_trainers", "3", "--method.workers_per_trainer", "1", *SHORT]
    assert main(["train", "adloco", *small, *trainers, "--run.checkpoint_every", "1"]) == 0
    whole, parts = tmp_path / "run", tmp_path / "parts"
    expected = numbers(whole)
    assert [bool(line["merges"]) for line in expected] == [
        False,
        True,
        False,
        False,
        True,
        False,
    ]

    (tmp_path / "again.toml").write_text(
        (whole / "recipe.toml").read_text().replace(f'folder = "{whole}"', f'folder = "{parts}"')
    )
    rounds = TrainingRun.create(build_recipe(read_values(str(tmp_path / "again.toml")))).rounds()
    next(rounds)
    rounds.close()
    subprocess.run([sys.executable, "-c", UNTIL, str(parts), "4"], check=True, timeout=300)
    assert main(["train", "--resume", str(parts)]) == 0
    assert numbers(parts) == expected
    assert lines(parts / "steps.jsonl") == lines(whole / "steps.jsonl")
    newest = [list_checkpoints(folder / "checkpoints")[-1] for folder in (whole, parts)]
    names = [{path.name for path in checkpoint.iterdir()} for checkpoint in newest]
    assert names[0] == names[1]
    tensors = [name for name in names[0] if name.endswith(".safetensors")]
    assert len(tensors) == 5, "run, a trainer that is left, and three workers"
    for name in tensors:
        first, second = (load_file(checkpoint / name) for checkpoint in newest)
        assert first.keys() == second.keys()
        assert all(first[key].equal(second[key]) for key in first)


def make_run(name: str, words: list[str]) -> TrainingRun:
    given, _ = take_settings(words)
    return TrainingRun.create(build_recipe(override(read_values(name), given)))


def test_resume_restores_the_generator(small: list[str], tmp_path: Path) -> None:
    run = make_run("single", small)
    torch.manual_seed(123)
    next(iter(run.rounds()))
    run.stop()
    list(run.rounds())  # Saves.
    expected = torch.rand(3)
    torch.manual_seed(7)
    TrainingRun.resume(tmp_path / "run")
    assert torch.rand(3).equal(expected)


def test_a_line_cut_by_a_kill_does_not_hinder_resuming(small: list[str], tmp_path: Path) -> None:
    run = make_run("adloco", [*small, "--run.checkpoint_every", "1"])
    records = run.rounds()
    first, second = next(records), next(records)
    records.close()  # type: ignore[attr-defined]
    metrics = tmp_path / "run" / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text(whole + whole.splitlines()[-1].rpartition("}, {")[0] + "}")
    assert [record["round"] for record in TrainingRun.resume(tmp_path / "run").records.read()] == [
        first["round"],
        second["round"],
    ]
    assert metrics.read_text() == whole


def test_threads_do_not_change_a_run(small: list[str], tmp_path: Path) -> None:
    results = []
    for threads in ("1", "2"):
        folder = tmp_path / threads
        assert (
            main(
                [
                    "train",
                    "adloco",
                    *small,
                    *SHORT,
                    "--run.threads",
                    threads,
                    "--run.folder",
                    str(folder),
                ]
            )
            == 0
        )
        results.append(numbers(folder))
    assert results[0] == results[1]


def test_resume_within_a_round_forgets_nothing(small: list[str], tmp_path: Path) -> None:
    assert main(["train", "adloco", *small, *SHORT]) == 0
    expected = numbers(tmp_path / "run")

    run = make_run("adloco", [*small, *SHORT, "--run.folder", str(tmp_path / "stopped")])
    rounds = run.rounds()
    for _ in range(2):
        next(rounds)
    passes = itertools.count(1)
    run.algorithm.workers[0].model.register_forward_pre_hook(
        lambda model, inputs: run.stop() if next(passes) == 2 else None
    )
    assert list(rounds) == []
    assert run.algorithm.state.in_round
    resumed = TrainingRun.resume(tmp_path / "stopped")
    assert resumed.algorithm.state.in_round
    assert resumed.progress().tokens > resumed.newest["tokens"]
    assert len(list(resumed.rounds())) == len(expected) - 2
    assert numbers(tmp_path / "stopped") == expected


def test_rounds_have_other_steps_after_a_resume(small: list[str], tmp_path: Path) -> None:
    """From the next round on; one that was stopped within it ends as it began."""
    words = [*small, "--run.rounds", "4", "--method.sync_every", "4"]
    whole = make_run("diloco", [*words, "--run.folder", str(tmp_path / "whole")]).algorithm
    for steps in (4, 4, 7, 7):
        whole.round(inner_steps=steps)
    whole.load_global()
    run = make_run("diloco", words)
    passes = itertools.count(1)
    run.algorithm.workers[0].model.register_forward_pre_hook(
        lambda model, inputs: run.stop() if next(passes) == 6 else None
    )
    assert len(list(run.rounds())) == 1 and run.algorithm.state.in_round
    assert main(["train", "--resume", str(tmp_path / "run"), "--method.sync_every", "7"]) == 0
    rows = lines(tmp_path / "run" / "metrics.jsonl")
    assert [row["inner_steps"] for row in rows] == [4, 8, 15, 22]
    assert [row["sync_every"] for row in rows] == [4, 4, 7, 7]
    resumed = TrainingRun.resume(tmp_path / "run").algorithm
    resumed.load_global()
    for name, value in whole.model(0).state_dict().items():
        assert value.equal(resumed.model(0).state_dict()[name]), name
    (change,) = lines(tmp_path / "run" / "changes.jsonl")
    assert change == {"round": 1, "setting": "method.sync_every", "before": "4", "after": "7"}
    streamed = shlex.split("--streaming.fragments 2 --streaming.tau 2 --method.sync_every 8")
    folder = tmp_path / "streamed"
    make_run("diloco", [*words, *streamed, "--run.folder", str(folder)])
    with pytest.raises(ValueError, match="method.sync_every must be >= .* before the next one"):
        TrainingRun.resume(folder, [("method.sync_every", "4")])


def test_a_checkpoint_within_a_round_changes_nothing_and_is_resumed(
    small: list[str], tmp_path: Path
) -> None:
    """As run.checkpoint_seconds has it, but told by a hook in place of a clock."""
    assert main(["train", "adloco", *small, *SHORT]) == 0
    expected = numbers(tmp_path / "run")

    rare = ["--run.checkpoint_every", "1000", "--run.folder", str(tmp_path / "paused")]
    run = make_run("adloco", [*small, *SHORT, *rare])
    rounds = run.rounds()
    for _ in range(2):
        next(rounds)
    passes = itertools.count(1)
    hook = run.algorithm.workers[0].model.register_forward_pre_hook(
        lambda model, inputs: run.algorithm.stop() if next(passes) == 2 else None
    )
    next(rounds)
    run.saving.wait()
    hook.remove()
    kept = [path.name for path in list_all(tmp_path / "paused" / "checkpoints")]
    assert len(kept) == 2 and kept[-1].startswith("round-000002-"), "in the third round"
    shutil.copytree(tmp_path / "paused", tmp_path / "killed")
    assert len(list(rounds)) == len(expected) - 3
    assert numbers(tmp_path / "paused") == expected

    resumed = TrainingRun.resume(tmp_path / "killed")
    assert resumed.algorithm.state.in_round
    assert len(list(resumed.rounds())) == len(expected) - 2
    assert numbers(tmp_path / "killed") == expected


def paused_and_stopped(words: list[str]) -> list[float]:
    """A rank of a run that is paused in its second round, and stopped in its third.

    Returns:
        Tokens per second of the two rounds that end, where each stretch takes a second.
    """
    training_run.time = SimpleNamespace(monotonic=itertools.count().__next__)  # type: ignore[attr-defined]
    run = make_run("diloco", words)
    passes = itertools.count(1)

    def act(model: Any, inputs: Any) -> None:
        number = next(passes)
        if number in (6, 10):  # Rounds have four steps.
            (run.algorithm.stop if number == 6 else run.stop)()

    worker = next(iter(run.algorithm.workers.values()))
    worker.model.register_forward_pre_hook(act)
    return [record["tokens_per_second"] for record in run.rounds()]


def test_tokens_of_a_round_that_was_paused_are_those_of_all_ranks(
    small: list[str], tmp_path: Path
) -> None:
    found = run_on_ranks(paused_and_stopped, 2, [*small, "--evaluation.every", "1000"])
    first, stop = (
        json.loads((tmp_path / "run" / name).read_text().splitlines()[line])
        for name, line in (("metrics.jsonl", 0), ("starts.jsonl", -1))
    )
    assert found[0] == found[1] == [first["tokens"], first["tokens"] / 2]
    assert stop["kind"] == "stop"
    # The stop is heard after the step, and the other rank's worker has trained two, too.
    assert stop["tokens"] == 2.5 * first["tokens"]


def test_a_round_that_was_stopped_is_continued_by_the_same_run(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its speed is that of what was left, and its lines agree about the tokens."""
    run = make_run("diloco", [*small, "--evaluation.every", "1000"])
    passes = itertools.count(1)
    worker = next(iter(run.algorithm.workers.values()))
    hook = worker.model.register_forward_pre_hook(
        lambda model, inputs: run.stop() if next(passes) == 6 else None
    )
    (first,) = run.rounds()
    hook.remove()
    seconds = SimpleNamespace(monotonic=itertools.count().__next__)
    monkeypatch.setattr(training_run, "time", seconds)
    second = next(run.rounds())
    lines = (tmp_path / "run" / "starts.jsonl").read_text().splitlines()
    begun, stopped, resumed = (json.loads(line)["tokens"] for line in lines)
    assert begun == 0 < first["tokens"] < stopped == resumed
    assert second["tokens_per_second"] == second["tokens"] - stopped


def test_the_time_without_a_checkpoint_is_limited(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timer of each round has what is left of the time, and ends with the round."""
    begun: list[tuple[float, Any]] = []
    ended: list[bool] = []

    class Told:
        def __init__(self, seconds: float, function: Any) -> None:
            begun.append((seconds, function))
            self.daemon = False

        def start(self) -> None:
            if len(begun) == 2:
                begun[-1][1]()

        def cancel(self) -> None:
            pass

        def join(self) -> None:
            ended.append(True)

    monkeypatch.setattr(saving, "Timer", Told)
    run = make_run("diloco", [*small, "--run.checkpoint_seconds", "5"])
    done = len(list(run.rounds()))
    assert len(begun) == len(ended) == done + 1, "one round was paused"
    assert all(seconds <= 5 for seconds, _ in begun)
    off = make_run(
        "diloco", [*small, "--run.checkpoint_seconds", "0", "--run.folder", str(tmp_path / "off")]
    )
    next(off.rounds())
    assert len(begun) == done + 1


def test_a_bpe_run_keeps_its_tokenizer(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "single", *small, "--data.tokenizer", "bpe:300"]) == 0
    assert main(["generate", str(tmp_path / "run"), "--prompt", "alpha beta", "--tokens", "5"]) == 0
    assert "\nalpha beta" in capsys.readouterr().out


def test_evaluate_agrees_with_the_run(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], corpus: Path
) -> None:
    assert main(["train", "diloco", *small, "--evaluation.windows", "0"]) == 0
    capsys.readouterr()
    final = json.loads((tmp_path / "run" / "summary.json").read_text())["final_val_loss"]
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    assert f"loss {final:.4f} nats per token" in capsys.readouterr().out
    words = ["--data.path", str(corpus / "00.txt"), "--windows", "5"]
    assert main(["evaluate", str(tmp_path / "run"), *words]) == 0
    assert "over 160 tokens" in capsys.readouterr().out


def test_evaluate_says_which_rows_it_left_out(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "single", *small, "--data.bad_rows", "skip"]) == 0
    rows = [{"text": "alpha beta " * 20}, {"text": ""}, {"text": None}]
    (tmp_path / "other.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    capsys.readouterr()
    other = ["--data.path", str(tmp_path / "other.jsonl")]
    assert main(["evaluate", str(tmp_path / "run"), *other]) == 0
    assert "2 of 3 rows were left out" in capsys.readouterr().out


def test_report_can_be_drawn_again(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "single", *small]) == 0
    (tmp_path / "run" / "report.html").unlink()
    assert main(["report", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "report.html").exists()
    said = capsys.readouterr().out
    assert "sampling a text, and drawing the report ..." in said.splitlines()
    files = [tmp_path / "run" / name for name in ("summary.json", "report.html")]
    before = [file.stat().st_mtime_ns for file in files]
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "has spent its budget" in said and f"its report is {files[1]}" in said
    assert [file.stat().st_mtime_ns for file in files] == before
    files[1].unlink()
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0
    assert files[1].exists()


def test_a_run_folder_is_trained_by_one_process_at_a_time(
    small: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = make_run("single", [*small, "--run.checkpoint_every", "1"])
    rounds = run.rounds()
    next(rounds)
    assert main(["train", "--resume", str(tmp_path / "run")]) == 2
    assert (
        "is in use by another process; wait until it has ended, or end it"
        in capsys.readouterr().err
    )
    rounds.close()
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0


def test_a_run_that_another_process_has_trained_is_read_again_first(
    small: list[str], tmp_path: Path
) -> None:
    first = make_run("single", [*small, "--run.tokens", "4096"])
    second = TrainingRun.resume(tmp_path / "run")
    list(first.rounds())
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="since it was read; resume it again"):
        next(second.rounds())
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


def test_a_run_keeps_the_record_of_one_round(small: list[str]) -> None:
    """Records are read from their file when they are needed, so that memory does not grow."""
    gc.freeze()  # What other tests have left is not looked at.
    run = make_run("diloco", [*small, "--run.rounds", "5", "--run.keep_best"])

    def kept() -> int:
        seconds = [record["seconds"] for record in run.records.read()]
        gc.collect()
        objects = [each for each in gc.get_objects() if type(each) is dict]
        return sum(each.get("seconds") in seconds and "train_loss" in each for each in objects)

    assert [kept() for _ in run.rounds()] == [1] * 5
    assert len(run.records.read()) == 5
    gc.unfreeze()
