"""Writes docs/settings.md, the reference of all settings, from the code. A test compares.

.venv/bin/python docs/make_settings.py
"""

from itertools import groupby
from pathlib import Path

from adloco.config.recipe import build_recipe
from adloco.config.recipe_text import Setting, known_settings, toml_line

PAGE = Path(__file__).with_name("settings.md")
HEAD = """# Settings

Every setting that a recipe can have, by section; `--section.key VALUE` sets it on a line.
A setting with a *With* belongs to a choice, such as a wire format, and exists where that is chosen.
A flag that chooses another one drops what the recipe sets of the first.
Defaults are the program's; `adloco config RECIPE` marks where a shipped recipe differs.
This page is written by [make_settings.py](make_settings.py).
"""


def page() -> str:
    """The whole page, as Markdown."""
    text = [HEAD]
    for section, settings in groupby(known_settings(build_recipe({})), lambda one: one.section):
        rows = [f"| `{each.name}` | {_values(each)} | {_meaning(each)} |" for each in settings]
        table = ["| setting | values | meaning |", "|---|---|---|", *rows]
        text.append(f"## [{section}]\n\n" + "\n".join(table) + "\n")
    return "\n".join(text)


def _values(setting: Setting) -> str:
    kinds = {bool: "true, false", int: "number", float: "number", str: "text"}
    given = ", ".join(setting.choices) or kinds.get(setting.hint, "see the meaning")
    if setting.default is None:
        return f"{given}; must be given"
    return f"{given}; default `{toml_line('x', setting.default).removeprefix('x = ')}`"


def _meaning(setting: Setting) -> str:
    needs = f"*With `{setting.chosen_by}`*: " if setting.chosen_by else ""
    return f"{needs}{' '.join(setting.meaning.split())}".replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
