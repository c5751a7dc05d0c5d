"""Shared steps of commands over many runs: they train the missing runs with a line of progress
each, and show the comparison.
"""

import re
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table as RichTable
from rich.text import Text

from adloco.cli.run_text import clock
from adloco.cli.study_arguments import StudyCommand, parse_targets
from adloco.cli.terminal import Printable, open_console, print_error
from adloco.distributed.launch.local_ranks import INTERRUPTED
from adloco.errors import require
from adloco.plan.link import Link
from adloco.report.compare_page import tables, write_comparison
from adloco.report.table import Table
from adloco.run.folder import RECIPE
from adloco.study.arms import StudyRun
from adloco.study.comparison import Comparison, compare
from adloco.study.fairness import inequalities
from adloco.study.training import ENDED, LOGS, Job, StudyInterruptedError, train_missing


def study_settings(arguments: StudyCommand, name: str) -> tuple[Path, list[tuple[str, str]]]:
    """The study's folder, and the settings that all its runs share."""
    given = dict(arguments.settings)
    slug = re.sub(r"[^\w.]+", "-", name).strip("-")[:80]
    folder = Path(given.pop("run.folder", "") or f"runs/{slug}")
    require(
        not (folder / RECIPE).exists(),
        f"--run.folder {str(folder)!r} is the folder of a run; a study needs one of its own",
    )
    return folder, list(given.items())


def run_study(
    runs: Sequence[StudyRun],
    arguments: StudyCommand,
    folder: Path,
    title: str,
    *,
    varied: Sequence[str] = (),
    draw: Callable[[Comparison], list[Path]] = lambda comparison: [],
) -> int:
    """Train the runs that are missing, write and show their comparison; return the exit code.

    Args:
        runs: The runs, arm by arm.
        arguments: The command.
        folder: The study's folder.
        title: Heading of the page.
        varied: Settings in which the arms differ on purpose.
        draw: Draws further pictures for the page.
    """
    require(arguments.seeds >= 1, f"--seeds must be >= 1, got {arguments.seeds}")
    console = open_console()
    targets = parse_targets(arguments.targets)
    links = [Link.parse(text) for text in arguments.link]
    _require_equal([str(found) for found in inequalities(runs, varied)], force=arguments.force)
    try:
        jobs = train_all(runs, folder, arguments.parallel, console)
    except StudyInterruptedError:
        console.print("stopped and saved; the same command continues", soft_wrap=True)
        return INTERRUPTED
    failed = sum(job.state == "failed" for job in jobs)
    failure = f"{failed} of {len(jobs)} runs failed; what they said is in {folder / LOGS}"
    if not any(job.state == "done" for job in jobs):
        return _fail(f"{failure}, and there is nothing to compare")
    problems = {job.run.folder: job.problem for job in jobs if job.problem}
    with console.status("drawing the comparison ..."):
        comparison = compare(runs, targets=targets, links=links, problems=problems, varied=varied)
        _require_equal(comparison.unequal, force=arguments.force)
        page = write_comparison(comparison, folder, title, draw)
    for table in tables(comparison):
        print_table(table, console)
    best = comparison.loss.text(comparison.spread(comparison.finals[0], comparison.best).mean)
    console.print(f"lowest {comparison.loss.label}: {comparison.best}, {best}", soft_wrap=True)
    for notice, arms in _notices(runs).items():
        console.print(f"{', '.join(arms)}: {notice}", soft_wrap=True)
    console.print(f"{comparison.statement}\n{comparison.differing}\n{page}", soft_wrap=True)
    return _fail(failure) if failed else 0


def _notices(runs: Sequence[StudyRun]) -> dict[str, list[str]]:
    """The notices of the runs, each with the arms that it is about."""
    arms: dict[str, dict[str, None]] = {}
    for run in runs:
        for notice in run.notices:
            arms.setdefault(notice, {})[run.arm] = None
    return {notice: list(about) for notice, about in arms.items()}


def _fail(sentence: str) -> int:
    """Show why the command fails; return its exit code, which is not that of bad input."""
    print_error(sentence)
    return 1


