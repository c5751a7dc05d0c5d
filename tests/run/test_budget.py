"""Budgets in tokens, rounds, inner steps and syncs; and runs that become longer."""

import itertools
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adloco.cli.main import main
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.setting_words import take_settings
from adloco.run import environment
from adloco.run.budget import Budget, RoundSize, part_used
from adloco.run.changes import absolute_budgets
from adloco.run.trained import load_trained
from adloco.run.training_run import TrainingRun
from tests.problems import numbers_of
from tests.run.test_training_run import make_run

CONSTANT = ["--learning_rate.shape", "constant", "--learning_rate.warmup_fraction", "0"]
NO_TOKENS = ["--run.tokens", "0", *CONSTANT]


@pytest.mark.parametrize(
    ("budget", "rounds", "inner_steps"),
    [
        # Small runs have four inner steps a round, and 8 x 32 tokens a step with `diloco`.
        (["--run.rounds", "3"], 3, 12),
        (["--run.inner_steps", "10"], 3, 10),
        (["--run.syncs", "2"], 2, 8),
        (["--run.inner_steps", "10", "--run.rounds", "2"], 2, 8),
        (["--run.inner_steps", "10", "--run.tokens", "1376"], 2, 6),
    ],
)
def test_the_first_budget_that_is_spent_ends_the_run(
    budget: list[str], rounds: int, inner_steps: int, small: list[str], tmp_path: Path
) -> None:
    assert main(["train", "diloco", *small, *NO_TOKENS, *budget]) == 0
    last = numbers_of(tmp_path / "run")[-1]
    assert (last["round"], last["inner_steps"]) == (rounds, inner_steps)
    assert last["val_loss"] is not None, "the last round is evaluated"


@pytest.mark.parametrize(
    ("limits", "done", "steps", "final", "samples"),
    [
        ({"tokens": 300}, 0, 20, 0, 160),  # 20 steps of 8 samples are not the end yet.
        ({"tokens": 100}, 0, 13, 4, 100),  # 12 steps of 8, and 4 samples are left.
        ({"tokens": 97}, 0, 12, 9, 97),  # One sample is too few for two workers.
        ({"tokens": 160}, 0, 20, 8, 160),
        ({"tokens": 161}, 0, 20, 9, 161),  # Nor is it left for a round of its own.
        ({"tokens": 162}, 0, 20, 0, 160),
        ({"tokens": 100}, 95, 1, 5, 5),
        ({"tokens": 1}, 0, 1, 1, 1),  # Less than a step can take.
        ({"tokens": 100, "inner_steps": 3}, 0, 3, 0, 24),
        ({"tokens": 100, "inner_steps": 13}, 0, 13, 4, 100),
    ],
)
def test_the_last_step_by_hand(
    limits: dict[str, int], done: int, steps: int, final: int, samples: int
) -> None:
    state: Any = SimpleNamespace(samples=done, inner_steps=0, in_round=False)
    size = Budget(limits=limits, tokens_per_sample=1).next_round(
        state, per_step=8, fewest=2, sync_every=20
    )
    assert (size.steps, size.final, size.samples) == (steps, final, samples)


def test_a_budget_that_is_no_whole_sample_ends_with_the_next() -> None:
    state: Any = SimpleNamespace(samples=40, inner_steps=0, in_round=False)
    budget = Budget(limits={"tokens": 1345}, tokens_per_sample=32)  # 42.03 samples.
    assert budget.next_round(state, per_step=8, fewest=2, sync_every=4).samples == 3
    state.in_round, state.round_steps, state.final_samples = True, 2, 9
    assert budget.next_round(state, per_step=8, fewest=2, sync_every=4) == RoundSize(
        steps=2, per_step=8, final=9
    ), "a round in progress keeps its length"


