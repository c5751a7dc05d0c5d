"""Makes the pictures in docs/images from a real run: its live view, and its report wide and at 420
pixels, light and dark.

    python docs/screenshots.py --to docs/images

It trains the default recipe in a temporary folder (some minutes on two cores); `--run` shows the
report of a run that is there. The pictures need Chromium (`chromium` of Debian and others).
"""

import argparse
import contextlib
import io
import math
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from rich.console import Console

from adloco.cli.live_view import LiveView
from adloco.config.recipe import build_recipe, override, read_values
from adloco.report.page import PAGE, write_report
from adloco.run.training_run import TrainingRun

SETTINGS = {"run.folder": "runs/adloco", "run.trackers": "none"}
VIEW = "view.svg"
VIEW_AT = 0.65
"""The part of the budget after which the live view is shown."""
VIEW_COLUMNS = 96
WIDTHS = {"wide": (1200, 1240), "narrow": (420, 1500)}
"""Width and height of the pictures of a report, in pixels."""
NARROWEST = 500
"""Chromium makes no smaller windows; a page is put into a frame instead."""
SCHEMES = {"light": "1", "dark": "0"}
"""Blink's numbers of the preferred colour schemes."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, draw and write the pictures."""
    parser = argparse.ArgumentParser(description="Make the pictures of the documentation.")
    parser.add_argument("--run", type=Path, help="a finished run (default: trains one)")
    parser.add_argument("--to", type=Path, required=True, help="folder of the pictures")
    parser.add_argument("--browser", default="chromium", help="Chromium's command")
    given = parser.parse_args(arguments)
    given.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        run = given.run or train(scratch)
        if not given.run:
            view = scratch / VIEW
            shoot(given.browser, view, given.to / "view.png", size_of(view))
        write_report(run)
        page = run / PAGE
        for width, size in WIDTHS.items():
            for scheme in SCHEMES:
                picture = given.to / f"report-{width}-{scheme}.png"
                shoot(given.browser, page, picture, size, scheme)


def train(folder: Path) -> Path:
    """Train a run in a folder, write its live view there, and return the run's folder."""
    # Pictures show the run's relative folder and not where it happens to be trained.
    with contextlib.chdir(folder):
        run = TrainingRun.create(build_recipe(override(read_values("adloco"), [*SETTINGS.items()])))
        live = LiveView(run)
        for record in run.rounds():
            live.show(record)
            if run.progress().part >= VIEW_AT and not Path(VIEW).exists():
                draw_view(live)
        run.finish()
    return folder / run.folder


def draw_view(live: LiveView) -> None:
    """Write what the live view shows now to `VIEW`, as an SVG."""
    paper = Console(record=True, width=VIEW_COLUMNS, file=io.StringIO(), force_terminal=True)
    paper.print(live.render())
    paper.save_svg(VIEW, title="adloco train")


def size_of(picture: Path) -> tuple[int, int]:
    """Width and height of an SVG, in pixels."""
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', picture.read_text())
    assert found, "Rich writes a view box"
    return math.ceil(float(found[1])), math.ceil(float(found[2]))


def shoot(
    browser: str, page: Path, picture: Path, size: tuple[int, int], scheme: str = "light"
) -> None:
    """Write a PNG of what the browser shows of a page.

    Args:
        browser: Chromium's command.
        page: The page's file.
        picture: Where the PNG is written.
        size: Its width and height, in pixels.
        scheme: A key of `SCHEMES`.
    """
    width, height = size
    with tempfile.TemporaryDirectory() as folder:
        frame = Path(folder) / "frame.html"
        style = f"border: 0; width: {width}px; height: {height}px"
        frame.write_text(
            f'<body style="margin: 0"><iframe style="{style}" src="{page.resolve().as_uri()}">'
            "</iframe></body>"
        )
        options = [
            *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            f"--window-size={max(width, NARROWEST)},{height}",
            f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}",
            "--virtual-time-budget=10000",
            f"--screenshot={picture.resolve()}",
        ]
        subprocess.run([browser, *options, frame.as_uri()], check=True, capture_output=True)
    image = Image.open(picture).crop((0, 0, width, height)).convert("RGB")
    image.quantize(128).save(picture, optimize=True)


if __name__ == "__main__":
    main()
