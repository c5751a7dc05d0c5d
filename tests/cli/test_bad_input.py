"""Bad input: one sentence on stderr that says what to change, exit code 2, nothing half-written, no
traceback.
"""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from adloco.cli.main import main
from adloco.run import checkpoint
from adloco.run.part_file import read_part, write_part
from tests.conftest import WaitForSteps
from tests.pages import DESCRIBES_LAB, NEEDS_ELASTIC


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--run.token", "5"], "did you mean 'tokens'?"),
        (["--batch.eta", "-1"], "batch.eta must be > 0, got -1.0 (recipe section [batch])"),
        (["--batch.maximum", "2"], "batch.maximum must be >= batch.initial"),
        (["--run.tokens", "many"], "run.tokens must be a whole number, got"),
        (["--run.tokens", "2.5"], "run.tokens must be a whole number, got 2.5"),
        (["--run.tokens", "true"], "run.tokens must be a whole number, got True"),
        (["--run.tokens"], "--run.tokens needs a value"),
        (["--run.folder", "--run.seed", "1"], "--run.folder needs a value"),
        (["--run.compile=maybe"], "run.compile must be true or false or auto, got 'maybe'"),
        (["--inner.lr", "low"], "inner.lr must be a number, got 'low'"),
        (["--inner.betas", "0.9"], "inner.betas must be a list of 2 numbers, got [0.9]"),
        (
            ["--switch.max_micro_batch", "most"],
            "switch.max_micro_batch must be a whole number or auto, got 'most'",
        ),
        pytest.param(
            ["--batch.rule", "norm-test", "--batch.theta", "0.9"],
            "with rule = 'norm-test'; it is one with rule = 'augmented' or 'inner-product'",
            marks=DESCRIBES_LAB,
        ),
        (
            ["--model.name", "gpt2"],
            "model.name is not a setting of [model] with source = 'llama'; it is one with source = "
            "'transformers'",
        ),
        ([""], "the recipe '' has no name; name one"),
        (["--data.path", ""], "--data.path '' names no text; name one, or leave it out"),
        (["--data.path=", "--data.dataset="], "--data.dataset and --data.path '' names no text"),
        (["adlocco"], "did you mean 'adloco'?"),
        (["--data.path", "/no/such/file"], "data.path '/no/such/file' does not exist"),
        (
            ["--data.split", "validation"],
            "data.split is for data.dataset, got 'validation' without",
        ),
        (
            ["--data.tokenizer", "/no/such/tokenizer"],
            "data.tokenizer '/no/such/tokenizer' could not be loaded",
        ),
        (["--data.tokenizer", "bpe:1"], "data.tokenizer bpe needs a size above 256"),
        (
            ["--data.context_tokens", "1000", "--batch.initial", "64", "--batch.maximum", "64"],
            "windows of 1000 tokens to train on, but one inner step needs",
        ),
        (["--method.num_trainers", "100000"], "give more text, hold out less of it"),
        (
            ["--method.num_trainers", "1000000000"],
            "method.num_trainers x method.workers_per_trainer must be <= 1,000,000, got "
            "1,000,000,000 x 1",
        ),
        (["--method.workers_per_trainer", "1000000000"], "<= 1,000,000, got 2 x 1,000,000,000"),
        (["--method.sync_every", "1e18"], "method.sync_every must be > -2^53 and < 2^53, got"),
        (["--batch.maximum", "1e12"], "batch.maximum must be <= 16,777,216, got 1,000,000,000,000"),
        (
            ["--wire.format", "int8", "--wire.block", "1e12"],
            "wire.block must be in [1, 65536], got 1,000",
        ),
        (
            ["--inner.split", "{q_proj = 1000000000000}"],
            "must give blocks of 32 in all, got q_proj",
        ),
        (
            ["--switch.max_micro_batch", "auto", "--memory.gib", "1e30"],
            "the memory of this machine, got 1e+30",
        ),
        (
            ["--model.hidden_size", "65536", "--model.intermediate_size", "100000"],
            "GiB; use fewer workers or a smaller model",
        ),
        (["--run.device", "quantum"], "run.device must be auto, cpu or cuda, got 'quantum'"),
        (["--run.device", "cuda:9"], "run.device 'cuda:9' is not available"),
        (
            ["--outer.optimizer", "Nesterov"],
            "outer.optimizer must name an optimizer of torch.optim",
        ),
        (
            ["--resume", "/no/such/run"],
            (
                "--model.hidden_size cannot change when a run is resumed; leave it out (settings "
                "that can: data.arguments, data.bad_rows, data.cache, data.dataset, data.factory, "
                "data.islands, data.path,"
            ),
        ),
        (["--run.seed", "99999999999999999999999999"], "run.seed must be > -2^63 and < 2^63"),
        (["--run.seed", "0x" + "f" * 9999], "run.seed must be > -2^63 and < 2^63, got a number"),
        (
            ["--data.arguments", "{a=" * 3000],
            "data.arguments must be a table such as { key = 1 }, got '{a=",
        ),
        (["--data.validation_fraction", "1e-320"], "data.validation_fraction must be 0, or from"),
        (["--batch.rule", "norm-test", "--batch.eta", "1e300"], "batch.eta must be 0, or from"),
        (["--inner.lr", "inf"], "inner.lr must be 0, or from 1e-38 to 1e+38 in size, got inf"),
        (["--inner.lr", "nan"], "inner.lr must be 0, or from 1e-38 to 1e+38 in size, got nan"),
        (["--run.device", "cpu:5"], "run.device must be auto, cpu or cuda, got 'cpu:5'"),
        (["--data.path", "~nouser/x"], "the home folder that '~nouser/x' begins with is not known"),
        (
            ["--data.cache", "~nouser/x"],
            "the home folder that '~nouser/x' begins with is not known",
        ),
        (["--data.path", "/dev/zero"], "data.path '/dev/zero' is a device or a pipe, which has no"),
        (
            ["--placement.shard_size", "1e30"],
            "placement.shard_size must be > -2^53 and < 2^53, got 1,000,",
        ),
        (["--placement.shard_size", "1000000000000"], "a multiple of 1000000000000, or ask for"),
        (["--model.num_layers", "10000000"], "model.num_layers must be <= 4096, got 10,000,000"),
        (["--model.vocab_size", "99999999"], "model.vocab_size must be < 16,777,216, got"),
        (["--data.cache", "/proc/nope"], "data.cache '/proc/nope' cannot be written"),
        (["--run.folder", "/proc/nope/run"], "run folder '/proc/nope/run' cannot be made"),
        (
            ["--run.folder", "/tmp/\udcff"],
            "run.folder must be UTF-8, as a recipe is, got '/tmp/\\udcff'",
        ),
        (["--unknown"], "unrecognized arguments: --unknown; see adloco train --help"),
        (["--resum=x"], "unrecognized arguments: --resum=x (did you mean --resume?)"),
        (["--r"], "unrecognized arguments: --r"),
        (["diloco", "run.tokens=9"], "arguments: run.tokens=9 (did you mean --run.tokens=9?)"),
        (["--lr", "5"], "(did you mean --inner.lr or --outer.lr?)"),
        (["-run.tokens", "5"], "(did you mean --run.tokens?)"),
        (["--sync-every=5"], "(did you mean --method.sync_every?)"),
        (["--data", "my_texts"], "(did you mean --data.path?)"),
        (["--H", "5"], "(did you mean --method.sync_every?)"),
        (["--batch-sise", "5"], "(did you mean --batch.initial?)"),
        (["--momentum", "0"], "(did you mean --inner.momentum or --outer.options?)"),
        (["--tokens", "5"], "(did you mean --run.tokens?); see adloco train --help"),
        (
            ["--ranks", "two"],
            "argument --ranks: must be a whole number, got 'two'; see adloco train --help",
        ),
    ],
)
def test_train(
    words: list[str],
    message: str,
    small: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Settings may stand before and behind other words; of two values of one, the last counts.
    order = [*small, *words] if "." in words[0] or words[0] == "--resume" else [*words, *small]
    assert main(["train", *order]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("adloco: ")
    assert captured.err.count("\n") == 1
    assert "Traceback" not in captured.err
    assert not (tmp_path / "run").exists()


@NEEDS_ELASTIC
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--machines", "2"], "--machines 2 needs --meet HOST:PORT, the address of the first"),
        (["--meet", "host:29400"], "--meet needs the number of --machines, at least 2, got 1"),
        (["--machines", "2", "--meet", "29400"], "--meet must be HOST:PORT, for instance"),
        (["--machines", "2", "--meet", "host:0"], "for instance 10.0.0.1:29400, got host:0"),
        (
            ["--machines", "2", "--meet", "host:29400"],
            "--machines needs --restart and --run.folder",
        ),
        (
            ["--machines=2", "--meet=host:29400", "--restart", "--run.timeout_seconds=20"],
            "run.timeout_seconds must be >= 30 with --machines, got 20: launchers that wait so",
        ),
    ],
)
def test_train_on_machines(
    words: list[str],
    message: str,
    small: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    test_train(words, message, small, tmp_path, capsys)


def test_an_existing_run_folder(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").touch()
    assert main(["train", *small]) == 2
    error = capsys.readouterr().err
    assert "/run' is neither new nor an empty folder; give one that is" in error
    assert "--resume" not in error, "there is no run to resume"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["something"]
    (tmp_path / "run" / "recipe.toml").touch()
    assert main(["train", *small]) == 2
    assert (
        "exists already; use another --run.folder, or resume it by adloco train --resume"
        in capsys.readouterr().err
    )


def test_lines_that_a_run_advises_can_be_copied_into_a_shell(
    small: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "-it's $HOME;"
    words = ["train", "diloco", *small, "--run.folder", name]
    assert main(words) == 0
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if "adloco compare" in line]
    assert shlex.split(line) == ["adloco", "compare", f"./{name}", "OTHER_RUN_OR_RECIPE"]
    assert main(words) == 2
    line = capsys.readouterr().err.partition(" resume it by ")[2].partition(" (from Python")[0]
    assert shlex.split(line) == ["adloco", "train", "--resume", f"./{name}"]


def test_a_text_shorter_than_a_window(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 100 bytes a twentieth is held out, 6 tokens with the end of the text; a window of 64
    tokens takes 65.
    """
    text = tmp_path / "tiny.txt"
    text.write_text("x" * 100)
    words = shlex.split("--data.tokenizer bytes --data.context_tokens 64")
    assert main(["train", "single", *small, *words, "--data.path", str(text)]) == 2
    message = capsys.readouterr().err
    assert (
        "is too short for one window of 64 tokens: a window takes 65, and there are 6 to "
        "evaluate on; give more text, hold out"
    ) in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["evaluate", "report", "generate", "train --resume"])
def test_what_is_no_run_folder(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = ["--prompt", "x"] if command == "generate" else []
    assert main([*command.split(), str(tmp_path), *prompt]) == 2
    assert (
        "is not a run folder (no recipe.toml in it); give one that `adloco train` wrote"
        in capsys.readouterr().err
    )


@pytest.fixture
def finished(
    small: list[str], tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> Path:
    """A run folder, trained on the file tmp_path/text.txt."""
    text = tmp_path / "text.txt"
    text.write_text("".join(path.read_text() for path in sorted(corpus.iterdir())))
    assert main(["train", "adloco", *small, "--run.tokens", "2000", "--data.path", str(text)]) == 0
    capsys.readouterr()
    return tmp_path / "run"


READERS = (["train", "--resume"], ["evaluate"])


def refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_another_text_than_the_run_began_with(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = finished.parent / "text.txt"
    text.write_text(text.read_text().replace("alpha", "omega"))
    for words in READERS:
        refused([*words, str(finished)], "is not what the run in", capsys)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("intermediate_size = 48", "intermediate_size = 64"),
        ("seed = 0", "seed = 5"),
        ("total_tokens = 2000", "total_tokens = 9000"),
        # It has settings that the run knows nothing of.
        (
            'rule = "norm-test"\neta = 3.5\nestimator = "unbiased"\n',
            'rule = "ramp"\nfirst = 4\nlast = 8\nover_samples = 100\n',
        ),
    ],
)
def test_another_recipe_than_the_run_began_with(
    old: str, new: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = finished / "recipe.toml"
    assert old in recipe.read_text()
    recipe.write_text(recipe.read_text().replace(old, new))
    for words in READERS:
        refused(
            [*words, str(finished)],
            f"{old.split()[0]} in {recipe} is not what the run began with; restore it",
            capsys,
        )


@pytest.mark.parametrize("name", ["model/config.json", "tokenizer/bytes.json"])
def test_a_changed_model_or_tokenizer(
    name: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = finished / name
    text = file.read_text()
    file.write_text(text.replace("}", " }").replace("1e-06", "1e-02"))
    assert file.read_text() != text
    for words in READERS:
        refused(
            [*words, str(finished)],
            f"{name} in {finished} is not what the run began with; restore it, or start another",
            capsys,
        )


def test_a_run_of_an_earlier_version(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = checkpoint.newest(finished / "checkpoints")
    state = read_part(newest, "run")
    del state["run"]["recipe"]["wire.feedback"]
    write_part(newest, "run", state)
    for words in READERS:
        refused(
            [*words, str(finished)],
            f"wire.feedback in {finished / 'recipe.toml'} is not what the run began with",
            capsys,
        )


def test_a_recipe_of_an_earlier_version(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = finished / "recipe.toml"
    text = recipe.read_text()
    assert "\nexclude = [" in text
    recipe.write_text(text.replace("\nexclude = [", "\nmuon_exclude = ["))
    message = f"{recipe} does not fit this version of adloco: inner.muon_exclude is not a setting"
    for words in READERS:
        refused([*words, str(finished)], message, capsys)


def test_damaged_checkpoints(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = checkpoint.newest(finished / "checkpoints")
    with (newest / "trainer-0.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    refused(
        ["evaluate", str(finished)],
        "is damaged (trainer-0.safetensors does not match its checksum); a resumed run continues "
        "from the one before",
        capsys,
    )


def test_a_damaged_cache_is_made_again(finished: Path, small: list[str], tmp_path: Path) -> None:
    (tokens,) = (tmp_path / "cache").glob("*/train.bin")
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-100])
    assert main(["evaluate", str(finished)]) == 0
    assert tokens.read_bytes() == whole


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate", "--windows", "-5"], "windows must be >= 0, got -5"),
        (["evaluate", "--trainer", "9"], "there is no trainer 9 in"),
        (
            ["generate", "--prompt", "x", "--temperature", "nan"],
            "temperature must be 0, or >= 1e-06 and finite, got nan",
        ),
        (["generate", "--prompt", "x", "--tokens", "0"], "tokens must be > 0"),
        (
            ["generate"],
            "the following arguments are required: --prompt; see adloco generate --help",
        ),
        (["report", "--run.seed", "1"], "unrecognized arguments: --run.seed 1"),
    ],
)
def test_options_of_the_readers(
    words: list[str], message: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused([words[0], str(finished), *words[1:]], message, capsys)


def test_non_finite_loss_stops_and_the_last_checkpoint_stays_good(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    explosive = {
        "inner.optimizer": "sgd",
        "inner.lr": "1e6",
        "inner.momentum": "0",
        "method.max_grad_norm": "0",
        "learning_rate.shape": "constant",
        "learning_rate.warmup_fraction": "0",
    }
    assert (
        main(
            [
                "train",
                "single",
                *small,
                *(word for key, value in explosive.items() for word in (f"--{key}", value)),
            ]
        )
        == 2
    )
    error = capsys.readouterr().err
    assert "adloco: loss is " in error
    assert "in trainer 0, worker 0, inner step " in error
    (newest,) = (tmp_path / "run" / "checkpoints").iterdir()  # The one from before the first round.
    assert f"the last good checkpoint is {newest}" in error
    assert main(["evaluate", str(tmp_path / "run")]) == 0


def test_unknown_command_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    refused(["trian"], "there is no command 'trian' (did you mean 'train'?)", capsys)
    refused(["Train"], "there is no command 'Train' (did you mean 'train'?)", capsys)
    refused(["train", "DiLoCo"], "(did you mean 'diloco'?)", capsys)
    for dash in "\u2013\u2014":  # As word processors write two.
        words = ["train", "diloco", f"{dash}run.tokens", "5"]
        refused(words, "(did you mean --run.tokens?)", capsys)
        words = ["train", "diloco", f"{dash}run.tokens=5"]
        refused(words, f"{dash}run.tokens=5 (did you mean --run.tokens?)", capsys)
    refused(["--verson"], "there is no command '--verson' (did you mean '--version'?)", capsys)
    for words in ([], ["help"], ["-h"], ["--help"]):
        assert main(words) == 0
        assert "usage: adloco [-h] [-V] COMMAND ..." in capsys.readouterr().out


def test_config_explains_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "diloco", "--run.seed", "7"]) == 0
    printed = capsys.readouterr().out
    assert "seed = 7" in printed
    assert "# Inner optimizer steps per round (H).\n" in printed


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(
    ("flags", "how"),
    [([], "adloco train --resume {}\n"), (["--restart"], "the same line\n")],
    ids=["resume", "restart"],
)
def test_ctrl_c_saves_and_says_how_to_go_on(
    flags: list[str],
    how: str,
    small: list[str],
    tmp_path: Path,
    wait_for_steps: WaitForSteps,
) -> None:
    words = [
        sys.executable,
        "-m",
        "adloco",
        "train",
        "diloco",
        *small,
        *shlex.split("--run.tokens 100000000 --method.sync_every 2000"),
        *flags,
    ]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_steps(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert "stopped and saved; resume with: " + how.format(tmp_path / "run") in out
    from adloco.run.training_run import TrainingRun

    resumed = TrainingRun.resume(tmp_path / "run")
    assert resumed.algorithm.state.in_round
    assert resumed.progress().tokens > 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("attention_dropout = 2", "attention_dropout = 2; a rate of dropout must be >= 0 and < 1"),
        ("attention_dropout = -1", "attention_dropout = -1; a rate of dropout must be >= 0"),
        ("num_hidden_layers = 10000000", "has 10,000,000 layers; at most 4,096 are allowed"),
        ("head_dim = 3", "the model cannot compute its outputs for a sample (RuntimeError: "),
    ],
)
def test_models_of_transformers_that_cannot_train(
    changed: str, message: str, small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    name, _, value = changed.partition(" = ")
    overrides = ", ".join(f"{key} = {item}" for key, item in (sizes | {name: value}).items())
    words = [*small[: small.index("--model.hidden_size")], *small[small.index("--data.path") :]]
    words += ["--data.context_tokens", "32", "--model.source", "transformers"]
    words += ["--model.name", "llama", "--model.pretrained", "false"]
    refused(["train", "single", *words, "--model.overrides", f"{{{overrides}}}"], message, capsys)


def test_recipes_nested_too_deep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "deep.toml"
    recipe.write_text("[data]\narguments = " + "[" * 3000 + "]" * 3000)
    refused(["config", str(recipe)], "is not valid TOML: maximum recursion depth", capsys)


def test_pipes_are_not_read(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reading one would wait for a writer for ever."""
    os.mkfifo(tmp_path / "pipe")
    path = str(tmp_path / "pipe")
    refused(["train", *small, "--data.path", path], "is a device or a pipe", capsys)
    refused(["config", path], "is neither a file nor a shipped recipe", capsys)
