"""Texts of islands: who reads what, what is measured where, and what is refused."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from adloco import place
from adloco.algorithms.evaluation import means, total
from adloco.algorithms.method import SyncWeights
from adloco.cli.main import main
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.recipe_text import to_values
from adloco.config.sections import Recipe
from adloco.config.setting_words import take_settings
from adloco.data.sources import TokenSource
from adloco.distributed.launch.launcher import this_rank
from adloco.distributed.placement.islands import island_of
from adloco.distributed.testing import run_on_ranks
from adloco.run.records import Records
from adloco.run.trackers import scalars
from adloco.run.training_run import TrainingRun
from adloco.tasks.island_texts import IslandSource, IslandTexts
from tests.conftest import small_flags
from tests.problems import (
    Recording,
    cases,
    make_run,
    params_of,
    regression,
    without_timings,
)
from tests.run.test_training_run import numbers


def test_streams_are_divided_among_islands() -> None:
    """Five streams of two islands: three of the first, whose text has 10s, two of the second."""
    source = IslandSource(5, 2)
    assert [source.first_of(island) for island in range(3)] == [0, 3, 5]
    for island, first in ((0, 10), (1, 100)):
        text = np.arange(first, first + 13)
        source.sources[island] = TokenSource(
            text, context_tokens=2, num_streams=[3, 2][island], seed=0
        )
    read = [source.read(stream, 0, 2)[:, 0].tolist() for stream in range(5)]
    assert [sorted(stream) for stream in read] == [[10, 16], [12, 18], [14, 20]] + [
        sorted(stream) for stream in read[3:]
    ]
    assert all(first >= 100 for stream in read[3:] for first in stream)
    assert not {*read[3]} & {*read[4]}
    assert [island_of(stream, 5, 2) for stream in range(5)] == [0, 0, 0, 1, 1]


def test_sums_of_islands_add_up() -> None:
    """Losses 3 of 2 tokens and 8 of 4 tokens: 1.5 and 2 a token, and 11 / 6 in all."""
    islands = [[3.0, 2.0], [8.0, 4.0]]
    assert [means(sums) for sums in islands] == [[1.5], [2.0]]
    assert means(total(islands)) == pytest.approx([11 / 6])


def test_each_island_is_measured_by_its_own_workers() -> None:
    """Three workers, two of the first island, which share its set in two parts."""
    run = make_run(workers_per_trainer=3, data=regression(3), islands=2)
    parts: list[tuple[int, int, int]] = []

    def share_of(island: int) -> Callable[[Any, int, int], list[float]]:
        def share(model: Any, part: int, of: int) -> list[float]:
            parts.append((island, part, of))
            return [10.0 * island + part, 1.0]

        return share

    assert run.evaluate_islands(share_of) == {0: {0: [1.0, 2.0], 1: [10.0, 1.0]}}
    assert sorted(parts) == [(0, 0, 2), (0, 1, 2), (1, 0, 1)]
    assert run.evaluate(share_of(1)) == {0: [31.0 / 3]}


@pytest.mark.parametrize("weights", ["samples", "equal"])
def test_weights_of_workers_in_a_sync(weights: Any) -> None:
    """Batch 5 of two workers is 3 and 2 samples, by which their parameters count, or equally."""
    run = make_run(guards=None, weights=SyncWeights(weights=weights), sync_every=1)
    run.trainers[0].controller.requested_batch = 5
    source = regression(2)
    start = params_of(run).clone()
    assert run.round() is not None
    ends = []
    for worker, samples in ((0, 3), (1, 2)):
        alone = make_run(workers_per_trainer=1, data=Shifted(source, worker), sync_every=1)
        alone.trainers[0].controller.requested_batch = samples
        assert alone.round() is not None
        ends.append(params_of(alone))
    first = 0.6 if weights == "samples" else 0.5
    expected = start + first * (ends[0] - start) + (1 - first) * (ends[1] - start)
    torch.testing.assert_close(params_of(run), expected)
    with pytest.raises(ValueError, match="weights must be samples or equal, got 'other'"):
        SyncWeights(weights="other")  # type: ignore[arg-type]


class Shifted(Recording):
    """One stream of another source."""

    def __init__(self, source: Any, stream: int) -> None:
        super().__init__(source)
        self.num_streams, self._stream = 1, stream

    def read(self, stream: int, position: int, count: int) -> Any:
        return super().read(self._stream, position, count)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Two files that have nothing in common."""
    (tmp_path / "numbers.txt").write_text(" ".join(str(i * i) for i in range(3000)))
    (tmp_path / "words.txt").write_text("the cat sat on the mat and the dog sat too. " * 500)
    return tmp_path


