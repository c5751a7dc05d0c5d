"""`adloco report`: draws the report of a run again from its files."""

from dataclasses import dataclass
from pathlib import Path

from adloco.cli.arguments import Command, argument
from adloco.cli.terminal import open_console, say


@dataclass(kw_only=True)
class Report(Command):
    """Draw report.html of a run, and its charts as PNG files in plots beside it."""

    key = "report"
    summary = "draw the report of a run again"
    run_folder: Path = argument(metavar="RUN", place=True)
    """The run's folder."""
    trust_recipe: bool = argument(False)
    """Also run code that the folder's recipe names and the run did not begin with."""

    def run(self) -> int:
        from adloco.run.folder import check_links, run_folder

        folder = run_folder(self.run_folder)
        # These import torch, which takes seconds.
        from adloco.report.page import PAGE, write_report
        from adloco.report.pictures import draw_run
        from adloco.run.stored import check_code, check_written_records

        console = open_console()
        with console.status("drawing the report ..."):
            check_links(folder)
            if not self.trust_recipe:
                check_code(folder, "read that code and give --trust-recipe")
            lost = check_written_records(folder)
            paths = [folder / PAGE, *draw_run(write_report(folder), folder / "plots")]
        for sentence in lost:
            say(console, sentence)
        for path in paths:
            console.print(str(path), soft_wrap=True)
        return 0
