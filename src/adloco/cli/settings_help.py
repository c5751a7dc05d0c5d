"""Prints help on every setting, by section, from the same table as `adloco config`."""

import argparse
import functools
import re
import shutil
import textwrap
from collections.abc import Iterable
from typing import Any

from adloco.cli.arguments import SettingsCommand
from adloco.config.finding import settings_meant, settings_near
from adloco.config.recipe import build_recipe, read_values
from adloco.config.recipe_text import Setting, known_settings, settings, value_text
from adloco.config.sections import SECTIONS
from adloco.errors import require

COMMON = (
    *("run.tokens", "run.folder", "run.seed", "run.device"),
    *("data.path", "data.dataset", "data.tokenizer", "data.context_tokens", "model.shape"),
    *("method.num_trainers", "method.workers_per_trainer", "method.sync_every"),
    *("inner.lr", "batch.rule", "wire.format"),
)
"""The settings that the help of `adloco train` lists first."""
BRIEF_NAME = 29
"""Columns for the name of a setting in the overview."""
SETTINGS_NOTES = (
    "  Each can be given as --section.key VALUE, anywhere on the line. Numbers may",
    "  be 600k, 1.5M, 1e6, or 2GiB for memory. adloco config --search TEXT explains",
    "  settings with this in their name or meaning; SECTION. those of a section.",
)


def print_found(arguments: SettingsCommand, text: str) -> int:
    """Print help on the settings that a text may mean, or that speak of it."""
    meant = settings_meant(text)
    word = re.compile(rf"\b{re.escape(text)}", re.IGNORECASE)
    found = [
        setting
        for setting in known_settings(arguments.read_recipe())
        if setting.name in meant
        or (len(text) > 1 and (text.lower() in setting.name or word.search(setting.meaning)))
    ]
    near = [f"--search {name}" for name in settings_near(text)]
    require(
        bool(found),
        f"no setting has {text!r} in its name or meaning"
        + (f" (did you mean {' or '.join(near)}?)" if near else "")
        + "; adloco train --help lists those that are used",
    )
    print(settings_help(found), end="")
    return 0


def settings_help(listed: Iterable[Setting]) -> str:
    """Help on these settings by section, as wide as the terminal.

    The default that is shown is the recipe's value; for a setting of a class that the recipe does
    not choose, it is that class's default.
    """
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS,
        add_help=False,
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=6),
    )
    texts: dict[str, dict[str, list[str]]] = {}
    for setting in listed:
        needs = f"With {setting.chosen_by}: " if setting.chosen_by and not setting.used else ""
        required = setting.value is None
        default = "must be given" if required else f"default: {_as_flag(setting.value)}"
        names = f" One of {', '.join(setting.choices)}." if setting.choices else ""
        text = f"{needs}{setting.meaning}{names} ({default})"
        texts.setdefault(setting.section, {}).setdefault(setting.name, []).append(text)
    for section, named in texts.items():
        group = parser.add_argument_group(f"[{section}]")
        for name, each in named.items():
            text = " ".join(each).replace("%", "%%")
            group.add_argument(f"--{name}", metavar="VALUE", help=text)
    return parser.format_help()


def settings_overview() -> str:
    """One sentence on each setting that the default recipe has, those used often first."""
    named = {one.name: one for one in settings(build_recipe(read_values("adloco")))}
    groups = {"used often": [named[name] for name in COMMON]}
    for name, setting in named.items():
        if name not in COMMON:
            groups.setdefault(setting.section, []).append(setting)
    lines = ["", "settings, with their values in the recipe adloco:", *SETTINGS_NOTES]
    for title, group in groups.items():
        lines += ["", f"[{title}]" if title in SECTIONS else f"{title}:", *map(_brief, group)]
    return "\n".join([*lines, ""])


def _brief(setting: Setting) -> str:
    """The first sentence on a setting and its value, as wide as the terminal."""
    sentence = re.split(r"(?<=[a-z)])[.;](?= |$)", setting.meaning)[0]
    begin = f"  --{setting.name:<{BRIEF_NAME}}  "
    return textwrap.fill(
        f"{sentence} [{_as_flag(setting.value)}]",
        width=shutil.get_terminal_size().columns - 2,
        initial_indent=begin,
        subsequent_indent=" " * (BRIEF_NAME + 6),
        break_on_hyphens=False,
    )


def _as_flag(value: Any) -> str:
    """A value as text for the command line."""
    return "empty" if value in ("", {}) else value_text(value)
