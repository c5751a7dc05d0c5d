"""Folders of lab/, and elastic/, can be removed: what is left imports, and trains."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import adloco
from tests.pages import DESCRIBES_LAB, NEEDS_ELASTIC

SOURCE = Path(adloco.__file__).parent
FOLDERS = sorted(path.parent.name for path in (SOURCE / "lab").glob("*/__init__.py"))
IMPORTS = """
import pkgutil, importlib, adloco
for module in pkgutil.walk_packages(adloco.__path__, "adloco."):
    # Their libraries are optional.
    if not module.name.startswith("adloco.tracking.") and module.name != "adloco.__main__":
        importlib.import_module(module.name)
from adloco.config.shipped import shipped_recipes
from adloco.config.recipe import build_recipe, read_values
for name in shipped_recipes():
    build_recipe(read_values(name))
"""
SMALL = [
    *("--model.hidden_size", "16", "--model.num_layers", "1", "--model.num_heads", "2"),
    *("--model.intermediate_size", "32", "--data.context_tokens", "16", "--run.tokens", "4k"),
    *("--run.trackers", "none", "--evaluation.windows", "4"),
]


def without(folder: Path, removed: Path) -> dict[str, str]:
    """The environment of a copy of the package that lacks a folder of lab/, or all of it."""
    shutil.copytree(SOURCE, folder / "adloco", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(folder / "adloco" / removed)
    return {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "HOME": str(Path.home())}


def run(words: list[str], environment: dict[str, str], folder: Path) -> str:
    found = subprocess.run(
        [sys.executable, *words], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.usefixtures("warm_python")
@DESCRIBES_LAB
def test_without_lab_all_recipes_are_read_and_the_default_one_trains(tmp_path: Path) -> None:
    environment = without(tmp_path, Path("lab"))
    run(["-c", IMPORTS], environment, tmp_path)
    said = run(["-m", "adloco", "train", *SMALL, "--run.folder", "run"], environment, tmp_path)
    assert "validation loss" in said
    refused = subprocess.run(
        [sys.executable, "-m", "adloco", "config", "diloco", "--outer.gate", "true"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "outer.gate is not a setting of [outer]" in refused.stderr


@pytest.mark.nightly
@pytest.mark.usefixtures("warm_python")
@DESCRIBES_LAB
def test_a_run_is_read_whether_or_not_options_were_there_when_it_was_trained(
    tmp_path: Path,
) -> None:
    """Trained without lab/ and read with it, and the other way round."""
    bare = without(tmp_path, Path("lab"))
    whole = bare | {"PYTHONPATH": str(SOURCE.parent)}
    for trained, read, name in ((bare, whole, "bare"), (whole, bare, "whole")):
        run(["-m", "adloco", "train", *SMALL, "--run.folder", name], trained, tmp_path)
        for words in (["evaluate", name], ["report", name], ["runs", "."]):
            assert "damaged" not in run(["-m", "adloco", *words], read, tmp_path)


@pytest.mark.parametrize("option", FOLDERS)
def test_each_folder_of_lab_has_a_short_readme(option: str) -> None:
    """What it is for, its result with its seeds and date, its cost and limits."""
    text = (SOURCE / "lab" / option / "README.md").read_text()
    lines = text.partition("\n## What it does\n")[0].splitlines()
    assert lines[0] == f"# {option}" and len(lines) <= 12
    bold = [line.partition("**")[2].partition("**")[0] for line in lines if line.startswith("- **")]
    assert {"For", "Result", "Cost", "Remove"} <= {*bold}


@pytest.mark.usefixtures("warm_python")
@pytest.mark.nightly
@pytest.mark.parametrize("option", FOLDERS)
def test_without_one_folder_of_lab_the_rest_is_there(option: str, tmp_path: Path) -> None:
    environment = without(tmp_path, Path("lab") / option)
    run(["-c", IMPORTS], environment, tmp_path)
    run(["-m", "adloco", "train", *SMALL, "--run.folder", "run"], environment, tmp_path)


@pytest.mark.nightly
@pytest.mark.usefixtures("warm_python")
@NEEDS_ELASTIC
def test_without_elastic_ranks_train_and_what_needs_it_is_refused(tmp_path: Path) -> None:
    environment = without(tmp_path, Path("elastic"))
    run(["-c", IMPORTS], environment, tmp_path)
    train = ["-m", "adloco", "train", *SMALL]
    ranks = ["--run.folder", "two", "--ranks", "2"]
    assert "validation loss" in run([*train, *ranks], environment, tmp_path)
    machines = ["--restart", "--run.folder", "x", "--machines", "2", "--meet", "127.0.0.1:29400"]
    for words in (["--run.on_rank_failure", "replace"], [*machines, "--ranks", "2"]):
        refused = subprocess.run(
            [sys.executable, *train, *words],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
        assert "needs the folder elastic/ of adloco, which was removed" in refused.stderr


@NEEDS_ELASTIC
@pytest.mark.nightly
def test_without_elastic_torchrun_trains(tmp_path: Path) -> None:
    environment = without(tmp_path, Path("elastic"))
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", "127.0.0.1:0", "-m", "adloco", "train", *SMALL]
    assert "validation loss" in run(words, environment, tmp_path)


@pytest.mark.usefixtures("warm_python")
def test_a_plain_run_of_one_process_imports_nothing_of_elastic(tmp_path: Path) -> None:
    code = (
        "import sys; from adloco.cli.main import main; "
        "assert main(sys.argv[1:]) == 0; "
        "print([name for name in sys.modules if name.startswith('adloco.elastic')])"
    )
    environment = {"PYTHONPATH": str(SOURCE.parent), "OMP_NUM_THREADS": "1"}
    words = ["-c", code, "train", *SMALL, "--run.folder", "run"]
    said = run(words, environment | {"HOME": str(Path.home())}, tmp_path)
    assert said.splitlines()[-1] == "[]"
