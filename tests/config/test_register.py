"""Registers: what is in a folder is found, and a class of the user's own by its dotted path."""

import sys
import tomllib
from pathlib import Path

import pytest

from adloco.cli.main import main
from adloco.config.recipe import build_recipe, override
from adloco.config.recipe_text import defaults, known_settings, settings, to_toml
from adloco.config.register import Register
from adloco.config.sections import (
    BATCH_RULES,
    MERGE_POLICIES,
    SECTIONS,
    SHARES,
    TASKS,
    WIRE_FORMATS,
)
from adloco.distributed.wire.plain import PlainWire
from adloco.rules.batch_rules.batch_rule import BatchRule
from adloco.rules.batch_rules.norm_test import NormTest
from adloco.setting import field_meanings
from tests.problems import at

RULES = '''
from dataclasses import dataclass

from adloco import NormTest


@dataclass(frozen=True, kw_only=True)
class Stricter(NormTest):
    eta: float = 0.3
    """A smaller one."""


@dataclass(frozen=True, kw_only=True)
class Doubling:
    """Double the batch every so many samples."""

    every_samples: int = 100
    """Samples from one doubling to the next."""

    fewest_groups = 1
    measurement = ""

    def __post_init__(self):
        if self.every_samples <= 0:
            raise ValueError(f"every_samples must be > 0, got {self.every_samples}")

    def requested(self, estimate, point):
        return 2 ** (point.samples // self.every_samples)


@dataclass(frozen=True)
class Unfinished:
    fewest_groups = 1


@dataclass
class Thawed:
    pass


class Inherited(Doubling):
    extra: int = 3


@dataclass(frozen=True, kw_only=True)
class Clashing(Doubling):
    initial: int = 3


@dataclass(frozen=True, kw_only=True)
class Unreadable(Doubling):
    other: "Nowhere" = 3


@dataclass(frozen=True, kw_only=True)
class Nothing(Doubling):
    other: int | None = None


class Plain:
    pass


@dataclass(frozen=True, kw_only=True)
class Unconvertible(Doubling):
    other: Plain = Plain()


def function():
    pass
'''


@pytest.fixture(autouse=True)
def my_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rules.py").write_text(RULES)
    (tmp_path / "my_broken.py").write_text("import my_missing_library")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rules", raising=False)


def test_a_folder_is_found_by_the_keys_of_its_classes() -> None:
    own = {key for key, rule in BATCH_RULES.classes.items() if "lab" not in rule.__module__}
    plans = {"constant", "ramp", "seesaw", "warmup"}
    assert own == plans | {"norm-test"}
    assert list(BATCH_RULES.classes) == sorted(BATCH_RULES.classes)
    assert BATCH_RULES.find("norm-test") is NormTest
    assert BATCH_RULES.name_of(NormTest) == "norm-test"


@pytest.mark.parametrize("register", [BATCH_RULES, MERGE_POLICIES, SHARES, WIRE_FORMATS, TASKS])
def test_every_choice_has_what_its_protocol_asks_for(register: Register) -> None:
    """As is asked of a class of the user's own."""
    for kind in register.classes.values():
        assert register.missing(kind) == [] or kind is PlainWire, kind


