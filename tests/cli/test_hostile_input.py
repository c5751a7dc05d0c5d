"""Any input is accepted, or refused in one sentence with exit code 2: no other exception, no hang.

Hypothesis draws values of every setting, texts of recipes, and bits to flip in the files of a run,
the same ones each time; `make test-all` draws many more.
"""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adloco.cli.main import main
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.recipe_text import named_settings, to_toml
from adloco.config.shipped import shipped_recipes

NUMBERS = st.one_of(
    st.integers(),
    st.sampled_from([0, -1, 2**31, 2**53, 2**63 - 1, 2**63, 10**30, 10**400]),
    st.floats(),
    st.sampled_from([1e-320, 1e-38, 1e38, 1e300, math.inf, -math.inf, math.nan, -0.0]),
)
# With a colon, a text would name a class, and its module would be imported.
TEXTS = st.text(max_size=20).filter(lambda text: ":" not in text)
VALUES = st.recursive(
    NUMBERS | st.booleans() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
REPORT, EVALUATE = ("report",), ("evaluate", "--windows", "1")
DAMAGED = {
    "run/metrics.jsonl": REPORT,
    "run/steps.jsonl": REPORT,
    "run/starts.jsonl": REPORT,
    "run/environment.json": REPORT,
    "run/summary.json": REPORT,
    "run/recipe.toml": EVALUATE,
    "run/model/config.json": EVALUATE,
    "run/checkpoints/*/run.json": EVALUATE,
    "run/checkpoints/*/run.sha256": EVALUATE,
    "run/checkpoints/*/trainer-0.safetensors": EVALUATE,
    "cache/*/meta.json": EVALUATE,
}
"""File of a run or its cache -> a command that reads it."""


def fuzz(examples: int, check: Callable[..., None], **drawn: st.SearchStrategy[Any]) -> None:
    """Check so many examples, the same ones each time."""
    same = settings(derandomize=True, database=None, deadline=None, max_examples=examples)
    same(given(**drawn)(check))()


def cheap_and(many: int, cheap: int) -> pytest.MarkDecorator:
    """Parameters of a test: few examples, and many each night."""
    nightly = pytest.param(many, marks=pytest.mark.nightly)
    return pytest.mark.parametrize("examples", [cheap, nightly])


def accepted_or_refused(values: Callable[[], dict[str, Any]]) -> None:
    """Read a recipe, build it, and write it if it is good."""
    try:
        built = build_recipe(values())
    except ValueError as error:
        assert 0 < len(str(error)) < 3000
        return
    assert to_toml(built)


def names() -> st.SearchStrategy[str]:
    recipes = [named_settings(build_recipe(read_values(recipe))) for recipe in shipped_recipes()]
    return st.sampled_from(sorted({name for recipe in recipes for name in recipe}))


@cheap_and(many=5000, cheap=40)
def test_values_of_settings(examples: int) -> None:
    recipe = read_values("adloco")

    def check(name: str, value: Any) -> None:
        section, _, key = name.partition(".")
        changed = {**recipe.get(section, {}), key: value}
        accepted_or_refused(lambda: {**recipe, section: changed})

    fuzz(examples, check, name=names(), value=VALUES)


@cheap_and(many=5000, cheap=40)
def test_settings_on_the_line(examples: int) -> None:
    recipe = read_values("adloco")

    def check(name: str, text: str) -> None:
        accepted_or_refused(lambda: override(recipe, [(name, text)]))

    fuzz(examples, check, name=names(), text=TEXTS | st.floats().map(str) | st.integers().map(str))


@cheap_and(many=3000, cheap=20)
def test_texts_of_recipes(examples: int, tmp_path: Path) -> None:
    whole = [to_toml(build_recipe(read_values(recipe))).encode() for recipe in shipped_recipes()]

    def check(text: bytes, changes: list[tuple[int, bytes]]) -> None:
        for at, piece in changes:
            begin = at % len(text)
            text = text[:begin] + piece.replace(b":", b"") + text[begin + 1 :]
        file = tmp_path / "changed.toml"
        file.write_bytes(text)
        accepted_or_refused(lambda: read_values(str(file)))

    place = st.tuples(st.integers(0, 2**20), st.binary(max_size=4))
    fuzz(examples, check, text=st.sampled_from(whole), changes=st.lists(place, max_size=4))


@cheap_and(many=500, cheap=6)
def test_files_with_flipped_bits(
    examples: int, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "adloco", *small, "--run.tokens", "1500"]) == 0
    kept = tmp_path.with_name(f"{tmp_path.name}-kept")
    shutil.copytree(tmp_path, kept)

    def check(file: str, bits: list[int]) -> None:
        shutil.copytree(kept, tmp_path, dirs_exist_ok=True)
        damaged = sorted(tmp_path.glob(file))[-1]
        content = bytearray(damaged.read_bytes())
        for bit in bits:
            content[bit // 8 % len(content)] ^= 1 << bit % 8
        damaged.write_bytes(content)
        capsys.readouterr()
        code = main([*DAMAGED[file], str(tmp_path / "run")])
        error = capsys.readouterr().err
        assert (code, error) == (0, "") or (code, error.count("\n")) == (2, 1), error
        assert main(["runs", str(tmp_path)]) == 0

    bits = st.lists(st.integers(0, 2**20), min_size=1, max_size=3)
    fuzz(examples, check, file=st.sampled_from(sorted(DAMAGED)), bits=bits)
