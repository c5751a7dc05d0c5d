"""What the README shows works: its Python blocks run, its commands run, its files exist."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from adloco.cli.main import main
from tests.pages import README, ROOT, blocks, console_lines

QUICK_START = ROOT / "docs" / "quick-start.md"
START, LOOP = blocks(README, "python")
RECIPE_COMMANDS = {"train", "prepare", "probe", "compare"}


def commands(page: Path) -> list[str]:
    """The commands of adloco on a page, each once."""
    lines = [line.split("#")[0].strip() for line in console_lines(page)]
    return list(dict.fromkeys(line for line in lines if line.startswith("adloco ")))


def test_there_is_something_to_test() -> None:
    assert len(commands(README)) == 6
    assert len(commands(QUICK_START)) == 18


def test_the_readme_is_short_and_begins_with_the_simplest() -> None:
    assert len(README.read_text().splitlines()) <= 130
    assert commands(README)[0] == "adloco train diloco"
    for page in (README, QUICK_START):
        assert console_lines(page)[0].startswith("make install")


def test_the_first_example_runs(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On fewer tokens and a smaller model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_texts").symlink_to(corpus)
    small = '**{"model.hidden_size": 16, "evaluation.windows": 4, "run.trackers": "none", '
    code = START.replace('"200k"', '"4k"').replace("**{", small)
    assert len(START.splitlines()) <= 10
    exec(code, {})
    assert " The " in capsys.readouterr().out


def test_the_loop_runs() -> None:
    exec(LOOP, {})


@pytest.mark.parametrize(
    "file", ["own_loop.py", pytest.param("own_model.py", marks=pytest.mark.nightly)]
)
def test_examples_run(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile((ROOT / "examples" / file).read_text(), file, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


def torchrun(ranks: int, file: str) -> str:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launcher, ROOT / "examples" / file],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_same_loop_in_one_process_and_on_ranks(
    ranks: int, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(
        compile((ROOT / "examples" / "own_loop.py").read_text(), "own_loop.py", "exec"),
        {"__name__": "__main__"},
    )
    expected = capsys.readouterr().out
    assert torchrun(ranks, "own_loop.py") == expected


@pytest.mark.nightly
def test_an_island_of_shards() -> None:
    assert "merges 1" in torchrun(2, "fsdp_islands.py")


@pytest.mark.nightly
def test_islands_of_shards() -> None:
    """Four workers on two islands, and all on one: the same losses, batches, merges and bytes
    between islands.
    """
    two, one = (torchrun(ranks, "fsdp_islands.py") for ranks in (4, 2))
    strip = [re.sub(r", [0-9.]+ MB inside", "", text) for text in (two, one)]
    assert strip[0] == strip[1]
    assert "merges 1" in two


def run_commands(lines: list[str], small: list[str]) -> None:
    """Run commands in a page's order and wording; only sizes are reduced, as far as four fragments
    in flight for two steps allow.
    """
    at = small.index("--run.folder")
    sizes = [*small[:at], *small[at + 2 :], "--method.sync_every", "12", "--run.tokens", "8000"]
    for line in lines:
        words = shlex.split(line)[1:]
        of_a_recipe = words[0] in RECIPE_COMMANDS and "--resume" not in words
        assert main([*words, *(sizes if of_a_recipe else [])]) == 0, line


def test_commands_run(small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that start processes are left to tests of their own and the nightly job."""
    monkeypatch.chdir(tmp_path)
    alone = [line for line in commands(README) if not re.search("--ranks|compare", line)]
    run_commands(alone, small)
    assert (tmp_path / "runs" / "my-diloco" / "report.html").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("page", [README, QUICK_START], ids=lambda page: page.stem)
def test_all_commands_run(
    page: Path, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_commands(commands(page), small)
