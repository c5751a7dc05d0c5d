"""A run folder from elsewhere: code that its recipe names and the run did not begin with runs only
when it is trusted, and nothing is written through its links.
"""

import os
import shutil
import sys
from pathlib import Path

import pytest

from adloco import load
from adloco.cli.main import main
from adloco.options import options
from adloco.plan.short_runs import read_short_runs
from adloco.run.stored import resumed_recipe
from tests.conftest import small_flags

OWN = """
from pathlib import Path
Path({mark!r}).touch()

def rows():
    return [f"{{number}} " * 40 for number in range(60)]
"""
OF_LAB = {"gradients": ["gradients", "--samples", "4"]} if options() else {}
COMMANDS = {
    "train": ["train", "--run.tokens", "9000", "--resume"],
    "evaluate": ["evaluate"],
    **OF_LAB,
    "generate": ["generate", "--prompt", "a", "--tokens", "1"],
    "report": ["report"],
}


@pytest.fixture(scope="module")
def begun(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that began with a function of its own, and modules."""
    folder = tmp_path_factory.mktemp("begun")
    for name in ("own_code", "foreign_code"):
        (folder / f"{name}.py").write_text(OWN.format(mark=str(folder / f"{name}-imported")))
    words = small_flags(corpus, folder)
    at = words.index("--data.path")
    words[at : at + 2] = ["--data.factory", "own_code:rows", "--learning_rate.shape", "constant"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        assert main(["train", "diloco", *words, "--run.tokens", "5000"]) == 0
    return folder


@pytest.fixture
def foreign(begun: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there once somebody else's module `foreign_code` has been imported."""
    monkeypatch.syspath_prepend(str(begun))
    monkeypatch.delitem(sys.modules, "foreign_code", raising=False)
    mark = begun / "foreign_code-imported"
    mark.unlink(missing_ok=True)
    return mark


@pytest.fixture
def run(begun: Path, foreign: Path, tmp_path: Path) -> Path:
    """A copy of the run."""
    return shutil.copytree(begun / "run", tmp_path / "run")


def name_code(run: Path, name: str, before: str, after: str) -> None:
    text = (run / "recipe.toml").read_text()
    assert f"{name} = {before!r}".replace("'", '"') in text
    changed = text.replace(f'{name} = "{before}"', f'{name} = "{after}"')
    (run / "recipe.toml").write_text(changed)


@pytest.mark.parametrize("command", COMMANDS)
def test_nobody_who_began_a_run_is_asked(run: Path, command: str) -> None:
    assert main([*COMMANDS[command], str(run)]) == 0


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("factory", "own_code:rows", "foreign_code:rows"),
        ("trackers", "none", "none,foreign_code:Tracker"),
        ("rule", "constant", "foreign_code:Rule"),
    ],
)
def test_other_code_is_named_and_not_imported(
    run: Path,
    foreign: Path,
    command: str,
    name: str,
    before: str,
    after: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name_code(run, name, before, after)
    capsys.readouterr()
    assert main([*COMMANDS[command], str(run)]) == 2
    message = capsys.readouterr().err
    assert f"names code that the run did not begin with ({_section(name)}{after!r})" in message
    assert "--trust-recipe" in message
    assert not foreign.exists()


def test_a_run_that_names_other_code_is_not_compared(
    run: Path, foreign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name_code(run, "rule", "constant", "foreign_code:Rule")
    assert main(["compare", str(run)]) == 2
    assert "names code that the run did not begin with (batch.rule" in capsys.readouterr().err
    with pytest.raises(ValueError, match="names code that the run did not begin with"):
        read_short_runs([run])
    assert not foreign.exists()


def test_a_run_s_folder_is_searched_for_no_code(
    run: Path, foreign: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even if the run began with it: somebody else may have trained it."""
    for entry in {str(foreign.parent), ""}:
        while entry in sys.path:
            sys.path.remove(entry)
    monkeypatch.delitem(sys.modules, "own_code", raising=False)
    shutil.copy(foreign.parent / "own_code.py", run)
    mark = foreign.parent / "own_code-imported"
    mark.unlink()
    monkeypatch.chdir(run)
    assert main(["report", "."]) == 0
    assert main(["evaluate", "."]) == 2
    assert "'own_code:rows' cannot be imported" in capsys.readouterr().err
    assert not mark.exists()


@pytest.mark.parametrize(
    ("file", "command"),
    [("environment.json", "report"), ("summary.json", "report"), ("recipe.toml", "runs")],
)
def test_a_pipe_is_not_waited_for(run: Path, file: str, command: str) -> None:
    (run / file).unlink()
    os.mkfifo(run / file)
    assert main([command, str(run)]) == 2


def _section(name: str) -> str:
    sections = {"factory": "data", "trackers": "run", "rule": "batch"}
    return f"{sections[name]}.{name} = "


def test_trusted_code_runs(run: Path, foreign: Path) -> None:
    name_code(run, "factory", "own_code:rows", "foreign_code:rows")
    with pytest.raises(ValueError, match=r"trust_recipe=True"):
        load(run)
    assert load(run, trust_recipe=True).evaluate()["loss"] > 0
    assert main(["evaluate", str(run), "--trust-recipe"]) == 0
    assert foreign.exists()
    # Whoever has resumed with it has chosen it: the next checkpoint knows it.
    assert main(["train", "--resume", str(run), "--run.tokens", "9000", "--trust-recipe"]) == 0
    assert main(["evaluate", str(run)]) == 0


def test_code_on_the_line_is_trusted(run: Path, foreign: Path) -> None:
    words = ["--run.tokens", "2x", "--data.factory", "foreign_code:rows"]
    assert main(["train", "--resume", str(run), *words]) == 0
    assert foreign.exists()
    assert main(["train", "--resume", str(run), "--run.tokens", "2x"]) == 0


def test_a_longer_budget_imports_nothing_first(run: Path, foreign: Path) -> None:
    name_code(run, "trackers", "none", "none,foreign_code:Tracker")
    assert main(["train", "--resume", str(run), "--run.tokens", "2x"]) == 2
    assert not foreign.exists()


@pytest.mark.parametrize("parts", ["run.*", "*"])
def test_a_machine_without_the_part_run_asks_nothing(run: Path, parts: str) -> None:
    """Its own folder has parts of its workers alone; and before the first checkpoint, none."""
    for checkpoint in run.glob("checkpoints/*"):
        for file in checkpoint.glob(parts):
            file.unlink()
    assert resumed_recipe(run, ()).data.factory == "own_code:rows"
    shutil.rmtree(run / "checkpoints")
    name_code(run, "factory", "own_code:rows", "foreign_code:rows")
    with pytest.raises(ValueError, match="did not begin with"):
        resumed_recipe(run, ())


WRITING = {
    "train": ["train", "--run.tokens", "9000", "--resume"],
    **OF_LAB,
    "report": ["report"],
    "rewind": ["rewind"],
}


@pytest.mark.parametrize("command", WRITING)
@pytest.mark.parametrize(
    "name",
    [
        *("train.log", "gradients", "metrics.jsonl", "steps.jsonl", "starts.jsonl", "plots"),
        *(".lock", "checkpoints", "checkpoints/round-000009-step-00000036"),
    ],
)
def test_nothing_is_written_through_a_link(
    run: Path, tmp_path: Path, command: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    there, here = tmp_path / "precious", run / name
    if here.exists():
        here.rename(there)
    else:
        there.mkdir()
    here.symlink_to(there)
    before = {path: path.stat().st_mtime_ns for path in [there, *there.rglob("*")]}
    capsys.readouterr()
    place = ["0"] if command == "rewind" else []
    assert main([*WRITING[command], str(run), *place]) == 2
    message = capsys.readouterr().err
    assert f"has links, through which files elsewhere would be written: {name};" in message
    assert before == {path: path.stat().st_mtime_ns for path in [there, *there.rglob("*")]}


def test_a_run_folder_may_itself_be_a_link(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    assert main(["train", "--resume", str(tmp_path / "link"), "--run.tokens", "9000"]) == 0
