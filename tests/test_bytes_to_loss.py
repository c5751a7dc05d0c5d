"""benchmarks/bytes_to_loss.py: when a loss is reached, which runs are the same, the table of
invented runs, and a tiny problem.
"""

import json
import math
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SMALL


@pytest.fixture(scope="module")
def runs() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        yield import_module("stored_runs")


@pytest.fixture(scope="module")
def study(runs: Any) -> Any:
    return import_module("bytes_to_loss")


def curve(*losses: float, every: int = 100, size: int = 10) -> list[dict[str, float]]:
    return [
        {
            "tokens": every * step,
            "bytes": size * step,
            "syncs": step,
            "seconds": 0.5 * step,
            "loss": loss,
        }
        for step, loss in enumerate(losses, start=1)
    ]


def test_a_target_is_reached_at_the_first_point_at_or_below_it(study: Any) -> None:
    at = study.crossing(curve(3.0, 2.0, 2.5, 1.0), target=2.0)
    assert at is not None
    assert (at["tokens"], at["bytes"], at["syncs"], at["seconds"]) == (200, 20, 2, 1.0)
    assert study.crossing(curve(3.0, 2.0), target=1.999) is None
    assert study.crossing([], target=9.0) is None


def test_the_mean_curve_takes_each_seed_as_last_evaluated(study: Any) -> None:
    # Tokens 100, 200 and 150, 300: from 150 on both have begun.
    mean = study.mean_curve([curve(4.0, 2.0), curve(3.0, 1.0, every=150)])
    assert [(each["tokens"], each["loss"], each["bytes"]) for each in mean] == [
        (150, 3.5, 10),
        (200, 2.5, 15),
        (300, 1.5, 20),
    ]


def test_the_bytes_of_ddp_are_those_of_four_workers_that_reduce_at_every_step(
    runs: Any,
) -> None:
    record = {
        "tokens": 64,
        "bytes_communicated": 7.0,
        "bytes_ddp_equivalent": 4000.0,
        "inner_steps": 10,
        "syncs": 2,
        "val_loss": 1.5,
    }
    assert runs.point(record, 3.0, data_parallel=True) == {
        "tokens": 64,
        "bytes": 4000,
        "syncs": 10,
        "sent": 6000,
        "seconds": 3.0,
        "loss": 1.5,
    }
    assert runs.point(record, 3.0, data_parallel=False) == {
        "tokens": 64,
        "bytes": 7,
        "syncs": 2,
        "seconds": 3.0,
        "loss": 1.5,
    }
    assert runs.point(record | {"bytes_sent": 10.5}, 3.0, data_parallel=False)["sent"] == 10


def test_a_key_says_what_a_run_is_and_nothing_else(runs: Any) -> None:
    spec = runs.Spec(
        arm="diloco", inner="adamw", inner_lr=4e-3, seed=0, tokens=1000, outer_lr=0.7, momentum=0.6
    )
    local = replace(spec, arm="local-sgd")
    others = [
        replace(spec, seed=1),
        replace(spec, momentum=0.9),
        replace(spec, arm="diloco-int8"),
        local,
    ]
    assert spec.key == replace(spec, inner_lr=0.004).key
    assert len({spec.key, *(other.key for other in others)}) == 5
    # Without an outer optimizer its settings are no part of the run.
    assert local.key == replace(local, outer_lr=0.5).key


@pytest.mark.parametrize("name", ["bytes_to_loss", "frontier", "studies"])
def test_a_page_is_that_of_its_stored_runs(name: str, runs: Any, tmp_path: Path) -> None:
    """Keys and flags of runs are those of the day on which they were trained."""
    page = Path(runs.__file__).with_name(f"{name}.md")
    file = shutil.copy(page.with_suffix(".json"), tmp_path)
    import_module(name).main(["--table", "--json", str(file)])
    assert (tmp_path / page.name).read_text() == page.read_text()


