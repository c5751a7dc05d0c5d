"""Points of sweeps, and the arms of ablations."""

from pathlib import Path

import pytest

from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.recipe_text import named_settings
from adloco.study.ablation import ablated_arms, own_mechanisms
from adloco.study.arms import Flags
from adloco.study.grid import point_name, sweep_axes, sweep_points


def test_several_values_are_an_axis() -> None:
    settings = [("batch.eta", "0.5"), ("run.tokens", "9"), ("batch.eta", "0.8"), ("a.b", "1")]
    axes, fixed = sweep_axes(settings)
    assert axes == {"batch.eta": ["0.5", "0.8"]}
    assert fixed == (("run.tokens", "9"), ("a.b", "1"))
    with pytest.raises(ValueError, match="a sweep needs a setting with several values"):
        sweep_axes([("a.b", "1")])
    with pytest.raises(ValueError, match=r"--a\.b has a value twice: 1 2 1"):
        sweep_axes([("a.b", "1"), ("a.b", "2"), ("a.b", "1")])
    with pytest.raises(ValueError, match=r"--run\.folder takes one value, got my study; put a"):
        sweep_axes([*settings, ("run.folder", "my"), ("run.folder", "study")])


def test_the_grid_and_random_points_of_it() -> None:
    axes = {"a.x": ["1", "2", "3"], "b.y": ["4", "5"]}
    grid = sweep_points(axes, 0)
    assert [tuple(value for _, value in point) for point in grid] == [
        ("1", "4"), ("1", "5"), ("2", "4"), ("2", "5"), ("3", "4"), ("3", "5"),
    ]  # fmt: skip
    few = sweep_points(axes, 3)
    assert len({*few}) == 3 and few == sweep_points(axes, 3)
    assert few == [point for point in grid if point in few]
    assert sweep_points(axes, 99) == grid
    with pytest.raises(ValueError, match="--samples must be >= 0, got -1"):
        sweep_points(axes, -1)
    assert point_name(grid[0]) == "x 1, y 4"
    assert point_name((("a.x", "1"), ("b.x", "2"))) == "a.x 1, b.x 2"


def test_an_ablation_changes_one_mechanism(tmp_path: Path) -> None:
    def settings(flags: Flags) -> dict[str, str]:
        recipe = build_recipe(override(read_values("adloco"), flags))
        return {key: str(value) for key, value in named_settings(recipe).items()}

    whole = build_recipe(read_values("adloco"))
    arms = ablated_arms(whole, ["adaptive-batch", "merging", "switch-mode"])
    assert list(arms) == [
        "adloco", "without adaptive-batch", "without merging", "without switch-mode", "without all"
    ]  # fmt: skip
    full = settings(())
    for arm, section in [
        ("without adaptive-batch", "batch."),
        ("without merging", "merge."),
        ("without switch-mode", "switch."),
    ]:
        own = settings(arms[arm])
        changed = {key for key in full.keys() | own.keys() if full.get(key) != own.get(key)}
        assert changed and all(key.startswith(section) for key in changed)
        # The guards on the batch stay as they are.
        assert own["batch.maximum"] == full["batch.maximum"]
    for recipe, names, message in [
        ("diloco", ["merging"], "recipe 'diloco' has no merging to leave out"),
        ("adloco", ["mergin"], "--without must name some of adaptive-batch, merging"),
        ("adloco", [], "--without must name some of adaptive-batch, merging"),
        ("adloco", ["merging", "merging"], "--without names a mechanism twice"),
        ("adloco", ["switch-mode", "accumulation"], "--without takes one of switch-mode and"),
    ]:
        with pytest.raises(ValueError, match=message):
            ablated_arms(build_recipe(read_values(recipe)), names)


def test_what_a_recipe_has_is_left_out() -> None:
    def own(name: str) -> list[str]:
        return own_mechanisms(build_recipe(read_values(name)))

    assert own("adloco") == ["adaptive-batch", "merging", "switch-mode"]
    assert own("ddp-norm") == ["adaptive-batch"]
    with pytest.raises(ValueError, match="'single' has none of adaptive-batch, merging, switch-"):
        own("single")
