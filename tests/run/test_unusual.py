"""Settings without effect beside others, which a new run names."""

import json

import pytest

from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.shipped import shipped_recipes
from adloco.run.unusual import without_effect
from tests.run.test_training_run import make_run

KEPT = "nothing: no residual is kept; give a lossy wire.format, and wire.feedback params"


@pytest.mark.parametrize(
    ("recipe", "words", "expected"),
    [
        (
            "diloco",
            "--merge.policy smallest --merge.parameters uniform --merge.streams balance",
            "merge.policy changes nothing: there is one trainer (method.num_trainers); "
            "merge.parameters and merge.streams change nothing: trainers never merge",
        ),
        (
            "adloco",
            "--merge.policy none",
            "merge.outer_momentum changes nothing: trainers never merge; "
            "wire.format changes nothing: no trainer ever has two workers",
        ),
        (
            "single",
            "--wire.format int1",
            "wire.format changes nothing: no trainer ever has two workers",
        ),
        ("single", "--wire.format fp32", ""),
        ("diloco", "--wire.format fp32 --wire.feedback params", f"wire.feedback changes {KEPT}"),
        (
            "diloco",
            "--wire.format int4 --wire.feedback_decay 1",
            f"wire.feedback_decay changes {KEPT}",
        ),
        ("diloco", "--wire.format int4 --wire.feedback none", ""),
        ("diloco", "--wire.format int4 --wire.feedback params", ""),
        ("diloco", "--wire.format int1 --wire.feedback_decay 1", ""),
        (
            "adloco",
            "--outer.update mean",
            "merge.outer_momentum changes nothing: outer.update is mean",
        ),
        (
            "diloco",
            "--test.steps 2 --batch.grow_only true --learning_rate.reference_batch 4",
            "test.steps changes nothing: this batch.rule measures no gradients; "
            "batch.grow_only changes nothing: batch.rule constant keeps the batch; "
            "learning_rate.reference_batch changes nothing: learning_rate.coupling is none",
        ),
        (
            "adloco",
            "--test.steps 2 --batch.grow_only true --learning_rate.reference_batch 4",
            "",
        ),
        (
            "diloco",
            "--learning_rate.shape constant --learning_rate.final_fraction 0 "
            "--learning_rate.decay_fraction 0.5",
            "learning_rate.decay_fraction and learning_rate.final_fraction change nothing: "
            "learning_rate.shape is constant",
        ),
        (
            "diloco",
            "--learning_rate.final_fraction 0 --learning_rate.decay_fraction 0.5",
            "learning_rate.decay_fraction changes nothing: learning_rate.shape is cosine",
        ),
        ("diloco", "--learning_rate.shape wsd --learning_rate.decay_fraction 0.5", ""),
        (
            "single",
            "--switch.mode always --switch.multiplier 3 --placement.balance speed "
            "--outer.weights equal",
            "switch.multiplier changes nothing: switch.mode is always; "
            "placement.balance and outer.weights change nothing: no trainer ever has two workers",
        ),
        ("adloco", "--switch.multiplier 3 --placement.balance speed --outer.weights equal", ""),
        (
            "diloco",
            "--task.kind classification --evaluation.windows 4 --data.cache tmp",
            "evaluation.windows and data.cache change nothing: they are for language models",
        ),
    ],
)
def test_settings_without_effect_are_named(recipe: str, words: str, expected: str) -> None:
    given = words.replace("--", "").split()
    flags = list(zip(given[::2], given[1::2], strict=True))
    assert without_effect(build_recipe(override(read_values(recipe), flags))) == expected


def test_shipped_recipes_have_no_setting_without_effect() -> None:
    assert not any(without_effect(build_recipe(read_values(name))) for name in shipped_recipes())


def test_a_new_run_says_so(small: list[str]) -> None:
    run = make_run("diloco", [*small, "--merge.policy", "smallest"])
    notices = json.loads((run.folder / "environment.json").read_text())["notices"]
    assert any("merge.policy changes nothing" in notice for notice in notices)