def test_an_arm_that_this_version_does_not_know_is_refused_before_anything_is_trained(
    runs: Any, study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ["--json", str(tmp_path / "runs.json")]
    monkeypatch.setitem(runs.ARMS, "broken", ("ddp", "no.such=1"))
    with pytest.raises(
        ValueError, match=r"this version refuses arm 'broken': there is no recipe section \[no\]"
    ):
        study.main(["--arms", "ddp", "broken", *file])
    with pytest.raises(ValueError, match="run without --table first"):
        study.main(["--table", *file])


def test_the_table_of_invented_runs(runs: Any, study: Any, tmp_path: Path) -> None:
    """The loss of a run follows from its tokens and bytes; ddp ends at 2 + 1 / (1 + 3) = 2.25, plus
    0.1 x seed.
    """
    store = runs.Store(tmp_path / "runs.json")
    for spec in study.finals(["ddp", "diloco", "diloco-int8"], [16], [0, 1]):
        ddp, wire = spec.arm == "ddp", 4 if spec.arm == "diloco-int8" else 1
        worse = (
            0 if ddp else 0.02 * math.log2(spec.sync_every * wire) - 0.15 * (spec.inner == "muon")
        )
        points = [
            {
                "tokens": step * 1024,
                "bytes": step * 533_760 // (1 if ddp else spec.sync_every * wire),
                "syncs": step,
                "seconds": 0.01 * step,
                "sent": step * 533_760 * (1.5 if ddp else 2 / (spec.sync_every * wire)),
                "loss": 2 + worse + 0.1 * spec.seed + 1 / (1 + step / 10),
            }
            for step in range(10, 31, 2)
        ]
        columns = {name: [each[name] for each in points] for name in points[0]}
        about = {"git": None, "torch": "2", "threads": 1, "diverged": ""}
        loss = {"final_loss": points[-1]["loss"], "curve": columns}
        store.add(spec.key, about | loss)
    study.main(["--table", "--sync-every", "16", "--json", str(store.file)])
    first, second = (tmp_path / "runs.md").read_text().split("## Against ddp with ")[1:]
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in first.splitlines()
        if line.startswith("| ")
    ]
    # Seeds end at 2.25 and 2.35, the mean at 2.3; 30 steps of 533,760 bytes are 16.0 MB.
    assert rows[2][:7] == ["ddp", "adamw", "1", "2", "2.3000 (2.2500 to 2.3500)", "16.0", "24.0"]
    assert rows[2][7].split(" / ")[1:] == ["16.0", "30", "0"]
    # 1.05 x 2.3 = 2.415 is reached where 2.05 + 1 / (1 + steps / 10) is: at 18 steps by ddp, and
    # with 0.08 more at 26 (26 x 33,360 bytes) by DiLoCo.
    assert rows[3][:4] == ["diloco", "adamw", "16", "2"]
    assert rows[3][7] == "not reached (best 2.3800)"
    assert rows[3][9] == "0.03M / 0.87 / 26 / 0"
    assert rows[3][10:] == ["16.0x", "-", "-", f"{18 * 16 / 26:.1f}x", "-"]
    # With Muon 0.15 less: 2.3 after 22 steps, which send twice their bytes.
    assert (
        rows[6][:3] == ["diloco", "muon", "16"]
        and rows[6][-1] == f"{30 * 1.5 * 16 / (22 * 2):.1f}x"
    )
    assert rows[4][0] == "diloco-int8"
    assert second.startswith("muon") and "| adamw |" not in second.split("## Tuning")[0]


@pytest.mark.nightly
def test_a_tiny_problem_is_trained_once(
    runs: Any,
    study: Any,
    tmp_path: Path,
    corpus: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {
        name: value
        for name, value in SMALL.items()
        if name.startswith(("model.", "data.", "evaluation."))
    }
    data = {"data.path": str(corpus), "data.cache": str(tmp_path / "cache")}
    monkeypatch.setattr(runs, "PROBLEM", runs.PROBLEM | sizes | data)
    monkeypatch.setattr(study, "TOKENS", 2560)
    monkeypatch.setattr(study, "CHOSEN", {"adamw": (4e-3, 4e-3, (0.7, 0.6))})
    words = ["--sync-every", "2", "--seeds", "0", "--arms", "ddp", "adloco"]
    words += ["--json", str(tmp_path / "runs.json")]
    study.main(words)
    assert capfd.readouterr().out.count(" s)") == 2
    stored = json.loads((tmp_path / "runs.json").read_text())
    ddp = next(run for run in stored.values() if run["arm"] == "ddp")
    # 5 inner steps of 16 windows of 32 tokens.
    assert (ddp["curve"]["tokens"], ddp["curve"]["syncs"], ddp["curve"]["bytes"]) == (
        [2560],
        [5],
        [5 * 4 * ddp["parameters"]],
    )
    adloco = next(run for run in stored.values() if run["arm"] == "adloco")
    assert (
        adloco["curve"]["tokens"][-1] >= 2560
        and adloco["curve"]["bytes"][-1] > 4 * adloco["parameters"]
    )
    study.main(words)
    assert " s)" not in capfd.readouterr().out
    assert json.loads((tmp_path / "runs.json").read_text()) == stored
