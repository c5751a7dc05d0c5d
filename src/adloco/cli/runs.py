"""`adloco runs`: a table of the runs in a folder."""

import time
from argparse import Namespace
from pathlib import Path

from rich.table import Table

from adloco.cli.arguments import Commands, add_command
from adloco.cli.terminal import open_console
from adloco.errors import require


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "runs",
        run,
        summary="list the runs in a folder",
        description="List the runs in a folder and below it, the newest last.",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path("runs"),
        metavar="FOLDER",
        help="where to look (default: runs)",
    )


def run(arguments: Namespace) -> int:
    from adloco.run.overview import find_runs

    folder: Path = arguments.folder
    require(folder.is_dir(), f"there is no folder {str(folder)!r}; name one with runs in it")
    found = find_runs(folder)
    require(
        bool(found),
        f"{str(folder)!r} holds no runs; begin one with: adloco train --run.folder {folder}/NAME",
    )
    table = Table(box=None)
    for name, side in (
        ("run", "left"),
        ("recipe", "left"),
        ("state", "left"),
        ("tokens", "right"),
        ("loss", "right"),
        ("sent", "right"),
        ("failures", "right"),
        ("age", "right"),
    ):
        table.add_column(name, justify="left" if side == "left" else "right", overflow="fold")
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
