"""`adloco rewind`: takes a stopped run back to an earlier round."""

from dataclasses import dataclass
from pathlib import Path

from adloco.cli.arguments import Command, argument
from adloco.cli.terminal import open_console, say


@dataclass(kw_only=True)
class Rewind(Command):
    """Take a stopped run back to an earlier round that has a checkpoint, for instance to one before
    its loss rose. Newer checkpoints are set aside in the folder `checkpoints`, and the lines of
    newer rounds are removed from the run's records. Machines that share no folder need the command
    each.
    """

    key = "rewind"
    summary = "take a stopped run back to an earlier round"
    run_folder: Path = argument(metavar="RUN", place=True)
    """The run's folder."""
    round: int = argument(metavar="ROUND", place=True)
    """The round, 0 for the beginning."""

    def run(self) -> int:
        from adloco.run.folder import FROM_PYTHON, resume_line
        from adloco.run.going_back import go_back

        folder = self.run_folder
        console = open_console()
        with console.status("checking the checkpoint ..."):
            aside = go_back(folder, self.round)
        say(
            console,
            f"the run in {folder} is at round {self.round} again; newer checkpoints are kept in "
            f"{folder / 'checkpoints'} until you remove them: {', '.join(aside)}",
        )
        say(console, f"resume it with: {resume_line(folder)}{FROM_PYTHON}")
        return 0
