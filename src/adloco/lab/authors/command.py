"""`adloco convert`: writes a recipe from the AdLoCo authors' configuration file, and says what
becomes of each of its keys.
"""

import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from adloco.cli.arguments import Command, argument
from adloco.cli.terminal import open_console
from adloco.errors import require
from adloco.whole_file import write_text

if TYPE_CHECKING:
    from adloco.lab.authors.conversion import Converted


@dataclass(kw_only=True)
class Convert(Command):
    """Write a recipe from the configuration file of the AdLoCo authors' script, and say for each of
    its keys what it is here, and what differs in meaning.
    """

    key = "convert"
    summary = "write a recipe from the AdLoCo authors' config.yaml"
    config: Path = argument(metavar="CONFIG.yaml", place=True)
    """Their file."""
    to: Path | None = argument(None, "RECIPE.toml")
    """File to write; it must not exist yet (default: CONFIG.toml)."""

    def run(self) -> int:
        from adloco.lab.authors.conversion import convert

        source: Path = self.config
        target: Path = self.to or source.with_suffix(".toml")
        conversion = convert(source)
        require(not target.exists(), f"{str(target)!r} exists already; name another file with --to")
        require(target.parent.is_dir(), f"there is no folder {str(target.parent)!r}; make it first")
        write_text(target, conversion.to_toml())

        console = open_console()
        for key in conversion.keys:
            _print_key(console, key)
        if conversion.missing:
            names = ", ".join(conversion.missing)
            console.print(Text.assemble(("not given, so our defaults hold: ", "bold"), names))
        name = shlex.quote(str(target))
        console.print(
            f"wrote {target}; see every setting with: adloco config {name}; train with: "
            f"adloco train {name}",
            soft_wrap=True,
        )
        return 0


def _print_key(console: Console, key: "Converted") -> None:
    from adloco.config.recipe_text import toml_line

    found = [
        f"{section}.{toml_line(*setting)}"
        for section, own in key.settings.items()
        for setting in own.items()
    ]
    colour = "green" if found else "yellow" if key.known else "red"
    becomes = ", ".join(found) or ("no setting" if key.known else "unknown")
    line = Text.assemble((key.source, "bold"), " -> ", (becomes, colour))
    console.print(line, soft_wrap=True)
    for remark in textwrap.wrap(key.remark, console.width - 4):
        console.print(f"    {remark}")
