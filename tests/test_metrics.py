"""The tables of metrics name what a run reports, and docs/run-folder.md names the same."""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest

import adloco
from adloco.algorithms.reports import RoundReport, SyncReport, TrainerReport, WorkerReport
from adloco.config.sections import TASKS
from adloco.config.values import adapter
from adloco.metrics import (
    PHASE,
    ROUND,
    SYNC,
    TRAINER,
    WORKER,
    Metric,
    Unit,
    aggregate,
    known_measures,
    validation,
)
from adloco.options import option_metrics
from adloco.run.record_types import Number
from adloco.run.round_numbers import summarise
from tests.pages import DESCRIBES_LAB

PAGE = Path(__file__).parents[1] / "docs" / "run-folder.md"


def names(report: type) -> list[str]:
    return [field.name for field in dataclasses.fields(report)]


def test_the_tables_name_what_is_reported() -> None:
    assert list(SYNC) == names(SyncReport)
    assert list(TRAINER) == names(TrainerReport)
    # What stages say stands in `more`, by the names of their options' metrics.
    own = [name for name in names(WorkerReport) if name != "more"]
    assert list(WORKER) == [*own, *option_metrics()]
    made_by_the_run = {"tokens", "seconds", "tokens_per_second", "learning_rate", "memory_bytes"}
    made_by_the_run |= {"rows_read", "bytes_checkpoint", "mfu"}
    of_their_own = {"sync", "trainers", "workers", "merges", "changes", "steps"}
    assert set(ROUND) - made_by_the_run == set(names(RoundReport)) - of_their_own
    assert all(
        metric.per == per
        for per, table in (("round", ROUND), ("phase", PHASE))
        for metric in table.values()
    )


@DESCRIBES_LAB
def test_the_page_names_the_same_fields_and_units() -> None:
    page = PAGE.read_text()
    tables = re.findall(r"\| field \| unit \| meaning \|\n\|[-|]+\n((?:\|.*\n)+)", page)
    written = [
        [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in table.splitlines()]
        for table in tables
    ]
    expected = [
        [(metric.name, metric.unit.name) for metric in table.values()]
        for table in (ROUND, TRAINER, WORKER, SYNC, PHASE)
    ]
    assert written == expected
    (measures,) = re.findall(
        r"\| field \| unit \| task \| meaning \|\n\|[-|]+\n((?:\|.*\n)+)", page
    )
    of_tasks = [
        tuple(cell.strip() for cell in line.split("|")[1:4]) for line in measures.splitlines()
    ]
    assert sorted(of_tasks) == sorted(
        (validation(measure).name, measure.unit.name, kind)
        for kind, task in TASKS.classes.items()
        for measure in task().measures
    )


def test_only_a_task_knows_its_measures() -> None:
    source = Path(adloco.__file__).parent
    others = [path for path in source.rglob("*.py") if "tasks" not in path.parts]
    assert [
        path.name
        for path in others
        if re.search(r'["_](accuracy|perplexity|bits_per_byte)', path.read_text())
    ] == []
    assert [
        path.name for path in (source / "cli").rglob("*.py") if "is_causal" in path.read_text()
    ] == []


@pytest.mark.parametrize("kind", TASKS.classes)
def test_a_task_measures_what_it_declares(kind: str) -> None:
    task = TASKS.classes[kind]()
    means = [0.25, 0.75]
    measured = task.measured(means)
    assert list(measured) == [measure.name for measure in task.measures]
    assert (task.measures[0].name, measured["loss"]) == ("loss", 0.25)
    if kind == "language-model":
        assert measured["perplexity"] == math.exp(0.25)
        assert measured["bits_per_byte"] == pytest.approx(0.25 / math.log(2) / 0.75)
        # With a larger number, the line of a run that diverges would count as damaged.
        adapter(Number).validate_python(task.measured([1e9, 1.0])["perplexity"])
        # No text, or a tokenizer that does not say how much text its tokens stand for.
        assert all("bits_per_byte" not in task.measured([1.0, size]) for size in (0.0, math.nan))


