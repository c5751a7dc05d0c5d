"""`adloco.train`: the same numbers, sentences and files as the command line."""

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import adloco
from adloco.api.train_function import _data_setting
from adloco.cli.main import main
from adloco.config.setting_words import take_settings
from adloco.run.folder import locked
from tests.problems import numbers_of, without_timings


@pytest.fixture
def settings(small: list[str]) -> dict[str, Any]:
    """Settings of a run that takes a second, in the folder tmp_path/run."""
    given, _ = take_settings([*small, "--run.tokens", "2500"])
    return dict(given)


@contextmanager
def at_step(number: int, act: Callable[[], None]) -> Iterator[None]:
    """Call a function after this step of any optimizer."""
    steps = itertools.count(1)

    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if next(steps) == number:
            act()

    handle = register_optimizer_step_post_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def test_a_run_has_the_numbers_and_files_of_the_command_line(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = settings | {"run.folder": str(tmp_path / "there")}
    words = [word for name, text in there.items() for word in (f"--{name}", text)]
    assert main(["train", "diloco", *words, "--inner.lr", "0.01"]) == 0
    said = capsys.readouterr()

    for name in ("run.tokens", "run.folder", "data.path"):
        del settings[name]
    data, folder = Path(there["data.path"]), tmp_path / "run"
    changed = settings | {"inner.lr": 0.01, "method.sync_every": 4}
    run = adloco.train("diloco", tokens=2500, data=data, folder=folder, seed=0, **changed)
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == len(said.out.splitlines()), "it shows its progress"
    assert run.folder == folder
    assert [without_timings(record) for record in run.records] == numbers_of(tmp_path / "there")
    assert {path.name for path in folder.iterdir()} == {
        path.name for path in (tmp_path / "there").iterdir()
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [("method.sync_every", 0), ("method.sync_evry", 5), ("inner.lr", "fast"), ("data.path", "no")],
)
def test_a_bad_setting_raises_the_sentence_of_the_command_line(
    name: str,
    value: Any,
    settings: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = settings | {name: value}
    words = [word for key, text in given.items() for word in (f"--{key}", str(text))]
    assert main(["train", "diloco", *words]) == 2
    sentence = capsys.readouterr().err.removeprefix("adloco: ").strip()
    with pytest.raises(ValueError) as raised:
        adloco.train("diloco", **given)
    assert str(raised.value) == sentence
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"lr": 0.1}, r"no argument 'lr' \(did you mean 'inner.lr' or 'outer.lr'\?\)"),
        ({"model": torch.nn.Linear(1, 1)}, r"\(did you mean 'problem' or 'model.shape'\?\)"),
        ({"lr": lambda step: 0.1}, r"'problem' or 'inner.lr' or 'outer.lr'\?\)"),
        ({"sync_evry": 5}, r"did you mean 'method.sync_every'\?"),
        ({"tokens": 5, "run.tokens": 6}, "run.tokens is given twice"),
        ({"resume": "nowhere"}, "resume takes the recipe of the run; leave out 'diloco'"),
        ({"recipe": None, "resume": "nowhere"}, "'nowhere' is not a run folder"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        adloco.train(**{"recipe": "diloco"} | arguments)


def test_settings_of_a_section_may_be_given_together(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = adloco.train("diloco", inner={"lr": 0.004, "weight_decay": 0.05}, **settings)
    recipe = (run.folder / "recipe.toml").read_text()
    assert "lr = 0.004" in recipe
    assert "weight_decay = 0.05" in recipe


def test_data_takes_a_path_or_the_settings_of_its_section(
    settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    section = {"path": settings.pop("data.path"), "skip_samples": 2}
    run = adloco.train("diloco", data=section, **settings)
    assert run.recipe.data.path == section["path"]
    assert run.recipe.data.skip_samples == 2


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"inner": {"lr": 0.1}, "inner.lr": 0.2}, "inner.lr is given twice"),
        ({"run": {"tokens": 5}, "tokens": 6}, "run.tokens is given twice"),
        ({"inner": {"lrr": 0.1}}, "inner.lrr"),
        ({"iner": {"lr": 0.1}}, "iner"),
        ({"inner": 3}, "no argument 'inner'"),
    ],
)
def test_bad_settings_of_a_section_are_named(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        adloco.train("diloco", **given)


def test_a_name_that_is_no_file_can_be_a_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert _data_setting("allenai/c4") == "data.dataset"
    assert _data_setting("my_texts") == _data_setting(Path("a/b")) == "data.path"
    assert _data_setting("a/b/c") == _data_setting(None) == "data.path"
    assert _data_setting("./c4") == _data_setting("../c4") == "data.path"
    (tmp_path / "allenai").mkdir()
    assert _data_setting("allenai/c4") == "data.path"


def test_only_one_process_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="this is one of 2 ranks; start them"):
        adloco.train("diloco")
    data = adloco.TensorSource(torch.zeros(4, 1), num_streams=2)
    own = adloco.Problem(
        build_model=lambda: torch.nn.Linear(1, 1),
        loss_fn=lambda model, x: model(x).sum(),
        data=data,
    )
    with pytest.raises(ValueError, match=r"of 2 ranks; train a problem over ranks with adloco\.Ad"):
        adloco.train("diloco", problem=own)


def test_ctrl_c_leaves_a_run_to_go_on_with(settings: dict[str, Any], tmp_path: Path) -> None:
    whole = adloco.train("diloco", **settings | {"run.folder": str(tmp_path / "whole")})
    before = signal.getsignal(signal.SIGINT)
    with (
        at_step(12, lambda: os.kill(os.getpid(), signal.SIGINT)),
        pytest.raises(KeyboardInterrupt, match=r"saved; resume with adloco\.train\(resume='"),
    ):
        adloco.train("diloco", **settings)
    assert signal.getsignal(signal.SIGINT) is before

    stopped = adloco.load(tmp_path / "run")
    assert not stopped.finished
    assert "state stopped" in repr(stopped)
    with locked(stopped.folder):
        assert "state running" in repr(stopped)
    with pytest.raises(ValueError, match="has not ended"):
        _ = stopped.summary
    run = adloco.train(resume=stopped.folder)
    assert numbers_of(run.folder) == numbers_of(whole.folder)