def flags_of(folder: Path, islands: str, *more: str) -> list[str]:
    words = small_flags(folder, folder)
    words[words.index("--data.path") : words.index("--data.path") + 2] = []
    return [*words, "--run.tokens", "4096", "--data.islands", islands, *more]


def both(folder: Path) -> str:
    paths = (f'{name} = {{ path = "{folder / name}.txt" }}' for name in ("numbers", "words"))
    return f"{{ {', '.join(paths)} }}"


def recipe_of(words: list[str]) -> Recipe:
    flags, left = take_settings(words)
    assert not left
    return build_recipe(override(read_values("diloco"), flags))


def test_an_island_reads_its_own_text_and_is_measured_on_it(texts: Path) -> None:
    run = TrainingRun.create(recipe_of(flags_of(texts, both(texts))))
    source = run.task.train_source(2, seed=0, least=2)
    decoded = [
        run.task.tokenizer.decode(source.read(worker, 0, 20).flatten().tolist())
        for worker in (0, 1)
    ]
    assert not {*decoded[0]} & {*"abcdefghijklmnopqrstuvwxyz"}
    assert not {*decoded[1]} & {*"0123456789"}
    *_, record = run.rounds()
    own = {row["island"]: row["val_loss"] for row in record["islands"]}
    assert [*own] == ["numbers", "words"]
    # Both sets have eight windows of as many tokens.
    assert record["val_loss"] == pytest.approx(sum(own.values()) / 2, rel=1e-12)
    assert own["numbers"] > own["words"]


