"""What the pages in docs/ show: Python blocks run, commands and settings exist, excerpts stand in
the examples, figures stand where they come from, links lead somewhere.
"""

import ast
import importlib
import inspect
import re
import shlex
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import matplotlib
import pytest
from matplotlib import pyplot as plt

import adloco
from adloco.cli.arguments import Command, SettingsCommand
from adloco.cli.main import parse_line
from adloco.config.finding import setting_facts
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.setting_words import take_settings
from adloco.plan.cluster import read_cluster
from adloco.run.changes import is_recorded
from adloco.study.arms import parse_arm
from tests.pages import DESCRIBES_LAB, NEEDS_ELASTIC, PAGES, README, ROOT, blocks, console_lines

PYTHON_PAGE = ROOT / "docs" / "python.md"
PYTHON = blocks(PYTHON_PAGE, "python")
OF_RECIPES, LOOPS = PYTHON[:3], PYTHON[3:]
"""The blocks over recipes and run folders, which follow from one another, and the loops."""
RESULTS = ROOT / "docs" / "results.md"
SOURCES = ("bytes_to_loss", "frontier")


CHECKED = {
    "README": {"python"},
    "python": {"python", ""},
    "plan": {"python", "toml"},
    "data-and-models": {"yaml"},
}
"""Languages of a page's blocks besides console. Python is run and TOML read by a test of the page,
and blocks without a language are excerpts; the YAML is for another program, which its text names.
"""
RECIPES = {"RECIPE": "diloco", "config.toml": "adloco", "runs/adaptive": "diloco"}
"""Words that stand for what the reader has, and a recipe to check their lines with."""
ROUND = '{"inner_steps": 1, "trainers": [{"trainer": 0, "requested_batch": 8, "trainer_batch": 8}]}'


