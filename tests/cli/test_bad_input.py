"""Bad input: one sentence on stderr that says what to change, exit code 2, nothing half-written, no traceback."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from adloco.cli.main import main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--run.token", "5"], "did you mean 'tokens'?"),
        (["--batch.eta", "-1"], "batch.eta must be > 0, got -1.0 (recipe section [batch])"),
        (["--batch.maximum", "2"], "batch.maximum must be >= batch.initial"),
        (["--run.tokens", "many"], "run.tokens must be a valid integer"),
        (["--run.tokens"], "--run.tokens needs a value"),
        (["adlocco"], "did you mean 'adloco'?"),
        (["--data.path", "/no/such/file"], "data.path '/no/such/file' does not exist"),
        (["--data.tokenizer", "/no/such/tokenizer"], "data.tokenizer '/no/such/tokenizer' could not be loaded"),
        (["--data.tokenizer", "bpe:1"], "data.tokenizer bpe needs a size above 256"),
        (["--data.context_tokens", "1000", "--batch.initial", "64"], "windows of 1000 tokens to train on, but one inner step needs"),
        (["--method.num_trainers", "100000"], "but one inner step needs"),
        (["--model.hidden_size", "65536", "--model.intermediate_size", "100000"], "GiB; use fewer workers or a smaller model"),
        (["--run.device", "quantum"], "run.device must be auto, cpu or cuda, got 'quantum'"),
        (["--run.device", "cuda:9"], "run.device 'cuda:9' is not available"),
        (["--outer.optimizer", "Nesterov"], "outer.optimizer must name an optimizer of torch.optim"),
        (["--resume", "/no/such/run"], "leave out --run.tokens"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
)
def test_train(words: list[str], message: str, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = [*words, *small] if not words[0].startswith("--") or (len(words) == 1 and words[0] == "--unknown") else [*small, *words]
    assert main(["train", *order]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("adloco: ")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    assert not (tmp_path / "run").exists()


def test_an_existing_run_folder(small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    assert main(["train", *small]) == 2
    assert "exists already; use another --run.folder, or go on with it by adloco train --resume" in capsys.readouterr().err
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("command", ["evaluate", "report", "generate", "train --resume"])
def test_what_is_no_run_folder(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = ["--prompt", "x"] if command == "generate" else []
    assert main([*command.split(), str(tmp_path), *prompt]) == 2
    assert "is not a run folder (no recipe.toml in it); give one that `adloco train` wrote" in capsys.readouterr().err


def test_damaged_and_missing_checkpoints_and_changed_data(small: list[str], tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    own = tmp_path / "text.txt"
    own.write_text("".join(path.read_text() for path in sorted(corpus.iterdir())))
    assert main(["train", *small, "--data.path", str(own)]) == 0
    capsys.readouterr()

    text = own.read_text()
    own.write_text(text.replace("alpha", "omega"))
    assert main(["train", "--resume", str(run)]) == 2
    assert "is not what the run in" in capsys.readouterr().err
    own.write_text(text)

    recipe = (run / "recipe.toml").read_text()
    (run / "recipe.toml").write_text(recipe.replace("intermediate_size = 48", "intermediate_size = 64"))
    assert main(["train", "--resume", str(run)]) == 2
    assert "model.intermediate_size in " in capsys.readouterr().err
    (run / "recipe.toml").write_text(recipe)

    newest = sorted((run / "checkpoints").iterdir())[-1]
    with (newest / "tensors.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    assert main(["evaluate", str(run)]) == 2
    assert "is damaged (tensors.safetensors does not match its checksum)" in capsys.readouterr().err


def test_non_finite_loss_stops_and_the_last_checkpoint_stays_good(small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blow_up = [
        "--inner.optimizer",
        "sgd",
        "--inner.lr",
        "1e6",
        "--inner.momentum",
        "0",
        "--method.max_grad_norm",
        "0",
        "--learning_rate.warmup_fraction",
        "0",
    ]
    assert (
        main(["train", "single", *small, *blow_up, "--learning_rate.shape", "constant", "--method.sync_every", "1", "--run.checkpoint_every", "1"])
        == 2
    )
    error = capsys.readouterr().err
    assert "adloco: loss is " in error
    assert "in trainer 0, worker 0, inner step " in error
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    assert checkpoints
    assert main(["evaluate", str(tmp_path / "run")]) == 0


def test_unknown_command_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["trian"])
    assert stopped.value.code == 2
    capsys.readouterr()
    assert main([]) == 0
    assert "adloco COMMAND" in capsys.readouterr().out


def test_config_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "diloco", "--run.seed", "7"]) == 0
    printed = capsys.readouterr().out
    assert "seed = 7" in printed
    assert "# Inner optimizer steps per round (H).\nsync_every" in printed


def test_ctrl_c_saves_and_says_how_to_go_on(small: list[str], tmp_path: Path) -> None:
    words = [sys.executable, "-m", "adloco", "train", "diloco", *small, "--run.tokens", "100000000", "--method.sync_every", "2000"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "environment.json").exists():
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.1)
    time.sleep(3)  # Into the first round.
    process.send_signal(signal.SIGINT)
    asked = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - asked < 20
    assert (process.returncode, err) == (130, "")
    assert f"stopped and saved; go on with: adloco train --resume {tmp_path / 'run'}" in out
    from adloco.training.run import TrainingRun

    resumed = TrainingRun.resume(tmp_path / "run")
    assert resumed.algorithm.in_round
    assert resumed.progress().tokens > 0
