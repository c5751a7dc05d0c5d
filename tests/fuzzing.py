"""What tests share that draw their input by hypothesis."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from adloco.cli.main import main

BITS = st.lists(st.integers(0, 2**20), min_size=1, max_size=3)


def fuzz(examples: int, check: Callable[..., None], **drawn: st.SearchStrategy[Any]) -> None:
    """Check so many examples, the same ones each time."""
    same = settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=examples,
        phases=[Phase.generate],  # To find a smaller example takes minutes.
    )
    same(given(**drawn)(check))()


def cheap_and(many: int, cheap: int) -> pytest.MarkDecorator:
    """Parameters of a test: few examples, and many each night."""
    nightly = pytest.param(many, marks=pytest.mark.nightly)
    return pytest.mark.parametrize("examples", [cheap, nightly])


def flip(content: bytes, bits: Sequence[int]) -> bytes:
    """The content with these bits flipped."""
    changed = bytearray(content)
    for bit in bits:
        changed[bit // 8 % len(changed)] ^= 1 << bit % 8
    return bytes(changed)


def files_in(folder: Path) -> dict[str, bytes]:
    """The content of each file below a folder, by its path there; without locks."""
    files = [path for path in folder.rglob("*") if path.is_file() and "lock" not in path.name]
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(files)}


def put_back(folder: Path, files: dict[str, bytes]) -> None:
    """Make a folder that has these files and no others."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def ends_well(words: Sequence[str], capsys: pytest.CaptureFixture[str]) -> int:
    """The exit code of a command, which is 0, or 2 with one sentence on stderr."""
    capsys.readouterr()
    code = main(words)
    error = capsys.readouterr().err
    assert (code, error) == (0, "") or (code, error.count("\n")) == (2, 1), (code, error)
    return code
