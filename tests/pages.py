"""The Markdown pages of the documentation and what their blocks show."""

import re
from pathlib import Path

import pytest

from adloco.cli import elastic_room
from adloco.options import options

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of a page that are in a language; "" for those that name none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for named, text in found if named == language]


def console_lines(page: Path) -> list[str]:
    """The lines of a page's console blocks, with continued lines joined."""
    return "".join(blocks(page, "console")).replace("\\\n", "").splitlines()


DESCRIBES_LAB = pytest.mark.skipif(
    not options(), reason="the pages describe lab/, which was removed here (make removable)"
)
NEEDS_ELASTIC = pytest.mark.skipif(
    not elastic_room.is_there(), reason="elastic/ was removed here (make removable)"
)