def _require_equal(found: Sequence[str], *, force: bool) -> None:
    require(
        force or not found,
        f"the arms differ in {'; '.join(found)}; make them equal, or give --force to compare them "
        "all the same, with a mark in every table and picture",
    )


def train_all(
    runs: Sequence[StudyRun],
    folder: Path,
    parallel: int,
    console: Console,
) -> Sequence[Job]:
    """Train the runs that are missing and show their progress; return them as they ended.

    Raises:
        StudyInterruptedError: A signal came; running runs have saved.
    """
    jobs: Sequence[Job] = []
    told: dict[int, str] = {}
    began = time.monotonic()
    live = Live(
        get_renderable=lambda: Printable(_progress(jobs, parallel, time.monotonic() - began)),
        console=console,
        refresh_per_second=2,
    )
    with live if console.is_terminal else nullcontext():
        for jobs in train_missing(runs, folder, parallel):
            for number, job in enumerate(jobs):
                if not console.is_terminal and told.get(number, "waiting") != job.state:
                    _tell(job, console)
                told[number] = job.state
    if console.is_terminal:  # Elsewhere it was told when it happened.
        for job in (job for job in jobs if job.problem):
            _tell(job, console)
    return jobs


def print_table(table: Table, console: Console) -> None:
    """Show a table on the terminal; ranges stand in the page."""
    shown = RichTable(
        title=table.title, title_justify="left", box=None, collapse_padding=True, pad_edge=False
    )
    # The name of an arm may be folded, the words of headings and cells not, if they have room.
    cells = [
        [column, *(row[at].text for row in table.rows)] for at, column in enumerate(table.columns)
    ]
    words = [max(len(word) for cell in column for word in cell.split()) for column in cells[1:]]
    longest = max(len(word) for cell in cells[0] for word in cell.split())
    folded = longest + sum(words) + len(words) > console.width
    for index, column in enumerate(table.columns):
        shown.add_column(
            column,
            justify="right" if index else "left",
            min_width=None if folded or not index else words[index - 1],
            overflow="fold",
        )
    for row in table.rows:
        shown.add_row(*(cell.text for cell in row))
    console.print(shown)


def _tell(job: Job, console: Console) -> None:
    name = f"{job.run.arm}, seed {job.run.seed}"
    reason = f": {job.problem}" if job.problem else ""
    state = "training ..." if job.state == "running" else job.state
    after = (
        f" after {clock(job.seconds)}" if job.seconds and job.state in ("done", "failed") else ""
    )
    console.print(f"{name}: {state}{after}{reason}", soft_wrap=True)


def _progress(jobs: Sequence[Job], parallel: int, seconds: float) -> RenderableType:
    grid = RichTable.grid(padding=(0, 1))
    for _ in range(5):
        grid.add_column(no_wrap=True, overflow="ellipsis")
    for job in jobs:
        loss = job.last.get("val_loss") or job.last.get("train_loss")
        left = {"running": f"{clock(job.seconds_left)} left"}.get(job.state, job.state)
        grid.add_row(
            f"{job.run.arm}, seed {job.run.seed}",
            ProgressBar(total=1, completed=job.part, width=24),
            f"{job.part:.0%}",
            f"loss {loss:.3f}" if loss else "",
            Text(left, style="red" if job.state == "failed" else ""),
        )
    done = sum(job.state in ENDED for job in jobs)
    time_left = clock(_seconds_left(jobs, parallel))
    summary = f"{done} of {len(jobs)} runs, {clock(seconds)} gone, {time_left} left"
    return Group(grid, Text(summary, style="dim"))


def _seconds_left(jobs: Sequence[Job], parallel: int) -> float | None:
    """Time until all jobs end, if those that wait take as long as the others; None if unknown."""
    whole = [
        job.seconds / gained
        for job in jobs
        if job.seconds and (gained := job.part - job.part_before) > 0.02
    ]
    if not whole:
        return None
    mean = sum(whole) / len(whole)
    left = sum((1 - job.part) * mean for job in jobs if job.state not in ENDED)
    return left / parallel
