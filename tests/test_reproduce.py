"""reproduce/: the arms of each study are recipes of this version, and its statistics."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from adloco.cli.arguments import take_settings
from adloco.study.arms import plan_runs
from tests.pages import DESCRIBES_LAB

pytestmark = DESCRIBES_LAB


@pytest.fixture(scope="module")
def compare() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "reproduce")
        yield import_module("compare")


def test_every_study_names_arms_that_can_be_trained(compare: Any, tmp_path: Path) -> None:
    for name, study in compare.STUDIES.items():
        if study.command == "compare":
            settings, _ = take_settings(study.common.split())
            runs = plan_runs(study.arms, settings, study.seeds, tmp_path)
            assert len({run.folder for run in runs}) == len(study.arms) * study.seeds, name


def test_the_words_of_a_study(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(compare, "main", lambda words: called.append(words) or 2)
    assert compare.run("eta-and-n", ["--run.folder", "elsewhere"]) == 2
    command, recipe, *words = called[0]
    assert (command, Path(recipe).name) == ("sweep", "adloco.toml")
    assert words[words.index("--seeds") :] == [
        *("--seeds", "3", "--run.folder", "runs/reproduce/eta-and-n", "--run.folder", "elsewhere")
    ]


def test_the_rank_correlation(compare: Any) -> None:
    found = compare.analyses.rank_correlation
    assert found([1, 2, 3], [10, 20, 90]) == pytest.approx(1)
    # Ranks 0, 1.5, 1.5, 3 and 1, 0, 2, 3: a covariance of 3 over the root of 4.5 x 5.
    assert found([1, 2, 2, 5], [3, 1, 4, 9]) == pytest.approx(3 / (4.5 * 5) ** 0.5)
    assert found([1, 1], [2, 3]) is None
