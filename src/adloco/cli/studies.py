"""Shared steps of commands over many runs: they train what is missing, and show the comparison."""

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from adloco.cli.arguments import StudyCommand
from adloco.cli.run_text import clock
from adloco.cli.terminal import open_console, print_error, printable, table_of
from adloco.distributed.launch.local_ranks import INTERRUPTED
from adloco.errors import require
from adloco.plan.link import Link
from adloco.report.compare_page import tables, write_comparison
from adloco.report.table import Table
from adloco.run.stored import check_written_records
from adloco.study.arms import StudyRun
from adloco.study.comparison import Comparison, compare
from adloco.study.fairness import inequalities, unpaired
from adloco.study.training import ENDED, LOGS, Job, StudyInterruptedError, train_missing


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

    draw: Draws further pictures for the page. `compare` says what runs and varied are.
    """
    console = open_console()
    links = [Link.parse(text) for text in arguments.link]
    for run in runs:
        if run.finished:
            check_written_records(run.folder)
    _require_equal(inequalities(runs, varied), force=arguments.force)
    short = {run.arm: run.too_short for run in runs if not run.finished and run.too_short}
    require(
        arguments.force or len(short) < len({run.arm for run in runs}),
        f"{next(iter(short.values()), '')}; or give --force to train all the same",
    )
    for arm, notice in short.items():
        console.print(f"{arm}: {notice}", soft_wrap=True)
    if (sentence := unpaired(runs)) and not all(run.finished for run in runs):
        console.print(sentence, soft_wrap=True)
    try:
        jobs = train_all(runs, folder, arguments.parallel, console)
    except StudyInterruptedError:
        console.print("stopped and saved; the same command continues", soft_wrap=True)
        return INTERRUPTED
    problems = {job.run.folder: job.problem for job in jobs if job.problem}
    failure = f"of {len(jobs)} runs failed"
    if (folder / LOGS).is_dir():
        failure += f"; what they said is in {folder / LOGS}"
    if not any(job.state == "done" for job in jobs):
        return _fail(f"{len(problems)} {failure}, and there is nothing to compare")
    with console.status("drawing the comparison ..."):
        comparison = compare(
            runs, targets=arguments.targets, links=links, problems=problems, varied=varied
        )
        _require_equal(comparison.unequal, force=arguments.force)
        page = write_comparison(comparison, folder, title, draw)
    failed = [curve for curves in comparison.arms.values() for curve in curves if curve.problem]
    for curve in failed:
        if curve.run.folder not in problems:  # The others were named as they ended.
            console.print(f"{_name(curve.run)}: failed: {curve.problem}", soft_wrap=True)
    for table in tables(comparison):
        print_table(table, console)
    ends = {arm: comparison.spread(comparison.finals[0], arm) for arm in comparison.arms}
    best = ends[comparison.best]
    alike = sum(end.count == best.count for end in ends.values())
    among = "" if alike == len(ends) else " of the arms with the most seeds"
    if best.count == 1:
        among = " of one seed, which is no claim"
    if alike > 1 or best.count == 1 or len(ends) == 1:
        console.print(
            f"lowest {comparison.loss.label}{among}: {comparison.best}, "
            f"{comparison.loss.text(best.mean)}",
            soft_wrap=True,
        )
    for notice, arms in _notices(runs).items():
        if notice in short.values():  # Said before.
            continue
        console.print(f"{', '.join(arms)}: {notice}", soft_wrap=True)
    console.print(f"{comparison.statement}\n{comparison.differing}\n{page}", soft_wrap=True)
    return _fail(f"{len(failed)} {failure}") if failed else 0


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
    runs: Sequence[StudyRun], folder: Path, parallel: int, console: Console
) -> Sequence[Job]:
    """Train the runs that are missing and show their progress; return them as they ended.

    Raises:
        StudyInterruptedError: A signal came; running runs have saved.
    """
    jobs: Sequence[Job] = []
    told: dict[int, str] = {}
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(24),
        TaskProgressColumn(),
        TextColumn("{task.fields[said]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns,
        console=console,
        disable=not console.is_terminal,
        speed_estimate_period=math.inf,  # A bar moves once in a round.
    ) as progress:
        bars = [
            progress.add_task(printable(_name(run)), total=1, said="", start=False, visible=False)
            for run in runs
        ]
        whole = progress.add_task("all runs", total=len(runs), said="")
        for jobs in train_missing(runs, folder, parallel):
            for number, (job, bar) in enumerate(zip(jobs, bars, strict=True)):
                loss = job.last.get("val_loss") or job.last.get("train_loss")
                said = f"loss {loss:.3f}" if loss and job.state == "running" else job.state
                progress.update(bar, completed=job.part, said=said, visible=job.state != "waiting")
                if told.get(number, "waiting") != job.state:
                    _tell(job, console)
                    if job.state == "running":
                        progress.start_task(bar)
                    elif job.state in ENDED:
                        progress.stop_task(bar)
                told[number] = job.state
            done = [1.0 if job.state in ENDED else job.part for job in jobs]
            progress.update(whole, completed=sum(done))
    return jobs


def _name(run: StudyRun) -> str:
    return f"{run.arm}, seed {run.seed}"


def print_table(table: Table, console: Console) -> None:
    """Show a table on the terminal; ranges stand in the page."""
    shown = table_of(*table.columns, names=1, title=table.title)
    for row in table.rows:
        shown.add_row(*(cell.text for cell in row))
    # The name of an arm may be folded, the words of the other cells not, if they have room.
    cells = zip(table.columns, *([cell.text for cell in row] for row in table.rows), strict=True)
    words = ([word for cell in column for word in cell.split()] for column in cells)
    first, *widths = (max(map(len, column)) for column in words)
    if first + sum(widths) + 2 * len(widths) <= console.width:
        for column, width in zip(shown.columns[1:], widths, strict=True):
            column.min_width = width
    if not console.is_terminal:
        unlimited = console.options.update(max_width=sys.maxsize)
        console.width = max(console.width, console.measure(shown, options=unlimited).maximum)
    console.print(shown)


def _tell(job: Job, console: Console) -> None:
    reason = f": {job.problem}" if job.problem else ""
    state = "training ..." if job.state == "running" else job.state
    after = f" after {clock(job.seconds)}" if job.seconds and job.state in ENDED else ""
    console.print(f"{_name(job.run)}: {state}{after}{reason}", soft_wrap=True)
