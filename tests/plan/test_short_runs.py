"""Run folders as points of a law of the loss."""

import itertools
import json
import shutil
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from adloco.cli.main import main
from adloco.config.recipe import build_recipe, override, read_values
from adloco.plan.loss_law import fit_loss_law
from adloco.plan.short_runs import method_of, read_short_runs, sync_every_of
from adloco.run.records import Records


def changed(run: Path, name: str, *changes: tuple[str, str]) -> Path:
    """A copy of a run with these lines of its recipe changed."""
    copy = run.with_name(name)
    copy.mkdir()
    for file in ("metrics.jsonl", "summary.json"):
        shutil.copy(run / file, copy / file)
    text = (run / "recipe.toml").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (copy / "recipe.toml").write_text(text)
    return copy


def test_the_losses_of_a_run_that_count(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--run.tokens",
        "8192",
        "--evaluation.every",
        "1",
        "--batch.maximum",
        "16",
        "--batch.eta",
        "0.5",
    ]
    assert main(["train", "adloco", *small, *words]) == 0
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    records = Records(run).read()

    cosine = read_short_runs([run])
    (point,) = cosine.points
    assert (point.tokens, point.loss) == (summary["tokens"], summary["final_val_loss"])
    assert point.annealed and point.sync_every == 4
    tokens = Counter[float]()
    for record, before in zip(records, [{"tokens": 0}, *records], strict=False):
        sizes = [trainer["trainer_batch"] for trainer in record["trainers"]]
        for size in sizes:
            tokens[size] += (record["tokens"] - before["tokens"]) * size / sum(sizes)
    assert point.batch == pytest.approx(tokens) and len(tokens) > 1

    constant = changed(run, "constant", ('shape = "cosine"', 'shape = "constant"'))
    points = read_short_runs([constant]).points
    assert points[-1].loss == summary["final_val_loss"]
    assert points[0].tokens >= summary["tokens"] / 3 and len(points) >= 3
    for one, two in itertools.pairwise(points):
        assert two.tokens >= 1.2 * one.tokens and not one.annealed
    assert fit_loss_law(points, draws=0).law.irreducible < summary["final_val_loss"]

    slow = ("warmup_fraction = 0.02", "warmup_fraction = 0.6")
    warm = changed(run, "warm", ('shape = "cosine"', 'shape = "constant"'), slow)
    assert all(point.tokens >= 0.6 * 8192 for point in read_short_runs([warm]).points)

    same = read_short_runs([run, run / ".." / "run"])
    assert len(same.points) == 1, "a run that is given by two paths is one"
    few = changed(run, "few", ("sync_every = 4", "sync_every = 40"))
    both = read_short_runs([run, few])
    assert [point.run for point in both.points] == [str(run)]
    assert both.assumptions[0].startswith("1 of 2 runs have fewer than 3 rounds")
    with pytest.raises(ValueError, match="fewer than 3 rounds of H inner steps; train longer"):
        read_short_runs([few])

    wsd = changed(run, "wsd", ('shape = "cosine"', 'shape = "wsd"'))
    points = read_short_runs([wsd]).points
    assert [point.annealed for point in points[-2:]] == [False, True]
    assert points[-2].tokens <= 0.8 * 8192

    both = read_short_runs(
        [run, changed(run, "lr", ("betas = [0.9, 0.95]", "betas = [0.9, 0.99]"))]
    )
    assert both.assumptions == ("What inner.betas change between runs counts as noise.",)
    resumed = changed(run, "resumed")
    change = {"round": 2, "setting": "inner.lr", "before": "0.1", "after": "0.008"}
    (resumed / "changes.jsonl").write_text(json.dumps(change) + "\n")
    assert read_short_runs([run, resumed]).assumptions == (
        "What inner.lr change between runs counts as noise.",
    ), "its recipe has the rate that it ended with"
    change |= {"setting": "method.sync_every", "before": "3", "after": "4"}
    (resumed / "changes.jsonl").write_text(json.dumps(change) + "\n")
    with pytest.raises(ValueError, match="sync_every was changed from 3 to 4 .* takes one H for"):
        read_short_runs([run, resumed])
    half = [record for record in records if record["tokens"] >= 4096]
    scales = [trainer["noise_scale"] for record in half for trainer in record["trainers"]]
    assert cosine.noise_scale == both.noise_scale == statistics.median(filter(None, scales))

    late = changed(run, "late", ("total_tokens = 8192", "total_tokens = 24000"))
    with pytest.raises(ValueError, match="has no loss that counts.*train it to the end"):
        read_short_runs([late])
    longer = changed(run, "longer", ("context_tokens = 32", "context_tokens = 64"))
    with pytest.raises(ValueError, match="data.context_tokens is 32 in .*run and 64 in .*longer;"):
        read_short_runs([run, longer])
    other = changed(run, "other")
    (other / "summary.json").write_text(json.dumps(summary | {"corpus": "another"}))
    with pytest.raises(ValueError, match="data.fingerprint is .* and another in"):
        read_short_runs([run, other])
    (other / "summary.json").write_text(json.dumps(summary | {"num_parameters": 3}))
    with pytest.raises(ValueError, match="model.num_parameters is .* and 3 in"):
        read_short_runs([run, other])
    (other / "summary.json").unlink()
    with pytest.raises(ValueError, match="has not ended"):
        read_short_runs([other])
    with pytest.raises(ValueError, match="is not a run folder"):
        read_short_runs([tmp_path])
    empty = changed(run, "empty")
    (empty / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="fewer than 3 rounds"):
        read_short_runs([empty])
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace('"samples": ', '"samples": 1'))
    with pytest.raises(ValueError, match="is not what the run wrote"):
        read_short_runs([run])