def train_apart(folder: Path, ranks: int, until: int = 0) -> list[dict[str, Any]]:
    """Train a worker on each rank, which knows the path of its own text alone.

    until: A round after which the run is left and resumed.
    """
    os.chdir(folder)
    own = ["numbers.txt", "words.txt"][this_rank() * 2 // ranks]
    words = flags_of(folder, "{ numbers = {}, words = {} }", "--data.path", own)
    words += ["--method.workers_per_trainer", str(ranks), "--run.checkpoint_every", "1"]
    run = TrainingRun.create(recipe_of(words))
    records = []
    for record in run.rounds():
        records.append(without_timings(record))
        if record["round"] == until:
            break
    if until:
        run.saving.wait()
        run = TrainingRun.resume(run.folder, [("data.path", own)])
        records += [without_timings(record) for record in run.rounds()]
    return records


@pytest.mark.parametrize(
    "ranks", cases({"one each": (2,), "two workers each": (4,)}, default=("one each",))
)
def test_islands_on_their_own_ranks_give_the_numbers_of_one_process(
    ranks: int, texts: Path
) -> None:
    more = ["--method.workers_per_trainer", str(ranks), "--run.folder", str(texts / "one")]
    run = TrainingRun.create(recipe_of(flags_of(texts, both(texts), *more)))
    expected = [without_timings(record) for record in run.rounds()]
    assert run_on_ranks(train_apart, ranks, texts, ranks)[0] == expected
    if ranks == 2:
        shutil.rmtree(texts / "run")
        assert run_on_ranks(train_apart, ranks, texts, ranks, 3)[0] == expected


SENDING = {
    **{"send": 0, "isend": 0, "broadcast": 0, "all_reduce": 0, "batch_isend_irecv": 0},
    **{"all_gather_into_tensor": 1, "all_gather_single": 1, "reduce_scatter_tensor": 1},
}
"""Functions of torch.distributed, and which argument of each is sent."""


def what_is_sent(folder: Path) -> tuple[int, bool, bool]:
    """Train apart; the bytes that were given to torch.distributed, and whether a stretch of this
    rank's text is among them: in training, and once it has been sent.
    """
    sent: list[bytes] = []

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any, **named: Any) -> Any:
            argument = given[SENDING[name]]
            if name == "batch_isend_irecv":
                tensors = [each.tensor for each in argument if each.op is dist.isend]
            else:  # Who receives a broadcast gives memory that still has anything in it.
                source = named.get("src", given[1] if name == "broadcast" else this_rank())
                tensors = [argument] if source == this_rank() else []
            for tensor in tensors:
                content = tensor.detach().reshape(-1).view(torch.uint8)
                sent.append(content.numpy().tobytes())
            return function(*given, **named)

        return noted

    for name in SENDING:
        if hasattr(dist, name):  # Names differ between versions of torch.
            function = noting(name, getattr(dist, name))
            setattr(dist, name, function)
            setattr(dist.distributed_c10d, name, function)  # P2POp compares isend with this one.
    train_apart(folder, 2)
    text = Path(["numbers.txt", "words.txt"][this_rank()]).read_bytes()
    own = eights(np.frombuffer(text, np.uint8))

    def found() -> bool:
        return any(
            bool(np.isin(eights(as_tokens(content, kind)), own).any())
            for content in sent
            for kind in ("u1", "<i2", "<i4", "<i8", "<f4")
        )

    in_training, volume = found(), sum(map(len, sent))
    place(2).all_values(text[100:200].decode())
    return volume, in_training, found()


def as_tokens(content: bytes, kind: str) -> np.ndarray:
    """Numbers of a type as tokens of a byte each; 0, which no text has, for other numbers."""
    whole = len(content) // np.dtype(kind).itemsize * np.dtype(kind).itemsize
    numbers = np.frombuffer(content[:whole], kind)
    fits = (numbers >= 0) & (numbers < 256) & (numbers % 1 == 0)
    return np.where(fits, numbers, 0).astype(np.uint8)


def eights(tokens: np.ndarray) -> np.ndarray:
    """All stretches of eight tokens, each as a number."""
    if len(tokens) < 8:
        return np.zeros(0, np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, 8)
    return np.unique(np.ascontiguousarray(windows).view(np.uint64))


def test_no_stretch_of_an_island_s_text_is_sent(texts: Path) -> None:
    """As characters, or as tokens of a byte each in any type."""
    for volume, in_training, once_sent in run_on_ranks(what_is_sent, 2, texts):
        assert volume > 10_000, "pseudo-gradients are among what was seen"
        assert (in_training, once_sent) == (False, True)


