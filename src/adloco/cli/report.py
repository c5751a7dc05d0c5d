"""`adloco report`: draws the report of a run again from its files."""

from argparse import Namespace
from pathlib import Path

from adloco.cli.arguments import Commands, add_command
from adloco.cli.terminal import open_console


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "report",
        run,
        summary="draw the report of a run again",
        description="Draw report.html of a run, and its charts as PNG files in plots beside it.",
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder")


def run(arguments: Namespace) -> int:
    from adloco.report.page import panels_of, write_report
    from adloco.report.pictures import draw_run
    from adloco.run.folder import run_folder
    from adloco.run.stored import check_written_records

    console = open_console()
    with console.status("drawing the report ..."):
        folder = run_folder(arguments.run_folder)
        check_written_records(folder)
        paths = [write_report(folder), *draw_run(panels_of(folder), folder / "plots")]
    for path in paths:
        console.print(str(path), soft_wrap=True)
    return 0
