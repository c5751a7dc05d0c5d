"""What the pages in docs/ show: Python blocks run, excerpts stand in the examples, links lead
somewhere, settings exist.
"""

import ast
import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from matplotlib import pyplot as plt

import adloco
from adloco.cli.arguments import take_settings
from adloco.config.sections import SECTIONS

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
LOOPS = (ROOT / "docs" / "your-loop.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)
SCRIPT = (ROOT / "docs" / "from-the-authors-script.md").read_text()


@pytest.mark.parametrize(
    "code",
    re.findall(r"```python\n(.*?)```", LOOPS, re.DOTALL),
    ids=["outer step", "batch control"],
)
def test_python_blocks_run(code: str) -> None:
    exec(code, {})


def test_the_python_page_runs(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks run with smaller settings, one after another as a reader would run them."""
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    train, settings = adloco.train, dict(take_settings(small)[0])
    del settings["run.folder"], settings["method.sync_every"]
    folders = iter(["runs/my-diloco", "runs/own"])

    def smaller(recipe: str, *, tokens: Any, **given: Any) -> adloco.TrainedRun:
        sizes = settings | {"run.tokens": 1000, "run.folder": next(folders)}
        return train(recipe, **sizes | given)

    monkeypatch.setattr(adloco, "train", smaller, raising=False)
    assert len(PYTHON) == 3
    for code in PYTHON:
        exec(code, {})
    plt.close("all")


def test_the_reference_of_settings_is_that_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    make_settings = importlib.import_module("make_settings")
    told = "write it again with .venv/bin/python docs/make_settings.py"
    assert make_settings.page() == make_settings.PAGE.read_text(), told


def test_excerpts_stand_in_the_examples() -> None:
    lines = {
        line.strip()
        for path in (ROOT / "examples").glob("*.py")
        for line in path.read_text().splitlines()
    }
    excerpts = [
        text
        for language, text in re.findall(r"```(\w*)\n(.*?)```", LOOPS, re.DOTALL)
        if not language
    ]
    assert len(excerpts) == 2
    for excerpt in excerpts:
        assert set(excerpt.splitlines()) <= lines


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_settings_named_for_those_who_come_from_the_script_exist() -> None:
    known = set()
    for name, section in SECTIONS.items():
        choices = section.choice.register.classes.values() if section.choice else []
        known |= {
            f"{name}.{field.name}"
            for part in (*section.parts.values(), *choices)
            for field in dataclasses.fields(part)
        }
        known |= {f"{name}.{section.choice.key}"} if section.choice else set()
    ours = [
        line.split("|")[2]
        for line in SCRIPT.split("## What theirs does")[0].splitlines()
        if line.startswith("| `")
    ]
    named = {key for cell in ours for key in re.findall(r"`([a-z_]+\.[a-z_]+)", cell)}
    assert len(named) > 40
    assert named <= known, named - known


def said() -> list[str]:
    """Every text in the code of the package, with … for the values in it."""
    found = []
    for module in (ROOT / "src" / "adloco").rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(part, "value", "") for part in node.values]
                found.append("".join(part if isinstance(part, str) else "…" for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_messages_that_are_explained_exist() -> None:
    page = (ROOT / "docs" / "failures.md").read_text()
    quoted = re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE)
    assert len(quoted) > 30
    texts = said()
    for message in quoted:
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in message.split("…")))
        assert any(pattern.search(text) for text in texts), message


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_every_page_is_linked_from_the_readme(page: Path) -> None:
    assert f"](docs/{page.name})" in (ROOT / "README.md").read_text()