@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_every_block_is_of_a_kind_that_is_checked(page: Path) -> None:
    languages = re.findall(r"^ *```(\w*)\n.*?^ *```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert {*languages} <= {"console", *CHECKED.get(page.stem, ())}


@DESCRIBES_LAB
@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_commands_name_what_exists(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands, options, recipes, settings and their values, scripts and make targets are right,
    and a line of another program says what it needs. Nothing is run here.
    """
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "adaptive").mkdir(parents=True)  # A run that a command names.
    (tmp_path / "runs" / "adaptive" / "metrics.jsonl").write_text(ROUND + "\n")
    makefile = (ROOT / "Makefile").read_text()
    for line in filter(None, console_lines(page)):
        words = shlex.split(line, comments=True)
        scripts = [word for word in words if word.endswith(".py")]
        if "adloco" in words:
            check_settings(parse_line(words[words.index("adloco") + 1 :]))
        elif words[0] == "make":
            assert f"\n{words[1]}:" in makefile
        elif scripts:
            source = (ROOT / scripts[0]).read_text()
            options = [word for word in words if word.startswith("--") and "." not in word]
            assert all(option.removeprefix("--") in source for option in options), line
        else:
            assert re.search(r"#.*\bneeds\b", line), line


def check_settings(arguments: Command) -> None:
    """The recipes of a line can be built with its settings, each alone where they are lists."""
    if not isinstance(arguments, SettingsCommand):
        return
    given = vars(arguments)
    recipes = given.get("whats") or given.get("recipes") or [given.get("recipe") or "adloco"]
    for what in recipes:
        _, recipe, changes = parse_arm(what)
        values = read_values(RECIPES.get(recipe, recipe))
        for settings in (
            [[pair] for pair in arguments.settings] if arguments.lists else [arguments.settings]
        ):
            build_recipe(override(values, [*settings, *changes]))


def test_the_description_of_a_cluster_is_read(tmp_path: Path) -> None:
    (text,) = blocks(ROOT / "docs" / "plan.md", "toml")
    (tmp_path / "cluster.toml").write_text(text)
    assert read_cluster(tmp_path / "cluster.toml").islands == 2


def test_figures_stand_where_they_come_from() -> None:
    """Losses, bytes and seconds are those of the benchmarks and of the lab book."""
    found = "".join((ROOT / "benchmarks" / f"{name}.md").read_text() for name in SOURCES)
    page = RESULTS.read_text()
    losses = re.findall(r"\b\d\.\d{4}\b", page)
    assert len(losses) > 10
    assert [loss for loss in losses if loss not in found] == []
    rows = re.findall(r"^\|.*\| (\d\.\d{4}) \| (.*)% \| (.*) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 8
    for loss, above, megabytes, fewer in rows:
        assert f"{float(loss) / 1.2796 - 1:.1%}" == f"{above}%"
        assert re.search(rf"\| {loss} .*\| {megabytes} \|.*\| {fewer}x \|", found), loss
    seconds = re.findall(r"^\| [^|]* (\| \d+\.\d \| \d+\.\d+ \|)$", page, re.MULTILINE)
    assert len(seconds) == 6
    log = (ROOT / "reproduce" / "LOG.md").read_text()
    assert [columns for columns in seconds if columns not in log] == []


def test_the_page_of_the_python_api_has_all_names_with_what_their_docstrings_say() -> None:
    lines = re.findall(r"^- .*$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    first = {
        name: inspect.getdoc(getattr(adloco, name)).split("\n\n")[0] for name in adloco.__all__
    }
    said = {f"- `adloco.{name}`: {' '.join(text.split())}" for name, text in first.items()}
    assert sorted(lines) == sorted(said)


@pytest.mark.parametrize("code", LOOPS, ids=["rounds", "outer step", "batch control"])
def test_loops_run(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The loop over rounds learns, and merges four trainers into one."""
    namespace: dict[str, object] = {}
    exec(code, namespace)
    if "run" in namespace:
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 15
        assert float(lines[-1].split()[1]) < float(lines[0].split()[1]) / 2
        assert sum("Merge(" in line for line in lines) == 3
        assert len([line for line in code.splitlines() if line.strip()]) < 20, (
            "a user's own model, data and loss train in under 20 lines"
        )


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
    for code in OF_RECIPES:
        exec(code, {})
    plt.close("all")


@DESCRIBES_LAB
def test_the_reference_of_settings_is_that_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    make_settings = importlib.import_module("make_settings")
    told = "write it again with .venv/bin/python docs/make_settings.py"
    assert make_settings.page() == make_settings.PAGE.read_text(), told


def test_all_settings_that_may_change_on_resume_and_decide_the_numbers_are_named() -> None:
    page = (ROOT / "docs" / "run-folder.md").read_text()
    section = page.partition("## Changes on resume")[2].partition("\n## ")[0]
    names = [name for name in setting_facts() if is_recorded(name)]
    assert len(names) > 5
    for name in names:
        assert f"`{name}`" in section or name.startswith("outer.gate_"), name


def test_excerpts_stand_in_the_examples() -> None:
    lines = {
        line.strip()
        for path in (ROOT / "examples").glob("*.py")
        for line in path.read_text().splitlines()
    }
    excerpts = blocks(PYTHON_PAGE, "")
    assert len(excerpts) == 3
    for excerpt in excerpts:
        assert set(excerpt.splitlines()) <= lines


@DESCRIBES_LAB
@pytest.mark.parametrize("page", [README, *PAGES], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


@DESCRIBES_LAB
@NEEDS_ELASTIC
def test_the_files_and_rooms_that_pages_name_exist() -> None:
    """A page may leave out the first folders. One folder alone, such as `runs/`, is not of ours,
    and a file "of commit" so and so need not exist today.
    """
    folders = ("src", "tests", "examples", "benchmarks", "reproduce", "docs")
    files = [str(path) for folder in folders for path in (ROOT / folder).rglob("*.py")]
    named = {
        (page.stem, name)
        for page in (README, ROOT / "CONTRIBUTING.md", *PAGES)
        for name in re.findall(r"`([\w/]+(?:\.py|\w/\w+/))`(?! of commit)", page.read_text())
    }
    assert len(named) > 100
    missing = [
        (page, name)
        for page, name in sorted(named)
        if not any(
            f"/{name}" in file if name.endswith("/") else file.endswith(f"/{name}")
            for file in files
        )
    ]
    assert missing == []


def test_the_names_of_the_package_that_pages_name_exist() -> None:
    named = {
        name
        for page in (README, *PAGES)
        for name in re.findall(r"\badloco(?:\.[A-Za-z_]\w*)+", page.read_text())
    }
    assert len(named) > 30
    for name in sorted(named):
        resolve_name(name)


@DESCRIBES_LAB
def test_settings_named_for_those_who_come_from_the_script_exist() -> None:
    table = (ROOT / "docs/authors.md").read_text().splitlines()
    ours = [line.split("|")[3] for line in table if line.startswith("| `")]
    named = {key for cell in ours for key in re.findall(r"`([a-z_]+\.[a-z_]+)", cell)}
    assert len(named) > 40
    assert named <= {*setting_facts()}, named - {*setting_facts()}


def said(folder: str = "") -> list[str]:
    """Every text in the code of the package, with … for the values in it.

    folder: Only the modules below this folder of the package.
    """
    found = []
    for module in (ROOT / "src" / "adloco" / folder).rglob("*.py"):
        parts_of_others = set()
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts_of_others |= {id(part) for part in node.values}
                parts = [getattr(part, "value", "") for part in node.values]
                found.append("".join(part if isinstance(part, str) else "…" for part in parts))
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in parts_of_others
            ):
                found.append(node.value)
    return found


def explained() -> list[re.Pattern[str]]:
    """The messages on the page of failures."""
    page = (ROOT / "docs" / "failures.md").read_text()
    quoted = re.findall(r"^\| `(.+?)` \|", page, re.MULTILINE)
    assert len(quoted) > 25
    return [
        re.compile(".*".join(re.escape(part.strip()) for part in message.split("…")))
        for message in quoted
    ]


@NEEDS_ELASTIC
def test_messages_that_are_explained_exist() -> None:
    texts = said()
    for pattern in explained():
        assert any(pattern.search(text) for text in texts), pattern.pattern


FAILURES = {
    "distributed/launch": "killed|crashed|is gone|not come|cannot|waited too long|needs|ended by|"
    "start at most",
    "elastic": "killed|crashed|is gone|no sign of life|not answered|too few|taken this one|"
    "nobody has|have come within|cannot be used",
    "run": "cannot be (written|made)|cannot (begin|change)|damaged|has lost|is in use|not finite|"
    "longer than run|not what|another (process|run|recipe)|version of adloco|memory ran out|"
    "no checkpo",
}
"""By folder, words of the sentences that say that something is lost, late or cannot be done."""
SAYS_WHAT_TO_DO = re.compile(
    r"[;:,] (or )?(add|ask|bring|call|choose|correct|give|resume|install|leave|let|look|lower|"
    r"make|move|put|raise|remove|restart|restore|set|start|take|train|use|wait)\b"
)
"""What stands in a sentence that says itself what to do."""
PARTS_OF_SENTENCES = {
    "cannot be written in … (…)",
    "finished, running, stopped with the part of its budget that is used, or damaged.",
}


@NEEDS_ELASTIC
@pytest.mark.parametrize("folder", FAILURES)
def test_failures_of_runs_say_what_to_do_or_are_explained(folder: str) -> None:
    """A sentence about a failure says what to do about it, or the page of failures has it."""
    messages = [
        text
        for text in said(folder)
        # What begins with a capital letter, or has paragraphs, is a docstring.
        if len(text.split()) > 4
        and not (text[0].isupper() or "\n\n" in text)
        and re.search(FAILURES[folder], text)
    ]
    assert len(messages) > 7
    open_ones = [text for text in messages if not SAYS_WHAT_TO_DO.search(text)]
    missing = [text for text in open_ones if not any(one.search(text) for one in explained())]
    assert {*missing} <= PARTS_OF_SENTENCES, "\n".join(missing)


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_every_page_is_linked_from_the_readme(page: Path) -> None:
    assert f"](docs/{page.name})" in (ROOT / "README.md").read_text()