def test_a_new_file_in_a_folder_is_a_new_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only classes that are defined in the file and have their own key are choices."""
    folder = tmp_path / "folder_of_rules"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "one.py").write_text(
        "from adloco import NormTest\nclass One:\n    key = 'one'\nclass Heir(One): ...\n"
    )
    (folder / "two.py").write_text("from folder_of_rules.one import One\nclass Two:\n    key = '2'")
    found = Register(package="folder_of_rules", protocol=BatchRule).classes
    assert [(key, kind.__name__) for key, kind in found.items()] == [("2", "Two"), ("one", "One")]


@pytest.mark.parametrize("section", [name for name, one in SECTIONS.items() if one.choice])
def test_every_choice_has_its_default_and_says_what_each_class_is(section: str) -> None:
    choice = SECTIONS[section].choice
    assert choice is not None
    assert choice.default in choice.register.classes
    lines = choice.help().splitlines()
    assert len(lines) == len(choice.register.classes) + 2
    assert all(len(line.split(": ", 1)[1]) > 5 for line in lines[1:])


def test_a_rule_of_the_users_own() -> None:
    values = {"batch": {"rule": "my_rules:Doubling", "every_samples": 50, "initial": 4}}
    recipe = build_recipe(values)
    assert recipe.batch.requested(None, at(150)) == 8
    text = to_toml(recipe, with_meanings=True)
    assert 'rule = "my_rules:Doubling"  # default: "constant"\n' in text
    assert "# Samples from one doubling to the next.\nevery_samples = 50" in text
    assert build_recipe(tomllib.loads(text)) == recipe
    assert all(setting.meaning for setting in settings(recipe))


def test_a_rule_that_inherits_has_each_setting_once() -> None:
    recipe = build_recipe({"batch": {"rule": "my_rules:Stricter"}})
    assert build_recipe(tomllib.loads(to_toml(recipe))) == recipe
    etas = {each.chosen_by: each.default for each in known_settings(recipe) if each.key == "eta"}
    assert etas == {"": 0.3, "batch.rule norm-test": 0.8}


def test_a_flag_for_a_setting_of_the_users_own() -> None:
    flags = [("batch.rule", "my_rules:Doubling"), ("batch.every_samples", "7")]
    recipe = build_recipe(override({"batch": {"rule": "norm-test", "eta": 0.5}}, flags))
    assert recipe.batch.every_samples == 7  # type: ignore[attr-defined]


def test_a_search_finds_a_setting_of_the_users_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[batch]\nrule = "my_rules:Doubling"\n')
    assert main(["config", str(recipe), "--search", "every_samples"]) == 0
    found = " ".join(capsys.readouterr().out.split())
    assert "--batch.every_samples VALUE Samples from one doubling to the next." in found


def test_a_rule_in_the_working_folder_is_found_behind_all_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for the installed program, whose path begins with its own folder."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    Path("rules_in_the_working_folder.py").write_text(RULES)
    values = {"batch": {"rule": "rules_in_the_working_folder:Doubling"}}
    assert build_recipe(values).batch.every_samples == 100  # type: ignore[attr-defined]
    assert sys.path[-1] == str(here)


@pytest.mark.parametrize(
    ("rule", "others", "message"),
    [
        ("my_rules:Doubler", {}, "batch.rule 'my_rules:Doubler' cannot be found: module my_rules"),
        ("my_rulez:Doubling", {}, r"cannot be imported \(ModuleNotFoundError: .*PYTHONPATH"),
        ("my_broken:Rule", {}, r"\(ModuleNotFoundError: No module named 'my_missing_library'\)"),
        ("my rules:Doubling", {}, "is not a dotted path; write it as package.module:Name"),
        ("my_rules:", {}, "is not a dotted path"),
        ("my_rules:function", {}, "must be a frozen dataclass, got <function"),
        ("my_rules:Thawed", {}, "must be a frozen dataclass, got <class"),
        ("my_rules:Inherited", {}, "must be a frozen dataclass"),
        (
            "my_rules:Unfinished",
            {},
            "lacks measurement, requested, which",
        ),
        ("my_rules:Clashing", {}, r"has a setting initial, which \[batch\] has already; rename it"),
        ("my_rules:Unreadable", {}, r"type hints that cannot be read \(name 'Nowhere'"),
        (
            "my_rules:Doubling",
            {"every_samples": 0},
            r"^batch.every_samples must be > 0, got 0 \(recipe section \[batch\]\)$",
        ),
        (
            "my_rules:Doubling",
            {"every_sample": 5},
            r"batch.every_sample is not a setting .*did you mean 'every_samples'",
        ),
        (
            "my_rules:Doubling",
            {"every_samples": "x"},
            "batch.every_samples must be a whole number",
        ),
        (
            "my_rules:Unconvertible",
            {"every_samples": 5},
            r"^my_rules:Unconvertible has a setting of a type that a recipe cannot hold \("
            r"Unable to generate pydantic-core schema for <class 'my_rules.Plain'>\); use numbers",
        ),
        ("norm_test", {}, r"or a class of your own .* got 'norm_test' \(did you mean 'norm-test'"),
    ],
)
def test_refusals(rule: str, others: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_recipe({"batch": {"rule": rule} | others})


def test_a_value_that_a_recipe_cannot_hold() -> None:
    recipe = build_recipe({"batch": {"rule": "my_rules:Nothing"}})
    with pytest.raises(ValueError, match=r"batch.other is None, which a recipe cannot hold; use a"):
        to_toml(recipe)


def test_every_choice_is_explained_by_its_own_fields() -> None:
    """Also where several choices have a setting of one name, with other defaults or meanings."""
    listed = list(known_settings(build_recipe({})))
    for section, content in SECTIONS.items():
        for word, owner in content.choice.register.classes.items() if content.choice else ():
            for field, default in defaults(owner).items():
                told = [
                    each
                    for each in listed
                    if each.name == f"{section}.{field}"
                    and (not each.chosen_by or word in each.chosen_by.split())
                ]
                assert [(one.default, one.meaning) for one in told] == [
                    (default, field_meanings(owner)[field])
                ]