def test_what_is_spent_by_hand() -> None:
    """After 40 samples, 5 steps, a round and a sync; 8 samples and 2 steps of the next are done."""
    state: Any = SimpleNamespace(
        **{"samples": 40, "samples_so_far": 48, "inner_steps": 5, "begun_steps": 2},
        **{"rounds_done": 1, "syncs": 1, "will_sync": True},
    )

    def budget(**limits: int) -> Budget:
        return Budget(limits=limits, tokens_per_sample=10)

    assert budget(tokens=1000, inner_steps=10).used(state) == (0.7, "7 / 10 inner steps")
    assert budget(tokens=400, rounds=2).used(state) == (1.0, "480 / 400 tokens")
    assert budget(tokens=400, rounds=9).spent(state) and not budget(tokens=401).spent(state)
    assert budget(tokens=400).many_passes(10) == ""
    assert budget(tokens=401).many_passes(10).startswith("run.tokens is 4.0 times the text")
    line = {"tokens": 150, "round": 2, "inner_steps": 7, "syncs": 9}
    assert part_used({"tokens": 1000, "rounds": 4, "syncs": 0}, line) == 0.5
    assert part_used({"tokens": 100}, line) == 1.0
    assert part_used({"tokens": 100}, {}) == 0.0


@pytest.mark.parametrize(
    "words",
    [
        ["--run.tokens", "5024"],
        # Several workers in several trainers, batches that grow, merges, accumulation.
        ["--run.tokens", "8032", "--method.workers_per_trainer", "2", "--batch.eta", "0.3"],
    ],
    ids=["two trainers", "of two workers"],
)
def test_a_run_ends_with_its_budget_in_tokens(
    words: list[str], small: list[str], tmp_path: Path
) -> None:
    assert main(["train", "adloco", *small, *words]) == 0
    lines, last = numbers_of(tmp_path / "run"), int(words[1])
    assert lines[-1]["tokens"] == 32 * lines[-1]["samples"] == last
    steps = (tmp_path / "run" / "steps.jsonl").read_text().splitlines()
    trained = [json.loads(line) for line in steps]
    of_step = [
        sum(row["samples"] for row in trained if row["inner_step"] == step + 1)
        for step in range(lines[-1]["inner_steps"])
    ]
    assert 32 * sum(of_step) == last
    assert of_step[-1] not in (0, of_step[-2]), "the last step is another one"