def train_sharded(folder: Path) -> dict[str, Any]:
    """Train two workers, each sharded over two ranks, which have its text."""
    os.chdir(folder)
    own = ["numbers.txt", "words.txt"][this_rank() // 2]
    words = flags_of(folder, "{ numbers = {}, words = {} }", "--data.path", own)
    run = TrainingRun.create(recipe_of([*words, "--placement.shard_size", "2", *ADAMW]))
    *_, last = run.rounds()
    return last


ADAMW = ("--inner.optimizer", "adamw", "--run.precision", "fp32")


@pytest.mark.nightly
def test_the_ranks_of_a_sharded_island_share_its_text(texts: Path) -> None:
    more = ["--run.folder", str(texts / "one"), *ADAMW]
    *_, expected = TrainingRun.create(recipe_of(flags_of(texts, both(texts), *more))).rounds()
    found = run_on_ranks(train_sharded, 4, texts)[0]
    for row, other in zip(found["islands"], expected["islands"], strict=True):
        assert row["island"] == other["island"]
        assert row["val_loss"] == pytest.approx(other["val_loss"], rel=1e-4)


def test_a_run_continues_without_a_dropped_island(texts: Path) -> None:
    run = TrainingRun.create(recipe_of([*flags_of(texts, both(texts)), "--method.dropped", "[0]"]))
    *_, record = run.rounds()
    assert [row["island"] for row in record["islands"]] == ["words"]
    assert record["val_loss"] == record["islands"][0]["val_loss"]


def test_islands_with_one_text_are_refused(texts: Path) -> None:
    """Also if they are in several processes: their workers would read the same samples."""
    task = TrainingRun.create(recipe_of(flags_of(texts, both(texts)))).task
    assert isinstance(task, IslandTexts)
    told = dict.fromkeys(("numbers", "words"), ("a text", 100))
    with pytest.raises(ValueError, match="islands numbers and words have the same text"):
        task.gather_texts(lambda mine: [(mine[0], told)])


def test_names_with_dots_are_written_as_they_are(texts: Path) -> None:
    islands = both(texts).replace("numbers =", '"num.bers" =')
    recipe = recipe_of(flags_of(texts, islands))
    assert [*build_recipe(to_values(recipe)).data.islands] == ["num.bers", "words"]


def test_losses_after_a_drop_are_not_compared_with_those_before(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The words, which are easier, are dropped: that of the numbers alone is higher at once."""
    words = [*flags_of(texts, both(texts)), "--run.keep_best", "true", "--run.tokens", "8000"]
    assert main(["train", "diloco", *words, "--learning_rate.shape", "constant"]) == 0
    folder = texts / "run"
    before = json.loads((folder / "summary.json").read_text())["best_val_loss"]
    capsys.readouterr()
    words = ["--method.dropped", "[1]", "--run.tokens", "16000"]
    assert main(["train", "--resume", str(folder), *words]) == 0
    told = "val_loss is that of numbers alone, because the other islands are dropped"
    shown = capsys.readouterr().out
    assert told in shown
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    after = [row for row in records if len(row["islands"]) == 1]
    assert 0 < len(after) < len(records)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["best_val_loss"] == min(row["val_loss"] for row in after)
    assert summary["best_val_loss"] > before
    assert f"first {after[0]['val_loss']:.4f}" in shown
    (texts / "words.txt").unlink()  # Its island is gone.
    assert main(["evaluate", str(folder), "--best"]) == 0
    assert f"loss {summary['best_val_loss']:.4f} nats" in capsys.readouterr().out


def test_a_run_of_islands_is_resumed_bit_for_bit_and_with_these_texts_alone(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = flags_of(texts, both(texts))
    assert main(["train", "diloco", *words, "--run.folder", str(texts / "whole")]) == 0
    folder = texts / "run"
    run = TrainingRun.create(recipe_of(words))
    for record in run.rounds():
        if record["round"] == 3:
            run.stop()
    assert main(["train", "--resume", str(folder)]) == 0
    assert numbers(folder) == numbers(texts / "whole")
    assert main(["evaluate", str(folder)]) == 0
    # Workers read by the number of their island.
    turned = both(texts).replace("numbers =", "x =").replace("words =", "numbers =")
    for islands in (turned.replace("x =", "words ="), both(texts).replace("words =", "others =")):
        capsys.readouterr()
        assert main(["train", "--resume", str(folder), "--data.islands", islands]) == 2
        assert "must name numbers, words in this order" in capsys.readouterr().err
    (texts / "words.txt").write_text("something else " * 2000)
    capsys.readouterr()
    for command in (["train", "--resume", str(folder)], ["evaluate", str(folder)]):
        assert main(command) == 2
        assert "the text of island words is not what the run in" in capsys.readouterr().err


def texts_that_differ(folder: Path) -> str:
    os.chdir(folder)
    own = ["numbers.txt", "words.txt"][this_rank() % 2]
    words = flags_of(folder, "{ a = {}, b = {} }", "--data.path", own)
    try:
        TrainingRun.create(recipe_of([*words, "--method.workers_per_trainer", "4"]))
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_of_one_island_have_one_text(texts: Path) -> None:
    problems = run_on_ranks(texts_that_differ, 4, texts)
    assert {*problems} == {"the text of island a differs between its ranks; give them the same"}


@pytest.mark.parametrize(
    ("islands", "more", "problem"),
    [
        ("{ a = {} }", (), "data.islands must name two islands or more"),
        ("{ a = {}, 'b c' = {} }", (), "with letters, digits"),
        ("{ a = {}, b = {} }", (), "the workers of islands a and b, which have the same text"),
        ("{ a = {}, b = { pth = 'x' } }", (), "island 'b' of data.islands: pth cannot be given"),
        ("{ a = {}, b = { path = 3 } }", (), "path must be of the type str, got 3"),
        (
            "{ a = {}, b = { samples = -1 } }",
            (),
            "island 'b' of data.islands: data.samples must be >= 0, got -1",
        ),
        (
            "BOTH",
            ("--data.tokenizer", "bpe:300"),
            "trained on a text that the islands do not share",
        ),
        ("BOTH", ("--method.num_trainers", "2"), "data.islands needs one trainer"),
        ("BOTH", ("--method.workers_per_trainer", "1"), "one for each of data.islands, got 1"),
        ("BOTH", ("--run.on_rank_failure", "replace"), "cannot be replace with data.islands"),
        (
            "BOTH",
            ("--run.on_rank_failure", "drop", "--method.workers_per_trainer", "3"),
            "make method.workers_per_trainer 3 a multiple of 2",
        ),
        ("BOTH", ("--task.kind", "classification"), "data.islands is for language models"),
        ("{ a = {}, b = { path = '/nowhere' } }", (), "island b: "),
    ],
)
def test_what_islands_cannot_be(
    islands: str, more: tuple[str, ...], problem: str, texts: Path, capsys: Any
) -> None:
    given = both(texts) if islands == "BOTH" else islands
    assert main(["train", "diloco", *flags_of(texts, given, *more)]) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert not (texts / "run").exists()


def test_prepare_fills_the_cache_of_each_island(
    texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = texts / "recipe.toml"
    recipe.write_text(f"[data]\nislands = {both(texts)}\ncache = '{texts / 'cache'}'\n")
    words = ["prepare", str(recipe), "--processes", "1", "--method.workers_per_trainer", "2"]
    assert main(words) == 0
    assert capsys.readouterr().out.count("tokens to train on") == 2
    assert len([*(texts / "cache").glob("*/*")]) >= 2


def test_the_numbers_of_islands_are_shown(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "diloco", *flags_of(texts, both(texts))]) == 0
    shown = capsys.readouterr().out
    line = Records(texts / "run").newest()
    for row in line["islands"]:
        assert f"{row['island']} {row['val_loss']:.4f}, bpb" in shown
        assert scalars(line)[f"island-{row['island']}/val_loss"] == row["val_loss"]
    assert '"island words"' in (texts / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("samples", "workers", "expected"),
    [((100, 100), 2, 200), ((100, 100), 3, 150), ((1000, 100), 3, 300), ((100, 1000), 3, 150)],
)
def test_samples_before_one_comes_again(
    samples: tuple[int, int], workers: int, expected: int, texts: Path
) -> None:
    """Of three streams the first island has two, so its samples last half as long."""
    shape = ["--method.workers_per_trainer", str(workers)]
    task = TrainingRun.create(recipe_of(flags_of(texts, both(texts), *shape))).task
    assert isinstance(task, IslandTexts)
    told = {name: (name, count) for name, count in zip(("numbers", "words"), samples, strict=True)}
    task.gather_texts(lambda mine: [(mine[0], told)])
    assert task.num_train_samples(0) == expected
