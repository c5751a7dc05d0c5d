"""Runs `adloco compare` and keeps a row for each run in a CSV file beside the script."""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from adloco.cli.main import main


def compare(arms: Sequence[str], words: Sequence[str]) -> int:
    """Train what is missing, and copy compare.csv, without folders, to the script's own name.

    Args:
        arms: What `adloco compare` takes.
        words: Its options; those of the command line come after them.

    Returns:
        Its exit code.
    """
    script = Path(sys.argv[0]).resolve()
    folder = Path("runs/reproduce", script.stem.replace("_", "-"))
    code = main(["compare", *arms, "--run.folder", str(folder), *words, *sys.argv[1:]])
    if (folder / "compare.csv").exists() and "--run.folder" not in sys.argv:
        rows = list(csv.DictReader((folder / "compare.csv").open()))
        names = [name for name in rows[0] if name != "folder"]
        with script.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return code
