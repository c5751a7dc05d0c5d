"""What a release is made of agrees: its version, its dependencies' bounds, and what others are told to run."""

import re
import tomllib
from importlib import metadata, resources
from pathlib import Path

import pytest

import adloco

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_one_version() -> None:
    assert adloco.__version__ == metadata.version("adloco") == PROJECT["version"]
    (cited,) = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    newest = re.findall(r"^## \[(\S+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert cited == newest == PROJECT["version"]


def test_type_checkers_see_the_package() -> None:
    assert resources.files("adloco").joinpath("py.typed").is_file()


def requirements() -> set[str]:
    """Every requirement of the package and its extras but itself, as it is written."""
    extras = PROJECT["optional-dependencies"].values()
    every = {*PROJECT["dependencies"], *(name for extra in extras for name in extra)}
    return {name for name in every if not name.startswith("adloco[")}


def test_lowest_versions_are_those_that_are_allowed() -> None:
    """`make lowest` tests the bounds themselves: 2.13 and 2.13.0 are one version."""
    lines = (ROOT / "constraints-lowest.txt").read_text().splitlines()
    lowest = {line.replace("==", ">=") for line in lines if not line.startswith("#")}

    def same(names: set[str]) -> set[str]:
        return {re.sub(r"(\.0)+$", "", name) for name in names}

    assert same(lowest) == same(requirements())


def test_exact_versions_are_allowed_ones() -> None:
    """constraints-cpu.txt names every package of `make install`, none below its bound."""
    pinned = dict(
        line.lower().replace("_", "-").split("==") for line in (ROOT / "constraints-cpu.txt").read_text().splitlines() if not line.startswith("#")
    )
    bounds = dict(name.split(">=") for name in requirements())
    for name in bounds.keys() - {"wandb", "clearml", "mlflow", "trackio"}:
        assert numbers(pinned[name]) >= numbers(bounds[name]), name


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


@pytest.mark.parametrize("page", [*WORKFLOWS, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_make_targets_that_are_named_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = re.findall(r"(?:^|`|run: )make ([a-z -]+)", page.read_text(), re.MULTILINE)
    for target in {word for words in named for word in words.split()}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name} names make {target}"
