"""The parts of a release agree: versions, dependencies, and the make targets that CI names."""

import re
import subprocess
import sys
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


@pytest.mark.nightly
def test_a_users_file_has_types() -> None:
    """`make check` checks it too, with the package."""
    file = ROOT / "tests" / "api" / "typed_user.py"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", file], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def requirements() -> dict[str, list[int]]:
    """The lowest version that is allowed of each dependency, those of all extras among them."""
    extras = PROJECT["optional-dependencies"].values()
    every = {*PROJECT["dependencies"], *(name for extra in extras for name in extra)}
    return versions([name for name in every if not name.startswith("adloco[")], ">=")


def constraints(name: str) -> dict[str, list[int]]:
    """The version that a constraints file names of each package, which it names once."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    found = versions(lines, "==")
    assert len(found) == len(lines), f"{name} names a package twice"
    return found


def versions(lines: list[str], relation: str) -> dict[str, list[int]]:
    """Package and version of lines such as foo_bar==1.2.0, as foo-bar and [1, 2]."""
    found = {}
    for line in lines:
        name, version = line.lower().replace("_", "-").split(relation)
        found[name] = [int(part) for part in re.sub(r"(\.0)+$", "", version).split(".")]
    return found


def test_lowest_versions_are_those_that_are_allowed() -> None:
    assert constraints("constraints-lowest.txt") == requirements()


def test_exact_versions_are_allowed_ones() -> None:
    """`make install` leaves no package of its own to chance, and takes none below its bound."""
    exact = constraints("constraints-cpu.txt")
    not_installed = {"wandb", "clearml", "mlflow", "trackio"}
    for name, lowest in requirements().items():
        assert name in not_installed or exact[name] >= lowest, name


@pytest.mark.parametrize("page", [*WORKFLOWS, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_make_targets_that_are_named_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = re.findall(r"(?:^|`|run: )make ([a-z -]+)", page.read_text(), re.MULTILINE)
    for target in {word for words in named for word in words.split()}:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name} names make {target}"
