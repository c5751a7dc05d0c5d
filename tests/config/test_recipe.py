"""Recipes: shipped ones, files, flags, and what is refused."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from adloco import BatchGuards, InnerSGD, MergeSmallest, NormTest, OuterOptimizer, SwitchMode
from adloco.algorithms.optimizers import OuterMean
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.recipe_text import settings, to_toml, to_values
from adloco.config.shipped import shipped_recipes


def test_what_is_shipped() -> None:
    names = (
        "adloco adloco-imdb adloco-paper adloco-paper-small ddp ddp-norm diloco diloco-paper "
        "fsdp-norm local-sgd single"
    )
    assert shipped_recipes() == names.split()


@pytest.mark.parametrize(
    "name",
    [
        "adloco",
        "adloco-paper",
        "adloco-paper-small",
        "ddp",
        "ddp-norm",
        "diloco",
        "diloco-paper",
        "fsdp-norm",
        "local-sgd",
        "single",
    ],
)
def test_toml_round_trip(name: str) -> None:
    recipe = build_recipe(read_values(name))
    assert recipe.run.name == name
    for with_meanings in (False, True):
        assert build_recipe(tomllib.loads(to_toml(recipe, with_meanings=with_meanings))) == recipe
    assert all(setting.meaning for setting in settings(recipe))


def test_names_in_tables_are_quoted_once() -> None:
    overrides = {"a b": 1, "c.d": {'e"f': "g"}, "h": [{"i j": True}]}
    model = {"source": "transformers", "name": "gpt2", "pretrained": False}
    recipe = build_recipe({"model": model | {"overrides": overrides}})
    assert tomllib.loads(to_toml(recipe))["model"]["overrides"] == overrides


@pytest.mark.parametrize("name", ["adloco-paper", "adloco-paper-small"])
def test_the_published_setting(name: str) -> None:
    recipe = build_recipe(read_values(name))
    assert recipe.batch == NormTest(eta=0.8, estimator="plug-in")
    assert recipe.switch.multiplier == 2
    assert recipe.method.num_trainers == 4
    assert recipe.outer == OuterOptimizer(optimizer="SGD", lr=0.5, options={})
    assert isinstance(recipe.merge, MergeSmallest)
    assert recipe.run.tokens == 0
    assert recipe.run.inner_steps == 12 * recipe.method.sync_every


def test_the_published_arms_differ_in_the_method_alone() -> None:
    adloco, diloco = (build_recipe(read_values(f"{name}-paper")) for name in ("adloco", "diloco"))
    assert adloco.run.inner_steps == 2400
    for section in ("model", "data", "inner", "learning_rate", "outer"):
        assert getattr(adloco, section) == getattr(diloco, section)
    assert replace(adloco.method, num_trainers=1, workers_per_trainer=4) == diloco.method


def test_flags_override_and_keep_their_types() -> None:
    flags = [
        ("run.tokens", "1e6"),
        ("run.name", "7"),
        ("batch.eta", "1"),
        ("batch.max_growth", "inf"),
        ("outer.options", "{momentum = 0.5}"),
        ("inner.betas", "[0.8, 0.99]"),
        ("model.tie_embeddings", "true"),
        ("data.path", "some where/ü.txt"),
    ]
    recipe = build_recipe(override(read_values("adloco"), flags))
    assert (recipe.run.tokens, recipe.run.name, recipe.batch.eta, recipe.guards.max_growth) == (
        1_000_000,
        "7",
        1.0,
        float("inf"),
    )  # type: ignore[attr-defined]
    assert recipe.outer.options == {"momentum": 0.5}  # type: ignore[union-attr]
    assert (recipe.inner.betas, recipe.model.tie_embeddings, recipe.data.path) == (
        (0.8, 0.99),
        True,
        "some where/ü.txt",
    )  # type: ignore[attr-defined]
    assert build_recipe(to_values(recipe)) == recipe


@pytest.mark.parametrize(
    ("optimizer", "fields"),
    [
        ("adamw", {"lr", "weight_decay", "betas"}),
        ("sgd", {"lr", "weight_decay", "momentum"}),
        (
            "muon",
            {"lr", "adamw_ratio", "weight_decay", "momentum", "betas", "exclude", "split"},
        ),
    ],
)
def test_an_inner_optimizer_has_its_own_settings_alone(optimizer: str, fields: set[str]) -> None:
    recipe = build_recipe({"inner": {"optimizer": optimizer, "lr": 0.5}})
    assert to_values(recipe)["inner"].keys() == fields | {"optimizer"}
    assert build_recipe(to_values(recipe)) == recipe


@pytest.mark.parametrize("text", ["[0.8, 0.99]", "0.8,0.99", " 0.8, 0.99 "])
def test_a_list_on_the_line_needs_no_brackets(text: str) -> None:
    recipe = build_recipe(override({}, [("inner.betas", text)]))
    assert recipe.inner.betas == (0.8, 0.99)  # type: ignore[union-attr]


def test_a_flag_for_another_inner_optimizer() -> None:
    """The recipe's settings for the old optimizer are dropped, also those that the new one has
    under the same name; but a flag must fit the new one.
    """
    recipe = build_recipe(override(read_values("adloco-paper"), [("inner.optimizer", "sgd")]))
    assert recipe.inner == InnerSGD()
    same = build_recipe(override(read_values("adloco-paper"), [("inner.optimizer", "adamw")]))
    assert same.inner == build_recipe(read_values("adloco-paper")).inner
    flags = [("inner.optimizer", "sgd"), ("inner.betas", "[0.9, 0.95]")]
    with pytest.raises(ValueError, match="inner.betas is not a setting of .* optimizer = 'sgd'"):
        build_recipe(override(read_values("adloco-paper"), flags))


def test_a_flag_that_chooses_drops_what_only_the_old_choice_knew() -> None:
    recipe = build_recipe(
        override(
            read_values("adloco"),
            [("batch.rule", "constant"), ("outer.update", "mean"), ("merge.policy", "none")],
        )
    )
    assert isinstance(recipe.outer, OuterMean)
    assert recipe.guards.initial == build_recipe(read_values("adloco")).guards.initial
    misspelt = {"run": {"name": "own"}, "batch": {"rule": "norm-test", "eat": 0.8}}
    with pytest.raises(ValueError, match="batch.eat is not a setting"):
        build_recipe(override(misspelt, [("batch.rule", "constant")]))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"training": {"lr": 1}}, r"\[training\] \(did you mean inner.lr or outer.lr\?\)"),
        ({"method": {"H": 5}}, r"method.H is not a .* \(did you mean method.sync_every\?\)"),
        ({"bach": {}}, r"no recipe section \[bach\] \(did you mean 'batch'\?\)"),
        (
            {"run": {"token": 1}},
            r"run.token is not a setting of \[run\] \(did you mean 'tokens'\?\)",
        ),
        (
            {"batch": {"rule": "norm-test", "theta": 1}},
            "batch.theta is not a setting of .batch. with rule = 'norm-test'",
        ),
        (
            {"batch": {"rule": "nrm-test"}},
            r"batch.rule must be one of .*got 'nrm-test' \(did you mean 'norm-test'\?\)",
        ),
        (
            {"batch": {"rule": "norm-test", "eta": -1.0}},
            r"batch.eta must be > 0, got -1.0 \(recipe section \[batch\]\)",
        ),
        (
            {"batch": {"initial": 8, "maximum": 4}},
            "batch.maximum must be >= batch.initial = 8, got 4",
        ),
        ({"batch": {"rule": "warmup"}}, "batch.batches must be given, as a list of "),
        (
            {"run": {"tokens": "many"}},
            r"run.tokens must be a whole number, got 'many' \(recipe section \[run\]\)",
        ),
        ({"run": {"tokens": True}}, "run.tokens must be .*got True"),
        ({"run": {"name": 7}}, "run.name must be a text in quotes, got 7"),
        ({"run": {"compile": 3}}, "run.compile must be true or false or auto, got 3"),
        ({"inner": {"optimizer": "muon", "split": 3}}, "inner.split must be a table such as"),
        ({"inner": {"betas": "0.9,0.95"}}, "inner.betas must be a list of 2 numbers, got '0.9,"),
        ({"run": {"tokens": 1.5}}, "run.tokens must be .*got 1.5"),
        ({"run": {"tokens": 0}}, "run.tokens must be > 0, got 0"),
        (
            {"run": {"checkpoint_seconds": 0.5}},
            "run.checkpoint_seconds must be 0, or from 1 to 1e6, got 0.5",
        ),
        (
            {"run": {"precision": "fp8"}},
            "run.precision must be auto, fp32 or bf16, got 'fp8'",
        ),
        ({"inner": {"betas": [0.9]}}, "inner.betas"),
        ({"inner": {"optimizer": "adam"}}, "inner.optimizer must be one of .* mean 'adamw'"),
        ({"inner": {"optimizer": "sgd", "betas": [0.9, 0.95]}}, "inner.betas is not a setting"),
        (
            {"inner": {"optimizer": "adamw", "momentum": 0.5}},
            "inner.momentum is not a setting of .* optimizer = 'adamw'",
        ),
        ({"inner": {"optimizer": "adamw", "exclude": ["embed"]}}, "inner.exclude is not a setting"),
        (
            {"method": {"workers_per_trainer": 9}},
            "batch.initial must be >= 9, so that each of 9 workers has a sample, got 8",
        ),
        (
            {"method": {"workers_per_trainer": 5}, "batch": {"rule": "norm-test"}},
            "batch.initial must be >= 10, .* 2 samples to compare, got 8",
        ),
    ],
)
def test_refusals(values: dict[str, dict[str, object]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_recipe(values)


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[run]\ntokens = 5\n")
    assert (
        build_recipe(read_values(str(file))).run.tokens,
        build_recipe(read_values(str(file))).run.name,
    ) == (5, "mine")
    file.write_bytes(b"\xef\xbb\xbf[run]\r\ntokens = 5\r\n")  # As editors on Windows save it.
    assert read_values(str(file))["run"]["tokens"] == 5
    for content, message in (
        (b"[run\n", "not valid TOML"),
        (b"tokens = 5\n", "'tokens' stands outside a section"),
        (b"\xff", "not UTF-8"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_values(str(file))
    with pytest.raises(
        ValueError,
        match=r"recipe 'adlocco' is neither a file nor a shipped recipe; .*did you mean 'adloco'",
    ):
        read_values("adlocco")
    file.rename(tmp_path / "recipe.toml")
    with pytest.raises(ValueError, match="is the folder of a run and not a recipe; resume it with"):
        read_values(str(tmp_path))


def test_sections_are_those_of_the_public_classes() -> None:
    """A setting that a recipe accepts reaches the object that owns it."""
    recipe = build_recipe(
        {
            "batch": {"rule": "norm-test", "eta": 0.3, "initial": 4, "maximum": 9},
            "switch": {"mode": "never"},
        }
    )
    assert recipe.batch == NormTest(eta=0.3)
    assert recipe.guards == BatchGuards(initial=4, maximum=9)
    assert recipe.switch == replace(SwitchMode(), mode="never")


def test_residuals_are_kept_where_workers_sync() -> None:
    for recipe, flags, kept in [
        ("single", [], False),
        ("ddp", [], False),
        ("diloco", [], True),
        ("adloco", [], True),
        ("adloco", [("merge.policy", "none")], False),
    ]:
        built = build_recipe(override(read_values(recipe), [("wire.format", "int1"), *flags]))
        assert built.keeps_residuals is kept


@pytest.mark.parametrize(
    ("old", "new"),
    [("error_feedback", "feedback_decay"), ("residual_in_params", "feedback")],
)
def test_other_names_of_feedback_are_refused_with_the_setting(old: str, new: str) -> None:
    flags = [("wire.format", "int1"), (f"wire.{old}", "1")]
    with pytest.raises(ValueError, match=rf"did you mean wire.{new}\?") as caught:
        build_recipe(override(read_values("diloco"), flags))
    assert len(str(caught.value).splitlines()) == 1