@pytest.mark.parametrize(
    ("recipe", "flags", "method", "sync_every"),
    [
        ("ddp", [], "1 worker, outer.update mean", 1),
        (
            "ddp",
            [("batch.initial", "64"), ("wire.format", "int8")],
            "1 worker, outer.update mean",
            1,
        ),
        (
            "local-sgd",
            [("method.sync_every", "7")],
            "2 workers, outer.update mean, wire.format fp32",
            7,
        ),
        (
            # A rate that falls to a half over a half makes the mean H 7 / 0.875.
            "local-sgd",
            [
                *[("streaming.fragments", "2"), ("method.sync_every", "7")],
                *[("method.sync_growth", "1"), ("learning_rate.shape", "wsd")],
                *[("learning_rate.decay_fraction", "0.5"), ("learning_rate.final_fraction", "0.5")],
            ],
            "2 workers, outer.update mean, wire.format fp32, streaming.fragments 2",
            8,
        ),
        (
            "local-sgd",
            [("method.dropped", "[1]")],
            "2 workers, 1 dropped, outer.update mean, wire.format fp32",
            20,
        ),
        (
            "diloco",
            [("wire.format", "int4"), ("outer.lr", "0.5")],
            "2 workers, outer.update optimizer, outer.lr 0.5, "
            "outer.options {'momentum': 0.6, 'nesterov': True}, wire.format int4",
            10,
        ),
        (
            "adloco",
            [("wire.format", "fp32"), ("outer.update", "mean"), ("merge.every", "2")],
            "2 trainers of 1 worker, outer.update mean, wire.format fp32, merge.policy smallest, "
            "merge.every 2, merge.first_round 2, merge.outer_momentum reset",
            16,
        ),
    ],
)
def test_what_runs_of_one_method_share(
    recipe: str, flags: Sequence[tuple[str, str]], method: str, sync_every: int
) -> None:
    built = build_recipe(override(read_values(recipe), flags))
    assert (method_of(built), sync_every_of(built)) == (method, sync_every)