def test_numbers_are_shown_with_their_unit() -> None:
    assert ROUND["tokens"].text(12_345) == "12,345"
    assert ROUND["tokens"].text(1_200_000_000) == "1,200,000,000"
    assert SYNC["peak_bytes_per_second"].text(2_500_000) == "2.5 MB/s"
    assert ROUND["bytes_sent"].text(2_500_000) == "2.5 MB"
    assert ROUND["bytes_sent"].text(456_789) == "0.5 MB"
    assert ROUND["bytes_sent"].text(45_678) == "45.7 kB"
    assert ROUND["bytes_sent"].text(0) == "0.0 MB"
    assert ROUND["bytes_sent"].number(45_678) == "0.0457", "of MB, where a column has the unit"
    assert ROUND["memory_bytes"].text(3 * 2**20) == "3 MiB"
    assert ROUND["train_loss"].text(1.23456) == "1.2346"
    losses = (0.0123456, 1.23456e-4, -1.23456e-5, 0.0, 12345.6, 1.23456e21, math.nan)
    shown = ["0.0123", "0.000123", "-1.23e-05", "0.0000", "12345.6000", "1.23e+21", "nan"]
    assert [ROUND["train_loss"].number(loss) for loss in losses] == shown
    assert SYNC["compression_ratio"].text(3.94) == "3.9 x"
    assert TRAINER["noise_scale"].text(None) == "-"
    assert [
        metric.axis for metric in (ROUND["tokens"], ROUND["seconds"], TRAINER["requested_batch"])
    ] == [
        "tokens",
        "time (s)",
        "requested batch (samples)",
    ]


def line(
    size: float, ratio: float | None, rate: float | None, cosines: list[float | None]
) -> dict[str, Any]:
    sync = {
        "bytes": size,
        "compression_ratio": ratio,
        "exposed_seconds": 1.0,
        "hidden_seconds": 0.5,
        "transfer_seconds": 1.5,
        "peak_bytes_per_second": rate,
    }
    return {
        "tokens": 7,
        "sync": sync,
        "workers": [{"skipped_steps": 1, "restarts": 2}, {"skipped_steps": 0, "restarts": 0}],
        "trainers": [{"cosine_similarity": cosine, "wire_error": None} for cosine in cosines],
    }


def test_totals_of_syncs_by_hand() -> None:
    """Rounds of 8 and 2 bytes that were 16 and 8: 10 bytes for 24.

    A round in which every worker was alone counts for neither.
    """
    records = [
        line(8, 2.0, 7.0, [0.1]),
        line(2, 4.0, 3.0, [0.0, 1.0, None]),
        line(0, None, None, [None]),
    ]
    expected = {
        "bytes": 5,
        "compression_ratio": 2.4,
        "exposed_seconds": 3.0,
        "hidden_seconds": 1.5,
        "transfer_seconds": 4.5,
        "peak_bytes_per_second": 7.0,
    }
    assert {name: aggregate(SYNC[name], records) for name in expected} == pytest.approx(expected)
    assert (
        aggregate(TRAINER["cosine_similarity"], records),
        aggregate(TRAINER["wire_error"], records),
    ) == (0.5, None)
    assert [aggregate(WORKER[name], records) for name in ("skipped_steps", "restarts")] == [3, 6]
    assert repr(aggregate(ROUND["tokens"], records)) == "7", "no fraction"
    alone = [line(0, None, None, [None])]
    metrics = (
        SYNC["bytes"],
        SYNC["compression_ratio"],
        SYNC["peak_bytes_per_second"],
        TRAINER["cosine_similarity"],
    )
    assert [aggregate(metric, alone) for metric in metrics] == [None] * 4


def test_the_best_of_a_measure_is_the_lowest_or_the_highest() -> None:
    """The first summary is of the whole run, the others of its trainers. The loss of trainer 1 is
    larger by 20, and its score unknown.
    """
    measures = [
        Metric("loss", "loss", Unit("nats")),
        Metric("score", "score", Unit(""), better="higher"),
    ]
    rounds = [(3.0, 0.1), (1.0, 0.4), (None, None), (2.0, 0.3)]
    records = []
    for loss, score in rounds:
        record = (
            dict.fromkeys(ROUND, 1)
            | line(0, None, None, [None, None])
            | {"workers": []}
            | {"val_loss": loss, "val_score": score}
        )
        record["trainers"][0] |= {"trainer": 0, "val_loss": loss, "val_score": score}
        record["trainers"][1] |= {"trainer": 1, "val_loss": None if loss is None else loss + 20}
        records.append(record)
    keys = ("final_val_loss", "best_val_loss", "final_val_score", "best_val_score")
    first = [2.0, 1.0, 0.3, 0.4]
    for trainer, expected in ((None, first), (0, first), (1, [22.0, 21.0, None, None])):
        summary = summarise(records, measures, num_parameters=5, recipe="x", trainer=trainer)
        assert [summary[key] for key in keys] == expected


def test_a_measure_is_known_that_follows_from_the_loss_or_was_measured_once() -> None:
    loss, follows, measured, never = (
        Metric(name, name, Unit(""), of_loss=math.exp if name == "follows" else None)
        for name in ("loss", "follows", "measured", "never")
    )
    records = [{"val_measured": None}, {"val_measured": 0.0}]
    assert known_measures([loss, follows, measured, never], records) == [loss, follows, measured]


def test_a_share_is_shown_in_percent_on_axes_too() -> None:
    lost = TRAINER["wire_error"]
    assert lost.text(0.781) == "78.1%"
    assert lost.axis == "lost by the wire format (%)" and lost.unit.scale == 0.01
