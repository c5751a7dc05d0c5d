"""The folder of a new run: its name, and who may have it."""

import errno
import fcntl
import os
import re
from pathlib import Path

import pytest

from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.sections import Recipe
from adloco.run.folder import check_free, claimed, finished, is_locked, locked, new_folder

TIME = r"-\d{8}-\d{6}-\d{6}"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def recipe(*settings: tuple[str, str]) -> Recipe:
    return build_recipe(override(read_values("diloco"), settings))


def folder(*settings: tuple[str, str]) -> str:
    with new_folder(recipe(*settings)) as made:
        assert made.is_dir()
    assert not made.exists(), "it is empty"
    return str(made)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ([], "diloco-nano-stdlib"),
        ([("data.dataset", "allenai/c4"), ("model.shape", "tinyllama")], "diloco-tinyllama-c4"),
        ([("data.path", "/some where/Größe 7.v2.txt")], "diloco-nano-Gr-e-7.v2.txt"),
        ([("data.path", "/texts/")], "diloco-nano-texts"),
        ([("data.path", "/texts/.")], "diloco-nano-texts"),
        ([("data.factory", "mypackage.data:rows")], "diloco-nano-rows"),
        ([("run.name", f"b:c* {'long' * 99}")], f"c-{('long' * 6)[:22]}-nano-stdlib"),
    ],
)
def test_a_folder_is_named_after_recipe_model_data_and_time(
    settings: list[tuple[str, str]], name: str
) -> None:
    assert re.fullmatch(f"runs/{re.escape(name)}{TIME}", folder(*settings))


def test_the_name_of_a_model_of_transformers_is_short() -> None:
    values = override(
        read_values("adloco-imdb"), [("model.name", "/models/my bert/"), ("run.name", "imdb")]
    )
    with new_folder(build_recipe(values)) as made:
        assert re.fullmatch(f"runs/imdb-my-bert-imdb{TIME}", str(made))


def test_a_chosen_folder_is_left_as_it_is() -> None:
    assert folder(("run.folder", "runs/Größe")) == "runs/Größe"


def test_runs_that_start_together_have_folders_of_their_own_which_sort_by_time() -> None:
    names = [folder() for _ in range(3)]
    assert len(set(names)) == 3
    assert names == sorted(names)


def test_a_folder_that_cannot_be_made_is_refused() -> None:
    Path("runs").touch()
    with pytest.raises(ValueError, match="cannot be made"), new_folder(recipe()):
        pass


def test_a_folder_with_anything_in_it_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    """It may hold somebody's recipe, model and tokenizer."""
    mine = recipe(("run.folder", "mine"))
    for name in ("model/weights", "tokenizer/words", "recipe.toml"):
        (tmp_path / "mine" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mine" / name).write_text(name)
        with (
            pytest.raises(ValueError, match="'mine' (is neither new|exists already)"),
            claimed(mine),
        ):
            pass
    assert (tmp_path / "mine" / "model" / "weights").read_text() == "model/weights"
    Path("file").touch()
    with (
        pytest.raises(ValueError, match="'file' is neither new nor an empty"),
        new_folder(recipe(("run.folder", "file"))),
    ):
        pass


def test_what_a_kill_before_the_first_checkpoint_has_left_is_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    mine = recipe(("run.folder", str(run)))
    left = (
        ".lock",
        "environment.json",
        ".recipe.toml",
        "tokenizer/bytes.json",
        "model/config.json",
    )
    for name in (*left, "checkpoints/.writing-abc/tensors.safetensors"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).touch()
        if name == ".lock":
            continue
        with locked(run), pytest.raises(ValueError, match="is in use"), claimed(mine):
            pass
        assert (run / name).exists()
    with claimed(mine):
        assert [path.name for path in run.iterdir()] == [".lock"]
        # Fails again, in a folder that it did not make.
        (run / "environment.json").touch()
        (run / "tokenizer").mkdir()
    assert [path.name for path in run.iterdir()] == [".lock"]


def test_a_run_that_another_process_trains_is_waited_for(tmp_path: Path) -> None:
    """It could not be resumed, which is the advice for one that was stopped."""
    with locked(tmp_path), pytest.raises(ValueError, match="not ended .*: wait until that has end"):
        finished(tmp_path)
    with pytest.raises(ValueError, match="not ended .*; finish it with: adloco train --resume"):
        finished(tmp_path)


def test_two_processes_never_hold_a_lock_of_one_folder(tmp_path: Path) -> None:
    """One has opened the lock's file while another holds it, and gets it when that one ends."""
    with locked(tmp_path):
        opened = os.open(tmp_path / ".lock", os.O_RDWR)
    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(ValueError, match="is in use"), locked(tmp_path):
        pass
    os.close(opened)
    with locked(tmp_path):
        pass


def test_a_run_that_has_begun_is_not_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with claimed(recipe(("run.folder", str(run)))):
        for name in ("environment.json", "checkpoints/damaged-round-1/state.json"):
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            (run / name).touch()
    assert (run / "environment.json").exists()
    with (
        pytest.raises(ValueError, match="is neither new nor an empty"),
        claimed(recipe(("run.folder", str(run)))),
    ):
        pass


@pytest.mark.parametrize(
    "name", ["..", ".", "../../x", "a/b", "a\\b", "a\nb", "a\x1b[31mb", "\u202ea"]
)
def test_a_name_leaves_no_folder_and_is_one_line(name: str) -> None:
    with pytest.raises(ValueError, match="run.name must be printable characters without slashes"):
        recipe(("run.name", name))


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system that is mounted read-only; whether a run holds its lock is known."""
    with locked(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
    whole = os.open

    def read_only(path: str, flags: int, *rest: int, **names: int) -> int:
        if str(path).startswith(str(tmp_path)) and flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return whole(path, flags, *rest, **names)

    monkeypatch.setattr(os, "open", read_only)
    with (
        pytest.raises(ValueError, match="cannot be written .Read-only file system.; make it"),
        locked(tmp_path),
    ):
        pass
    assert not is_locked(tmp_path)


def test_a_run_is_not_put_among_the_texts_it_reads(tmp_path: Path) -> None:
    """The next run, and its own resume, would read its log as text."""
    here, islands = str(tmp_path), "{ a = { path = 'x' }, b = { path = '.' } }"
    for own, source in (
        ("", ("data.path", ".")),
        ("x/y", ("data.path", here)),
        ("z", ("data.islands", islands)),
    ):
        with pytest.raises(ValueError, match=r"would be read as text by the next run; give anoth"):
            check_free(recipe(("run.folder", own), source))
    check_free(recipe(("run.folder", ".runs/y"), ("data.path", ".")))
    check_free(recipe(("run.folder", "x"), ("data.path", "y")))
    check_free(recipe())
