"""`adloco runs`: a table of the runs in a folder."""

import time
from dataclasses import dataclass
from pathlib import Path

from adloco.cli.arguments import Command, argument
from adloco.cli.terminal import open_console, table_of
from adloco.errors import require


@dataclass(kw_only=True)
class Runs(Command):
    """List the runs in a folder and below it, the newest last."""

    key = "runs"
    summary = "list the runs in a folder"
    folder: Path = argument(Path("runs"), "FOLDER", place=True, nargs="?")
    """Folder to search (default: runs)."""

    def run(self) -> int:
        from adloco.run.overview import find_runs

        folder: Path = self.folder
        require(folder.is_dir(), f"there is no folder {str(folder)!r}; name one with runs in it")
        found = find_runs(folder)
        require(
            bool(found),
            f"{str(folder)!r} holds no runs; begin one with: adloco train --run.folder "
            f"{folder}/NAME",
        )
        table = table_of(
            *("run", "recipe", "state", "tokens", "loss", "sent", "failures", "age"), names=3
        )
        for each in found:
            table.add_row(
                str(each.folder.relative_to(folder)) if each.folder != folder else str(folder),
                each.recipe,
                each.state,
                f"{each.tokens:,}",
                "-" if each.loss is None else f"{each.loss:.4f}",
                f"{each.bytes_communicated / 1e6:,.1f} MB",
                "-" if each.interruptions is None else str(each.interruptions),
                _age(time.time() - each.changed),
            )
        open_console().print(table)
        return 0


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
