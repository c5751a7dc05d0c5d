"""reproduce/: the arms of each study are recipes of this version, and its statistics."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from adloco.study.arms import StudyRun
from tests.pages import DESCRIBES_LAB

pytestmark = DESCRIBES_LAB


REPRODUCE = Path(__file__).parents[1] / "reproduce"


@pytest.fixture(scope="module")
def compare() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(REPRODUCE)
        yield import_module("compare")


@pytest.mark.parametrize("file", sorted(REPRODUCE.glob("*.py")), ids=lambda file: file.stem)
def test_every_script_fits_this_version(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPRODUCE)
    import_module(file.stem)


def test_every_study_names_arms_that_can_be_trained(
    compare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[StudyRun] = []

    def train(runs: list[StudyRun], *others: Any, **named: Any) -> int:
        planned[:] = runs
        return 1

    monkeypatch.setattr("adloco.cli.studies.run_study", train)
    # Three values of eta by three of n; AdLoCo, it without each of three mechanisms and all.
    points = {"sweep": 9, "ablate": 5}
    for name, study in compare.STUDIES.items():
        assert compare.run(name, []) == 1, name
        arms = points.get(study.command, len(study.arms))
        assert len({run.folder for run in planned}) == arms * study.seeds, name


def test_the_words_of_a_study(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(compare, "main", lambda words: called.append(words) or 2)
    assert compare.run("eta-and-n", ["--run.folder", "elsewhere"]) == 2
    command, recipe, *words = called[0]
    assert (command, Path(recipe).name) == ("sweep", "adloco.toml")
    assert words[words.index("--seeds") :] == [
        *("--seeds", "3", "--run.folder", "runs/reproduce/eta-and-n", "--run.folder", "elsewhere")
    ]


def test_what_follows_a_comparison(
    compare: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rows are kept only if the study is as it is here, and what follows reads its folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "__file__", str(tmp_path / "compare.py"))
    monkeypatch.setattr(compare, "main", lambda words: 0)
    for folder in (tmp_path / "runs" / "reproduce" / "eta-and-n", tmp_path / "elsewhere"):
        folder.mkdir(parents=True)
        (folder / "compare.csv").write_text('arm,folder,val_loss\n"eta 1, n 2",f,2.5\n')
    assert compare.run("eta-and-n", ["--run.folder=elsewhere"]) == 0
    assert not (tmp_path / "eta_and_n.csv").exists()
    assert compare.run("eta-and-n", ["--parallel", "2"]) == 0
    assert (tmp_path / "eta_and_n.csv").read_text() == 'arm,val_loss\n"eta 1, n 2",2.5\n'

    seen: list[Path] = []
    shown = replace(compare.STUDIES["estimate"], then=seen.append)
    monkeypatch.setitem(compare.STUDIES, "estimate", shown)
    assert compare.run("estimate", ["--run.folder=elsewhere"]) == 0
    assert seen == [Path("elsewhere")]
