"""Writing a page from a template of `templates/`, with its pictures inside."""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from adloco.whole_file import write_text


def write_page(path: Path, template: str, content: Mapping[str, Any]) -> None:
    """Fill a template and write it.

    content: The template's variables; a missing one is an error.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("adloco.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    write_text(path, environment.get_template(template).render(content))


def embedded(image: Path) -> dict[str, str]:
    """A picture for a template: its name, and its bytes in base64."""
    return {"name": image.stem, "data": base64.b64encode(image.read_bytes()).decode()}
