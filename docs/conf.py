"""The site that `make docs` builds from the Markdown pages, with Sphinx, MyST and Furo.

The pages are what the repository shows: plain Markdown with relative links. What only a site has is
added while Sphinx reads them: the navigation, and the docstrings of the names in docs/api.md.
"""

import re
from importlib import metadata
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]
HOME, API = "README", "docs/api"
HIDDEN = "\0"  # Stands for a colon.
NAPOLEON = 500
"""Priority at which napoleon reads a docstring."""
LAB = sorted((ROOT / "src/adloco/lab").glob("*/README.md"))
NAVIGATION = {
    "Start": {
        "docs/quick-start": "Quick start",
        "docs/choosing": "Which method, and questions",
        "docs/results": "Results",
        "docs/glossary": "Glossary",
    },
    "Use": {
        "docs/python": "From Python",
        "docs/data-and-models": "Data, models and tasks",
        "docs/studies": "Studies",
        "docs/plan": "Planning",
        "docs/clusters": "Clusters",
    },
    "When it fails": {"docs/failures": "Failures"},
    "Method": {
        "docs/method": "Paper and code",
        "docs/wire": "What workers exchange",
        "docs/authors": "Coming from the authors' script",
    },
    "Options": {
        f"src/adloco/lab/{path.parent.name}/README": path.parent.name.replace("_", " ")
        for path in LAB
    },
    "Reference": {
        "docs/settings": "Settings",
        "docs/run-folder": "Files and metrics of a run",
        "docs/api": "Python API",
    },
    "Project": {
        "CONTRIBUTING": "Contributing",
        "SECURITY": "Security",
        "CHANGELOG": "Changelog",
        "reproduce/LOG": "Lab book",
        "benchmarks/performance": "Performance",
        "benchmarks/bytes_to_loss": "Bytes to a loss",
        "benchmarks/frontier": "Loss with fewer bytes",
        "benchmarks/studies": "Each part alone",
    },
}
"""Pages and their short titles under captions; other pages of docs/ stand in "Reference"."""

project = "adloco"
release = version = metadata.version(project)
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = HOME
include_patterns = [f"{page}.md" for page in (HOME, *NAVIGATION["Project"], *NAVIGATION["Options"])]
include_patterns += ["docs/*.md"]

toc_object_entries_show_parents = "hide"
myst_heading_anchors = 4
smartquotes_action = "D"  # Dashes in the lists of parameters; quotes stay as they are.
default_role = "code"  # Docstrings write names as Markdown does, in single backquotes.
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}

html_theme = "furo"
html_title = project
html_copy_source = False
html_show_copyright = False


def setup(app: Sphinx) -> None:
    """Called by Sphinx before it reads the pages."""
    app.connect("source-read", fill_in)
    app.connect("autodoc-process-docstring", hide_colons, priority=NAPOLEON - 1)
    app.connect("autodoc-process-docstring", escape, priority=NAPOLEON + 1)


def fill_in(app: Sphinx, page: str, source: list[str]) -> None:
    """Add the navigation to the first page, and docstrings to the page of the Python API."""
    if page == HOME:
        source[0] += navigation()
    if page == API:
        source[0] = re.sub(r"^- `adloco\.(\w+)`.*$", directive, source[0], flags=re.MULTILINE)


def navigation() -> str:
    """Tables of contents that only the sidebar shows."""
    named = {page for pages in NAVIGATION.values() for page in pages}
    found = {f"docs/{path.stem}" for path in (ROOT / "docs").glob("*.md")}
    text = ""
    for caption, pages in NAVIGATION.items():
        lines = [f"{title} <{page}>" for page, title in pages.items()]
        lines += sorted(found - named) if caption == "Reference" else []
        text += "\n\n".join(
            ["", f"```{{toctree}}\n:hidden:\n:caption: {caption}", "\n".join(lines) + "\n```"]
        )
    return text + "\n"


def directive(name: re.Match[str]) -> str:
    """The directive that shows a name's docstring."""
    kind = "class" if name[1][0].isupper() else "function"
    return f"\n```{{eval-rst}}\n.. auto{kind}:: adloco.{name[1]}\n```\n"


def hide_colons(
    app: Sphinx, what: str, name: str, of: object, options: object, lines: list[str]
) -> None:
    """Hide colons from napoleon, which takes what stands before one for the type of a field."""
    if what in {"attribute", "property"}:
        lines[:] = [line.replace(":", HIDDEN) for line in lines]


def escape(
    app: Sphinx, what: str, name: str, of: object, options: object, lines: list[str]
) -> None:
    """Show colons again, and |g|² as it is, not as reStructuredText's substitution."""
    lines[:] = [line.replace(HIDDEN, ":").replace("|", r"\|") for line in lines]
