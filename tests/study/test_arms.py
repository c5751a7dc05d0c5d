"""Arms: their words, their folders, and what must be equal."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from adloco.algorithms.inner.adamw import InnerAdamW
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.recipe_text import to_toml
from adloco.study.arms import parse_arm, plan_runs
from adloco.study.fairness import differences, held_equal, inequalities, unpaired


def test_words_of_an_arm() -> None:
    assert parse_arm("diloco") == ("diloco", "diloco", ())
    assert parse_arm('H8=diloco@--method.sync_every 8 --outer.options "{ momentum = 0.6 }"') == (
        "H8",
        "diloco",
        (("method.sync_every", "8"), ("outer.options", "{ momentum = 0.6 }")),
    )
    for unnamed in ("diloco@--inner.lr 0.1", "=diloco@--inner.lr 0.1"):  # As of "$NAME=diloco".
        assert parse_arm(unnamed)[0] == "diloco, inner.lr 0.1"
    assert parse_arm("x=diloco@--run.deterministic --inner.lr=0.1") == (
        "x",
        "diloco",
        (("run.deterministic", "true"), ("inner.lr", "0.1")),
    )
    for bad in ("diloco@inner.lr 0.1", "diloco@--lr 0.1"):
        with pytest.raises(ValueError, match="must be RECIPE@"):
            parse_arm(bad)
    with pytest.raises(ValueError, match="needs a value"):
        parse_arm("diloco@--inner.lr")


def test_the_text_of_an_arm(tmp_path: Path) -> None:
    """An arm may leave out the source of its recipe for that of all arms."""
    own = tmp_path / "own.toml"
    own.write_text('[data]\ndataset = "allenai/c4"\n')
    (run,) = plan_runs([f"{own}@--data.dataset ''"], [("data.path", "a.txt")], 1, tmp_path)
    assert (run.recipe.data.path, run.recipe.data.dataset) == ("a.txt", "")
    with pytest.raises(ValueError, match="--data.path '' names no text"):
        plan_runs(["diloco@--data.path ''"], [], 1, tmp_path)


def test_a_folder_follows_from_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folders(*whats: str, seeds: int = 1, **common: str) -> list[Path]:
        flags = [(key.replace("__", "."), value) for key, value in common.items()]
        return [run.folder for run in plan_runs(whats, flags, seeds, tmp_path)]

    first = folders("diloco")
    assert folders("diloco") == first
    assert folders("diloco", seeds=2)[0] == first[0], "more seeds repeat none"
    assert folders("diloco", run__tokens="5") != first
    assert folders("diloco", learning_rate__total_tokens="5") != first
    assert folders("diloco", run__device="cpu") == first, "it changes no numbers"
    assert folders("diloco", data__path="a.txt") != folders("diloco", data__path="b.txt")
    assert folders("diloco", evaluation__windows="5") != first
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "environment.json").write_text('{"precision": "bf16"}')
    monkeypatch.chdir(tmp_path / "run")
    assert folders("diloco") == first, "also from within the folder of a run"
    long = ["diloco@--data.path " + "x" * 60 + name for name in "ab"]
    assert len(set(folders(*long))) == 2, "names are cut, and their digests differ"
    assert len(set(folders("diloco", "b=diloco", seeds=2))) == 4
    assert [run.seed for run in plan_runs(["diloco"], [("run.seed", "7")], 2, tmp_path)] == [7, 8]
    (own,) = plan_runs(["diloco@--inner.lr 0.5"], [("inner.lr", "0.1")], 1, tmp_path)
    assert own.recipe.inner.lr == 0.5, "an arm's own setting is the stronger one"
    common = [("inner.lr", "0.1"), ("inner.momentum", "0.5")]
    (own,) = plan_runs(["diloco@--inner.optimizer adamw"], common, 1, tmp_path)
    assert own.recipe.inner == InnerAdamW(lr=0.1), "and takes the common ones that its class has"


def test_bad_arms(tmp_path: Path) -> None:
    for whats, message in [
        (["diloco", "diloco"], "arm 'diloco' stands twice"),
        (["diloko"], "did you mean 'diloco'"),
        ([str(tmp_path)], "is neither a recipe nor a run folder"),
        ([f"mine={tmp_path}"], "is a folder; give the folder of a run alone, without NAME="),
        (["diloco", "runs/mistyped"], "'runs/mistyped' is neither a run folder nor a recipe"),
    ]:
        with pytest.raises(ValueError, match=message):
            plan_runs(whats, [], 1, tmp_path)


def test_what_is_held_equal(tmp_path: Path) -> None:
    def runs(*whats: str) -> list[str]:
        return inequalities(plan_runs(whats, [], 1, tmp_path))

    assert runs("diloco", "local-sgd") == []
    equal = held_equal(plan_runs(["diloco", "local-sgd"], [], 1, tmp_path))
    assert equal == ["task", "validation windows", "model", "data", "tokenizer", "1,200,000 tokens"]
    some = "a=diloco@--model.hidden_size 64 --run.tokens 9"
    equal = held_equal(plan_runs(["diloco", some], [], 1, tmp_path))
    assert equal == ["task", "validation windows", "data", "tokenizer"]
    both = [("run.tokens", "9"), ("run.inner_steps", "8")]
    equal = held_equal(plan_runs(["diloco"], both, 1, tmp_path))
    assert equal[-2:] == ["9 tokens", "8 inner steps"]
    assert runs("diloco", "a=diloco@--data.path x") == ["data (data.path: diloco: '', a: x)"]
    assert runs("diloco", "a=diloco@--model.hidden_size 64") == [
        "model (model.hidden_size: diloco: 0, a: 64)"
    ]
    for flag, what in [
        ("--data.context_tokens 64", "data"),
        ("--evaluation.windows 8", "validation windows"),
        ("--data.tokenizer bpe:512", "tokenizer"),
        ("--run.tokens 9", "budget"),
        ("--run.rounds 9", "budget"),
    ]:
        assert [text.split(" (")[0] for text in runs("diloco", f"a=diloco@{flag}")] == [what]


def finished(folder: Path, *flags: tuple[str, str]) -> str:
    """A folder as a finished run of `diloco` leaves it, as far as an arm needs it."""
    folder.mkdir()
    (folder / "recipe.toml").write_text(
        to_toml(build_recipe(override(read_values("diloco"), flags)))
    )
    (folder / "summary.json").write_text("{}")
    return str(folder)


def test_folders_become_arms_by_their_settings(tmp_path: Path) -> None:
    one = finished(tmp_path / "one")
    other_seed = finished(tmp_path / "other_seed", ("run.seed", "1"))
    longer = finished(tmp_path / "longer", ("run.tokens", "9000000"), ("run.seed", "2"))
    runs = plan_runs([one, other_seed, longer], [], 1, tmp_path / "study")
    names = ["diloco", "diloco", "diloco, run.tokens 9000000"]
    assert [(run.arm, run.seed) for run in runs] == list(zip(names, range(3), strict=True))
    (unequal,) = inequalities(runs)
    assert unequal.startswith("budget (run.tokens: ")
    assert unequal.endswith(", 'diloco, run.tokens 9000000': 9000000)")
    with pytest.raises(ValueError, match="arm 'diloco' has 2 runs with seed 0"):
        plan_runs([one, one], [], 1, tmp_path / "study")


def test_a_run_beside_the_recipe_that_it_is_of(tmp_path: Path) -> None:
    """As in `adloco compare runs/adaptive diloco`; the files of runs have resolved settings."""
    resolved = ("learning_rate.total_tokens", "30000"), ("run.precision", "bf16")
    budget = ("run.tokens", "30000")
    own = [("batch.rule", "ramp"), ("batch.first", "4"), ("batch.last", "64")]
    flags = *own, ("batch.over_samples", "9375"), budget, *resolved
    given = finished(tmp_path / "given", *flags)
    name = "diloco, batch.rule ramp, batch.first 4, batch.last 64"
    for whats, names in [
        ([given, "diloco"], [name, "diloco"]),
        (["diloco", given], ["diloco", name]),
    ]:
        runs = plan_runs(whats, [budget], 1, tmp_path / "study")
        assert [run.arm for run in runs] == names
        assert not [text for text in differences(runs) if "total_tokens" in text]
    same = finished(tmp_path / "same", budget, *resolved)
    runs = plan_runs([same, "diloco"], [budget], 1, tmp_path / "study")
    assert [run.arm for run in runs] == ["diloco 2", "diloco"]


def test_inequality_within_an_arm_is_seen(tmp_path: Path) -> None:
    run = plan_runs(["diloco"], [], 1, tmp_path)[0]
    other = replace(run, recipe=replace(run.recipe, run=replace(run.recipe.run, rounds=5)))
    assert inequalities([run, other]) == ["budget (run.rounds: diloco: 0 or 5)"]


def test_what_is_varied_is_named(tmp_path: Path) -> None:
    runs = plan_runs(["diloco", "a=diloco@--run.tokens 9"], [], 1, tmp_path)
    assert differences(runs) == []
    elsewhere = plan_runs(["diloco", "a=diloco@--run.device cpu"], [], 1, tmp_path)
    assert differences(elsewhere) == [], "it changes no number"
    ramp = "a=diloco@--batch.rule ramp --batch.first 4 --batch.last 8 --batch.over_samples 99"
    assert "batch.first (diloco: -, a: 4)" in differences(
        plan_runs(["diloco", ramp], [], 1, tmp_path)
    )
    assert differences(runs, ["run.tokens"]) == ["run.tokens (diloco: 1200000, a: 9)"]


def test_machines_are_named_if_there_are_several(tmp_path: Path) -> None:
    folders = [Path(finished(tmp_path / seed, ("run.seed", seed))) for seed in ("0", "1")]
    for folder, device in zip(folders, ("cpu", "gpu"), strict=True):
        about = {"device": device, "cores": 2, "torch_threads": 2, "time": device}
        (folder / "environment.json").write_text(json.dumps(about))
    runs = plan_runs([*map(str, folders)], [], 1, tmp_path)
    assert differences(runs) == ["device (diloco: cpu or gpu)"]
    begun = replace(runs[0], folder=tmp_path / "not begun", seed=2)
    assert differences([runs[0], begun]) == [], "nothing is known of a machine"


def test_arms_that_share_a_seed_are_paired(tmp_path: Path) -> None:
    first = plan_runs(["a=diloco"], [], 2, tmp_path)
    for seed, shared in ((1, True), (2, False)):
        others = plan_runs(["b=diloco"], [("run.seed", str(seed))], 2, tmp_path)
        assert (unpaired([*first, *others]) == "") == shared


def test_a_run_says_what_resumes_have_changed(tmp_path: Path) -> None:
    (planned,) = plan_runs(["diloco"], [], 1, tmp_path)
    assert planned.changes == []
    longer = Path(finished(tmp_path / "longer", ("run.tokens", "2400000")))
    change = {"round": 3, "setting": "inner.lr", "before": "0.002", "after": "0.001"}
    (longer / "changes.jsonl").write_text(json.dumps(change) + "\n")
    assert replace(planned, folder=longer).changes == [
        "inner.lr was changed from 0.002 to 0.001 after round 3",
        "run.tokens is 2,400,000 and not 1,200,000",
    ]


@pytest.mark.parametrize(
    ("recipe", "settings", "steps"),
    [
        ("diloco", {"run.tokens": 9 * 1024}, 9),
        # One sample is too few for a step of two workers, so the step before takes it.
        ("diloco", {"run.tokens": 8 * 1024 + 1}, 8),
        ("diloco", {"run.tokens": 8 * 1024 + 129}, 9),
        ("diloco", {"run.tokens": 9 * 1024 + 1}, 9),
        ("diloco", {"run.tokens": 9 * 1024 + 129}, 0),
        ("ddp-norm", {"run.tokens": 4 * 1024 + 1, "method.sync_every": 10}, 4),
        ("ddp-norm", {"run.tokens": 4 * 1024 + 129, "method.sync_every": 10}, 5),
        ("diloco", {"run.inner_steps": 7}, 7),
        ("diloco", {"run.tokens": 18 * 1024, "method.num_trainers": 2}, 9),
        # Two workers take 8 each of the 64 samples.
        ("diloco", {"run.tokens": 18 * 1024, "batch.initial": 64, "switch.mode": "never"}, 9),
        ("diloco", {"run.tokens": 0, "run.rounds": 3, "learning_rate.shape": "constant"}, 0),
        ("diloco", {"run.tokens": 1024, "switch.max_micro_batch": "auto"}, 0),
        ("single", {"run.tokens": 1024, "method.sync_every": 10}, 0),
        ("ddp-norm", {"run.tokens": 1024, "method.sync_every": 10}, 1),
    ],
)
def test_a_budget_that_ends_within_the_first_round(
    recipe: str, settings: dict[str, object], steps: int, tmp_path: Path
) -> None:
    """Rounds have 10 steps of 8 samples of 128 tokens, and nothing acts before their end."""
    flags = {"data.context_tokens": 128, "batch.initial": 8, **settings}
    (run,) = plan_runs([recipe], [(key, str(value)) for key, value in flags.items()], 1, tmp_path)
    said = f"the budget ends after {steps} inner step" if steps else ""
    assert run.too_short.startswith(said) and bool(run.too_short) == bool(steps)
