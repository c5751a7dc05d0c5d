"""Any input is accepted, or refused in one sentence with exit code 2: no other exception, no hang.

Hypothesis draws values of every setting, texts of recipes, and bits to flip in the files of a run,
the same ones each time; `make test-all` draws many more.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from adloco.cli.main import main
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.recipe_text import named_settings, to_toml
from adloco.config.shipped import shipped_recipes
from adloco.discovery import lab_modules
from adloco.errors import OutOfMemoryError
from adloco.run import out_of_memory
from tests.fuzzing import BITS, cheap_and, ends_well, files_in, flip, fuzz, put_back

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


PLAN = ("--parameters", "--noise-scale", "--price", "--target-loss")
LAUNCH = ("--islands", "--gpus-per-island", "--gpus-per-node", "--image", "--gpu", "--on")
COMPARE = ("--seeds", "--parallel", "--targets", "--link")
WORDS = st.one_of(
    st.integers(-2, 5).map(str),
    st.integers().map(str),
    st.sampled_from(["1e400", "nan", "inf", "-inf", "1e-320", "9" * 5000, "", "0", "9" * 30]),
    st.floats().map(str),
    st.text(max_size=12),
)


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


@cheap_and(many=5000, cheap=10)
def test_values_of_settings(examples: int) -> None:
    recipe = read_values("adloco")

    def check(name: str, value: Any) -> None:
        section, _, key = name.partition(".")
        changed = {**recipe.get(section, {}), key: value}
        accepted_or_refused(lambda: {**recipe, section: changed})

    fuzz(examples, check, name=names(), value=VALUES)


@cheap_and(many=5000, cheap=10)
def test_settings_on_the_line(examples: int) -> None:
    recipe = read_values("adloco")

    def check(name: str, text: str) -> None:
        accepted_or_refused(lambda: override(recipe, [(name, text)]))

    fuzz(examples, check, name=names(), text=TEXTS | st.floats().map(str) | st.integers().map(str))


@cheap_and(many=3000, cheap=5)
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


@cheap_and(many=500, cheap=2)
def test_files_with_flipped_bits(
    examples: int, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "adloco", *small, "--run.tokens", "1500"]) == 0
    kept = files_in(tmp_path)

    def check(file: str, bits: list[int]) -> None:
        put_back(tmp_path, kept)
        damaged = sorted(tmp_path.glob(file))[-1]
        damaged.write_bytes(flip(damaged.read_bytes(), bits))
        ends_well([*DAMAGED[file], str(tmp_path / "run")], capsys)
        assert main(["runs", str(tmp_path)]) == 0

    fuzz(examples, check, file=st.sampled_from(sorted(DAMAGED)), bits=BITS)


@cheap_and(many=500, cheap=2)
def test_resume_with_flipped_bits(
    examples: int, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In any file of a run that has every kind of record, or of its token cache. A run that is
    refused stays as it is.
    """
    run = str(tmp_path / "run")
    rounds = ["--run.tokens", "0", "--run.rounds", "1", "--learning_rate.shape", "constant"]
    assert main(["train", "adloco", *small, *rounds, "--run.checkpoint_every", "1"]) == 0
    longer = ["--run.rounds", "2", "--inner.lr", "0.001"]
    assert main(["train", "--resume", run, *longer]) == 0
    out_of_memory.noted(tmp_path / "run", 1, OutOfMemoryError("memory ran out", 2))
    if lab_modules("command"):
        assert main(["gradients", run, "--samples", "8", "--batch", "4"]) == 0
    kept = files_in(tmp_path)
    assert {"run/changes.jsonl", "run/out_of_memory.jsonl", "run/starts.jsonl"} <= kept.keys()

    def check(file: str, bits: list[int]) -> None:
        put_back(tmp_path, {**kept, file: flip(kept[file], bits)})
        again = ["train", "--resume", run, "--run.rounds", "3", "--inner.lr", "0.002"]
        if ends_well(again, capsys) == 2:
            assert files_in(tmp_path) == {**kept, file: flip(kept[file], bits)}

    names = [file for file in kept if kept[file] and not file.endswith((".png", ".html"))]
    fuzz(examples, check, file=st.sampled_from(names), bits=BITS)


def without_gradients(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files but those that `adloco gradients` has written before."""
    return {name: content for name, content in files.items() if "gradients" not in name}


OPTIONS = {
    "generate": ("--prompt", "--tokens", "--temperature", "--seed", "--trainer"),
    "evaluate": ("--windows", "--trainer", "--data.path"),
}
"""Command that reads a run -> its options."""
if lab_modules("command"):
    OPTIONS["gradients"] = ("--samples", "--batch", "--trainer", "--checkpoint")


@cheap_and(many=500, cheap=5)
def test_options_of_commands_that_read_a_run(
    examples: int, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "adloco", *small, "--run.tokens", "1500"]) == 0

    def check(option: tuple[str, str], value: str) -> None:
        before = without_gradients(files_in(tmp_path))  # A text that was read has a cache.
        command, name = option
        needed = ["--prompt", "x", "--tokens", "2"] if command == "generate" else []
        if command == "gradients":
            needed = ["--samples", "8", "--batch", "4"]
        if name == "--tokens":
            value = value[:1]  # A larger number is generated to its end.
        if ends_well([command, str(tmp_path / "run"), *needed, f"{name}={value}"], capsys) == 2:
            assert without_gradients(files_in(tmp_path)) == before

    options = [(command, name) for command, names in OPTIONS.items() for name in names]
    fuzz(examples, check, option=st.sampled_from(options), value=WORDS)


@cheap_and(many=1000, cheap=5)
def test_options_of_commands_that_plan(
    examples: int, small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        'islands = 2\nbandwidth = "100mbit"\nlatency = "20ms"\n[samples_per_second]\n8 = 16.0\n'
    )
    plan = ["plan", "diloco", "--cluster", str(cluster), "--parameters", "1e6"]
    plan += ["--to", str(tmp_path / "plan")]
    launch = ["launch", "diloco", "--on", "slurm", "--islands", "2", "--gpus-per-island", "8"]
    begun = {
        **dict.fromkeys(PLAN, plan),
        **{name: [*launch, "--dry-run"] for name in LAUNCH},
        **{name: ["compare", "diloco", "single", *small] for name in COMPARE},
        "--meet": ["train", *small, "--restart", "--machines", "2"],
    }

    def check(name: str, value: str) -> None:
        (tmp_path / "recipe.toml").unlink(missing_ok=True)
        if name in COMPARE:
            value = value.strip("0123456789.,") + "x"  # A good one would train for minutes.
        if name == "--meet":
            value = value.rpartition(":")[0]  # A good one would wait for the other machine.
        ends_well([*begun[name], f"{name}={value}"], capsys)

    fuzz(examples, check, name=st.sampled_from(sorted(begun)), value=WORDS)
