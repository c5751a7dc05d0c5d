"""Numbers and sizes as people write them."""

import pytest

from adloco.config.recipe import build_recipe, override
from adloco.config.values import read_gib, read_number
from adloco.rules.batch_rules.warmup import BatchWarmup


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("600k", 600_000), ("1M", 1_000_000), ("1.1M", 1_100_000), ("2B", 2 * 10**9)),
        *(("1e6", 1_000_000), ("1_000", 1000), ("7", 7), ("0.5", 0.5), ("1.5e-1", None)),
        *(("1m", None), ("M", None), ("auto", None), ("1 kB", None), ("-1M", None), ("", None)),
    ],
)
def test_a_number(text: str, number: float | None) -> None:
    found = read_number(text)
    assert found == number
    assert type(found) is type(number)


@pytest.mark.parametrize(
    ("text", "gib"),
    [("2GiB", 2), ("512 MiB", 0.5), ("1GB", 1e9 / 2**30), ("2G", None), ("2", None)],
)
def test_a_size_of_memory(text: str, gib: float | None) -> None:
    assert read_gib(text) == gib


def test_they_are_settings() -> None:
    flags = [("run.tokens", "1.5M"), ("memory.gib", "512MiB"), ("batch.initial", "1e1")]
    recipe = build_recipe(override({"evaluation": {"every": "2k"}, "memory": {}}, flags))
    assert (recipe.run.tokens, recipe.memory.gib) == (1_500_000, 0.5)
    assert (recipe.guards.initial, recipe.evaluation.every) == (10, 2000)


@pytest.mark.parametrize("given", ["[600k, 1M]", '["600k", 1_000_000]', ["600k", 1e6]])
def test_they_may_stand_in_lists(given: str | list[object]) -> None:
    values = {"batch": {"rule": "warmup", "batches": [8, 16], "after_samples": [0, 1]}}
    if isinstance(given, str):
        recipe = build_recipe(override(values, [("batch.after_samples", given)]))
    else:
        recipe = build_recipe({"batch": {**values["batch"], "after_samples": given}})
    assert isinstance(recipe.batch, BatchWarmup)
    assert recipe.batch.after_samples == [600_000, 1_000_000]
    with pytest.raises(ValueError, match="batch.after_samples must be .*, got \\[600000, '1m'\\]"):
        build_recipe(override(values, [("batch.after_samples", "[600k, 1m]")]))


def test_a_text_has_no_null_character() -> None:
    """The system would refuse it as a path, and not say of which setting."""
    for section, key in [("run", "folder"), ("data", "path"), ("data", "cache")]:
        with pytest.raises(ValueError, match=f"{section}.{key} must have no null character"):
            build_recipe({section: {key: "a\0b"}})


def test_a_truth_is_no_number() -> None:
    for name, given in [
        ("run.tokens", "true"),
        ("method.dropped", "true"),
        ("inner.betas", "[true, 0.9]"),
    ]:
        with pytest.raises(ValueError, match=f"{name} must be a .*number"):
            build_recipe(override({}, [(name, given)]))
    with pytest.raises(ValueError, match=r"method.dropped must be a .*numbers, got True"):
        build_recipe({"method": {"num_trainers": 4, "dropped": True}})  # As in a file.


def test_texts_in_lists_stay_texts() -> None:
    flags = [("inner.optimizer", "muon"), ("inner.exclude", '["1M", "embed"]')]
    assert build_recipe(override({}, flags)).inner.exclude == ("1M", "embed")  # type: ignore[union-attr]


def test_a_name_stays_a_name() -> None:
    assert build_recipe(override({}, [("run.name", "1M")])).run.name == "1M"


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="run.tokens must be a whole number, got '1m'"):
        build_recipe(override({}, [("run.tokens", "1m")]))
