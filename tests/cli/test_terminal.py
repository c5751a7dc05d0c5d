"""Text from names, files and other machines neither formats nor controls the terminal."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from adloco.cli.main import main
from adloco.cli.terminal import Printable, open_console, print_whole, printable
from adloco.config.recipe import read_values

HOSTILE = "[bold]a[/x] :smile: \x1b[31mred\x1b]0;title\x1b\\ \x9b2Jend\x08\udcff\u202e"
"""Wrong markup, an emoji's name, colours, a window's title, a cleared screen, an erased character,
a byte of a file name that is not UTF-8, and text from right to left.
"""
SHOWN = "[bold]a[/x] :smile: red 2Jend?"


def test_what_controls_a_terminal_is_removed() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("\x1b]8;;http://x\x1b\\a link\x1b]8;;\x1b\\") == "a link"
    assert printable("\x1b]52;c;open sequence") == "]52;c;open sequence"
    assert printable("lines\n\tand tabs, Größe, 文") == "lines\n\tand tabs, Größe, 文"


def test_a_console_shows_text_as_it_is() -> None:
    console = open_console()
    console.file = io.StringIO()
    console.width = 80
    table = Table("[b]" + HOSTILE)
    table.add_row(HOSTILE)
    console.print(HOSTILE, style="bold red", soft_wrap=True)
    console.print(table)
    with Live(Printable(Text(HOSTILE)), console=console, transient=False):
        console.print(HOSTILE)
    printed = console.file.getvalue()
    assert printed.count(SHOWN) == 5
    assert printable(printed) == printed


def test_what_the_encoding_of_the_output_lacks_is_a_question_mark() -> None:
    """A run that was trained to its end must not fail over the quotes of its last lines."""
    console = open_console()
    console.file = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", write_through=True)
    console.print("\u201cGr\u00f6\u00dfe\u201d")
    assert console.file.buffer.getvalue() == "?Gr\u00f6\u00dfe?\n".encode("latin-1")
    assert printable("|G|\u00b2", "ascii") == "|G|?"


def test_a_hostile_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "runs"
    bad = folder / "[bold]a[\x1b[31mred"
    (bad / "checkpoints").mkdir(parents=True)
    (bad / "recipe.toml").write_text('[run]\nname = "[/wrong]"')
    assert main(["runs", str(folder)]) == 0
    assert "[bold]a[red" in capsys.readouterr().out
    assert main(["report", str(bad)]) == 2
    error = capsys.readouterr().err
    assert "[bold]a[red has no finished round to report" in error
    assert printable(error) == error


@pytest.mark.parametrize(
    ("terminal", "width", "expected"),
    [
        (True, 80, ["name", "loss"]),
        (False, 20, ["name", "loss", "age"]),
    ],
)
def test_columns_go_before_a_name_is_broken(
    terminal: bool, width: int, expected: list[str]
) -> None:
    """With its margins the name takes 68 columns, the loss 8 and the age 7, which is 83 in all."""
    row = {"name": "a-name/" + 59 * "x", "loss": "1.2345", "age": "3 min"}
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=width, color_system=None)
    print_whole(console, [row], names={"name"}, least=("age", "loss"))
    heading, line = out.getvalue().splitlines()
    assert heading.split() == expected
    assert line.split() == " ".join(row[column] for column in expected).split()


def test_a_name_is_broken_before_all_other_columns_go() -> None:
    """On a narrow terminal, or of a run in a study's folder, whose names are long."""
    row = {"name": "a-name/" + 59 * "x", "loss": "1.2345", "age": "3 min"}
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=40, color_system=None)
    print_whole(console, [row], names={"name"}, least=("age", "loss"))
    heading, *lines = [line.split() for line in out.getvalue().splitlines()]
    assert heading == ["name", "loss", "age"]
    assert "".join(line[0] for line in lines) == row["name"]
    assert lines[0][1:] == ["1.2345", "3", "min"]


def test_a_printed_recipe_has_escapes_for_what_cannot_be_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            ["config", "adloco", "--data.dataset", "texts", "--data.split", "a\x1b[31m\x9b\u202eb"]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert 'split = "a\\u001b[31m\\U0000009b\\U0000202eb"' in printed
    recipe = tmp_path / "copy.toml"
    recipe.write_text(printed)
    assert main(["config", str(recipe), "--run.name", "adloco"]) == 0
    assert capsys.readouterr().out == printed


def test_a_printed_recipe_keeps_letters_that_its_encoding_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "copy.toml"
    with recipe.open("w", encoding="latin-1") as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        assert main(["config", "diloco", "--data.dataset", "книги"]) == 0
    assert read_values(str(recipe))["data"]["dataset"] == "книги"