def test_a_budget_of_unusual_size_is_noticed(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One byte is one token: 12 windows of 32 to train on, read five times in 1,920 tokens, which
    are 8 inner steps of 8 windows.
    """
    file, held_out = tmp_path / "text.txt", 64
    file.write_text("x" * (12 * 32 + 1 + held_out))
    given = ["train", "diloco", *small, "--data.path", str(file)]
    given += ["--data.validation_fraction", str(held_out / len(file.read_text()))]
    long = ["--run.tokens", "1920", "--method.sync_every", "9", "--run.folder"]
    assert main([*given, *long, str(tmp_path / "long")]) == 0
    told = capsys.readouterr().out
    notices = json.loads((tmp_path / "long" / "environment.json").read_text())["notices"]
    assert [notice.split(":")[0].split(", which")[0] for notice in notices] == [
        "run.tokens is 5.0 times the text",
        "the budget ends after 8 inner steps, within the first round of method.sync_every = 9",
    ]
    assert all(notice in told for notice in notices)
    usual = ["--run.tokens", "1536", "--method.sync_every", "6", "--run.folder"]
    assert main([*given, *usual, str(tmp_path / "usual")]) == 0
    assert json.loads((tmp_path / "usual" / "environment.json").read_text())["notices"] == []


def test_a_schedule_that_ends_with_another_budget_is_noticed(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recipe of a run's folder has the end of its schedule as a number."""
    assert main(["train", "diloco", *small, "--run.tokens", "2048"]) == 0
    own = [*small, "--run.tokens", "4096", "--run.folder", str(tmp_path / "longer")]
    capsys.readouterr()
    assert main(["train", str(tmp_path / "run" / "recipe.toml"), *own]) == 0
    expected = "learning_rate.total_tokens is 2,048 and run.tokens 4,096, so the learning rate does"
    assert expected in " ".join(capsys.readouterr().out.split())


def test_a_lowered_budget_that_the_schedule_outlasts_is_noticed(
    small: list[str], tmp_path: Path
) -> None:
    rounds = make_run("diloco", [*small, "--run.checkpoint_every", "1"]).rounds()
    next(rounds)
    rounds.close()  # type: ignore[attr-defined]

    def told(tokens: str) -> bool:
        expected = (
            f"learning_rate.total_tokens is 8,000 and run.tokens {int(tokens):,}, so the learning "
            "rate does not end its fall with the run; with run.tokens 8,000 it does"
        )
        return expected in TrainingRun.resume(tmp_path / "run", [("run.tokens", tokens)]).notices

    assert told("4096")
    assert not told("4096"), "the folder has it already"
    assert not told("8000")


@pytest.mark.parametrize(
    ("rule", "cut"),
    [
        ("ramp --batch.first 2 --batch.last 64 --batch.over_samples 9", True),
        ("ramp --batch.first 64 --batch.last 2 --batch.over_samples 9", True),
        ("ramp --batch.first 2 --batch.last 16 --batch.over_samples 9", False),
        ("warmup --batch.batches 2,64,4 --batch.after_samples 0,8,16", True),
        ("seesaw --learning_rate.coupling sqrt --learning_rate.reference_batch 8", True),
    ],
)
def test_a_plan_of_batches_that_is_cut_is_noticed(rule: str, cut: bool, small: list[str]) -> None:
    """Seesaw grows from 8 to 80, where a tenth of the rate is left."""
    words = f"--batch.maximum 16 --batch.initial 8 --batch.rule {rule}".split()
    run = make_run("diloco", [*small, *words])
    notices = json.loads((run.folder / "environment.json").read_text())["notices"]
    assert any("batch.maximum is 16, which is less than" in each for each in notices) is cut


def test_a_run_made_longer_is_the_longer_run(small: list[str], tmp_path: Path) -> None:
    """Bit for bit, where its first part ends with a whole round, although residuals and a fragment
    in flight leave the workers diverged there: 4096 tokens are four rounds.
    """
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    words = ["train", "diloco", *small, *CONSTANT, "--evaluation.every", "1"]
    words += ["--streaming.tau", "1"]
    # One length of schedule, so that the recipes are equal but for the budget.
    words += ["--learning_rate.total_tokens", "8192"]
    assert main([*words, "--run.tokens", "8192", "--run.folder", str(whole)]) == 0
    assert main([*words, "--run.tokens", "4096", "--run.folder", str(parts)]) == 0
    assert main(["train", "--resume", str(parts), "--run.tokens", "2x"]) == 0
    assert "\ntokens = 8192\n" in (parts / "recipe.toml").read_text()
    assert numbers_of(parts) == numbers_of(whole)
    models = [load_trained(folder).model for folder in (whole, parts)]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
    # Its folder has the new budget, so it is finished.
    assert main(["train", "--resume", str(parts)]) == 0
    assert len(numbers_of(parts)) == 8


def test_a_decay_that_began_within_the_round_in_progress_counts(
    small: list[str], tmp_path: Path
) -> None:
    """Rounds have 1,024 tokens; the decay begins at 2,253, in the third."""
    words = "--run.tokens 4096 --learning_rate.shape wsd --learning_rate.decay_fraction 0.45"
    run = make_run("diloco", [*small, *words.split()])
    rounds = run.rounds()
    for _ in range(2):
        next(rounds)
    passes = itertools.count(1)
    run.algorithm.workers[0].model.register_forward_pre_hook(
        lambda model, inputs: run.stop() if next(passes) == 2 else None
    )
    assert list(rounds) == []
    assert run.algorithm.state.in_round
    with pytest.raises(ValueError, match="wsd cannot be lengthened to 8,192 tokens"):
        TrainingRun.resume(tmp_path / "run", [("run.tokens", 8192)])


def test_a_budget_is_not_lowered_to_within_the_round_in_progress(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rounds have 4 steps of 256 tokens; the run stops in the second, after the fifth step."""
    run = make_run("diloco", [*small, *CONSTANT])
    rounds = run.rounds()
    next(rounds)
    run.algorithm.workers[0].model.register_forward_pre_hook(lambda model, inputs: run.stop())
    assert list(rounds) == []
    before = (tmp_path / "run" / "recipe.toml").read_text()
    resume = ["train", "--resume", str(tmp_path / "run")]
    for name, limit, end in (("tokens", "1056", "2,048"), ("inner_steps", "6", "8")):
        capsys.readouterr()
        assert main([*resume, f"--run.{name}", limit]) == 2
        expected = f"run.{name} must be >= {end}, where the round in progress of the run in"
        assert expected in capsys.readouterr().err
    assert (tmp_path / "run" / "recipe.toml").read_text() == before
    assert main([*resume, "--run.tokens", "2048"]) == 0
    assert numbers_of(tmp_path / "run")[-1]["tokens"] == 2048


def test_a_budget_is_not_lowered_to_where_the_run_stands(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its last round would have no evaluation."""
    often = ["--evaluation.every", "2", "--run.checkpoint_every", "1"]
    rounds = make_run("diloco", [*small, *CONSTANT, *often]).rounds()
    next(rounds)
    rounds.close()  # type: ignore[attr-defined]
    resume = ["train", "--resume", str(tmp_path / "run"), "--run.rounds"]
    capsys.readouterr()
    assert main([*resume, "1"]) == 2
    expected = "run.rounds must be > 1, because the run in"
    assert expected in capsys.readouterr().err
    assert main([*resume, "2"]) == 0
    # It has ended there, so the same budget asks for nothing more.
    assert main([*resume, "2"]) == 0
    assert main([*resume, "0", "--run.tokens", "2048"]) == 0


def test_a_schedule_that_has_fallen_cannot_become_longer(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", "diloco", *small, "--run.tokens", "4096"]) == 0
    before = (run / "recipe.toml").read_text()
    capsys.readouterr()
    assert main(["train", "--resume", str(run), "--run.tokens", "2x"]) == 2
    error = capsys.readouterr().err
    assert "learning_rate.shape cosine cannot be lengthened to 8,192 tokens" in error
    assert error.count("\n") == 1
    assert (run / "recipe.toml").read_text() == before
    # Nor by another budget: its rounds would all have the lowest rate.
    assert main(["train", "--resume", str(run), "--run.tokens", "0", "--run.rounds", "99"]) == 2
    assert "cannot become longer by run.tokens: its learning rate fell to the end at 4,096" in (
        capsys.readouterr().err
    )
    assert main(["train", "--resume", str(run), "--run.tokens", "x"]) == 2
    assert "--run.tokens must be a number, or a multiple such as 2x" in capsys.readouterr().err
    for less in ("100", "0.5x"):
        assert main(["train", "--resume", str(run), "--run.tokens", less]) == 2
        assert "run.tokens must be >= 4,096, which the run in" in capsys.readouterr().err
    assert (run / "recipe.toml").read_text() == before


@pytest.mark.parametrize(
    ("trainers", "policy", "dropped", "ends"),
    [
        (1, "none", "[1]", False),
        (2, "none", "[1, 2]", False),
        (2, "none", "[1]", True),
        (2, "smallest", "[1, 2]", True),  # After a merge, one trainer has both that are left.
    ],
)
def test_a_budget_in_syncs_needs_two_living_workers(
    trainers: int, policy: str, dropped: str, ends: bool
) -> None:
    words = ["--method.num_trainers", f"{trainers}", "--merge.policy", policy]
    words += ["--method.dropped", dropped, "--run.syncs", "3"]
    given, _ = take_settings([*NO_TOKENS, *words])
    values = override(read_values("diloco"), given)
    with nullcontext() if ends else pytest.raises(ValueError, match="run.syncs alone never ends"):
        build_recipe(values)


def test_a_schedule_needs_an_end(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "diloco", *small, "--run.tokens", "0"]
    assert main([*words, "--run.rounds", "3"]) == 2
    assert "learning_rate.total_tokens must be > 0 where run.tokens is 0" in capsys.readouterr().err
    assert main(words) == 2
    assert "run.tokens must be > 0, got 0" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_wsd_run_stopped_before_its_decay_becomes_longer(
    small: list[str], tmp_path: Path
) -> None:
    """The decay keeps its fifth: of 8192 tokens, the last 1638."""
    run = tmp_path / "run"
    wsd = ["--learning_rate.shape", "wsd", "--learning_rate.warmup_fraction", "0.125"]
    schedule = ["--learning_rate.total_tokens", "4096", "--learning_rate.final_fraction", "0"]
    words = [*small, *wsd, *schedule, "--inner.lr", "0.001"]
    assert main(["train", "diloco", *words, "--run.tokens", "2048"]) == 0
    assert main(["train", "--resume", str(run), "--run.tokens", "8192"]) == 0
    rates = {line["tokens"]: line["learning_rate"] for line in numbers_of(run)}
    assert rates[2048] == rates[4096] == rates[6144] == pytest.approx(0.001)
    assert rates[7168] == pytest.approx(0.001 * 1024 / (0.2 * 8192))
    assert rates[8192] == 0


def test_a_schedule_that_ends_before_the_budget_is_resumed_as_it_is(
    small: list[str], tmp_path: Path
) -> None:
    words = [*small, "--run.tokens", "4096", "--learning_rate.total_tokens", "2048"]
    words += ["--run.checkpoint_every", "1", "--run.folder"]
    assert main(["train", "diloco", *words, str(tmp_path / "whole")]) == 0
    flags, _ = take_settings([*words, str(tmp_path / "parts")])
    for record in TrainingRun.create(build_recipe(override(read_values("diloco"), flags))).rounds():
        if record["round"] == 2:
            break
    assert main(["train", "--resume", str(tmp_path / "parts")]) == 0
    assert numbers_of(tmp_path / "parts") == numbers_of(tmp_path / "whole")


def test_a_longer_budget_survives_a_kill_before_its_first_checkpoint(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    wsd = ["--learning_rate.shape", "wsd", "--learning_rate.total_tokens", "4096"]
    assert main(["train", "diloco", *small, *wsd, "--run.tokens", "2048"]) == 0

    def total_tokens(*tokens: str) -> int:
        flags = [("run.tokens", number) for number in tokens]
        return TrainingRun.resume(run, flags).recipe.learning_rate.total_tokens

    assert total_tokens("8192") == 8192
    assert total_tokens() == 8192, "the folder has the longer budget"
    assert total_tokens("12288") == 12288
    assert total_tokens("2048") == 4096, "and may have the first one again"
    # A run that continues is not finished, so it has no multiple.
    records = TrainingRun.resume(run, [("run.tokens", "8192")]).rounds()
    next(records)
    records.close()  # type: ignore[attr-defined]
    assert not (run / "summary.json").exists()
    capsys.readouterr()
    assert main(["train", "--resume", str(run), "--run.tokens", "2x"]) == 2
    assert "2x is for a run that has spent that budget; give a number" in capsys.readouterr().err


def test_a_run_in_use_is_refused_before_anything_is_changed(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, _ = take_settings([*small, *CONSTANT])
    run = TrainingRun.create(build_recipe(override(read_values("diloco"), flags)))
    records = run.rounds()
    next(records), next(records)
    files = [run.folder / name for name in ("metrics.jsonl", "steps.jsonl", "recipe.toml")]
    before = [file.read_bytes() for file in files]
    assert main(["train", "--resume", str(run.folder), "--run.tokens", "32000"]) == 2
    assert "is in use by another process" in capsys.readouterr().err
    assert [file.read_bytes() for file in files] == before
    records.close()  # type: ignore[attr-defined]


def test_a_multiple_of_a_budget_is_rounded_up(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    # 1.1 times 3000 is more than 3300 in floating point.
    for tokens, times, expected in ((1001, "1.5x", "1502"), (3000, "1.1x", "3300")):
        (tmp_path / "recipe.toml").write_text(f"[run]\ntokens = {tokens}\n")
        assert absolute_budgets(tmp_path, [("run.tokens", times)]) == [("run.tokens", expected)]
    other = [("data.path", "linux")]
    assert absolute_budgets(tmp_path, other) == other


def test_what_auto_chooses_is_kept(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine would choose otherwise, and go on in another type."""
    assert main(["train", "diloco", *small, "--run.rounds", "1", "--run.precision", "auto"]) == 0
    recipe = build_recipe(read_values(str(tmp_path / "run" / "recipe.toml")))
    taken = {"fp32": None, "bf16": torch.bfloat16}[recipe.run.precision]
    monkeypatch.setattr(environment, "native_bf16", lambda device: taken is None)
    assert environment.choose_precision("auto", torch.device("cpu")) != taken
    again = TrainingRun.resume(tmp_path / "run").recipe.run.precision
    assert environment.choose_precision(again, torch.device("cpu")) == taken


def test_a_warm_up_without_tokens_is_named(
    small: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = ["--run.tokens", "0", "--run.rounds", "1", "--learning_rate.shape", "constant"]
    assert main(["train", "diloco", *small, *rounds]) == 0
    assert "so there is no warm-up" in capsys.readouterr().out
