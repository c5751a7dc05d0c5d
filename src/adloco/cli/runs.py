"""`adloco runs`: a table of the runs in a folder."""

import time
from dataclasses import dataclass
from pathlib import Path

from adloco.cli.arguments import Command, argument
from adloco.cli.terminal import open_console, print_whole
from adloco.errors import require
from adloco.report.readable import TIMES, readable

LEAST = ("failures", "age", "sent", "recipe", "tokens", "loss", "state")
"""The columns that a narrow terminal leaves out, the first ones first."""


@dataclass(kw_only=True)
class Runs(Command):
    """List the runs in a folder and below it, the newest last."""

    key = "runs"
    summary = "list the runs in a folder"
    folder: Path = argument(Path("runs"), "FOLDER", place=True, nargs="?")
    """Folder to search (default: runs)."""

    def run(self) -> int:
        from adloco.metrics import ROUND
        from adloco.run.overview import find_runs

        folder: Path = self.folder
        require(folder.is_dir(), f"there is no folder {str(folder)!r}; name one with runs in it")
        found = find_runs(folder)
        require(
            bool(found),
            f"{str(folder)!r} holds no runs; begin one with: adloco train --run.folder "
            f"{folder}/NAME",
        )
        rows = [
            {
                "run": str(each.folder.relative_to(folder) if each.folder != folder else folder),
                "recipe": each.recipe,
                "state": each.state,
                "tokens": f"{each.tokens:,}",
                "loss": ROUND["train_loss"].text(each.loss),
                "sent": ROUND["bytes_communicated"].text(each.bytes_communicated),
                "failures": "-" if each.interruptions is None else str(each.interruptions),
                "age": readable(max(0.0, time.time() - each.changed), TIMES),
            }
            for each in found
        ]
        print_whole(open_console(), rows, names=("run", "recipe", "state"), least=LEAST)
        return 0
