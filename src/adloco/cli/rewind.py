"""`adloco rewind`: takes a stopped run back to an earlier round."""

from argparse import Namespace
from pathlib import Path

from adloco.cli.arguments import Commands, add_command
from adloco.cli.terminal import open_console, say


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "rewind",
        run,
        summary="take a stopped run back to an earlier round",
        description="Take a stopped run back to an earlier round that has a checkpoint, for\n"
        "instance to one before its loss rose. Newer checkpoints are set aside in the\n"
        "folder `checkpoints`, and the lines of newer rounds are removed from the run's\n"
        "records. Machines that share no folder need the command each.",
    )
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("round", type=int, metavar="ROUND", help="the round, 0 for the beginning")


def run(arguments: Namespace) -> int:
    from adloco.run.going_back import go_back

    folder = arguments.run_folder
    console = open_console()
    with console.status("checking the checkpoint ..."):
        aside = go_back(folder, arguments.round)
    say(
        console,
        f"the run in {folder} is at round {arguments.round} again; newer checkpoints are kept in "
        f"{folder / 'checkpoints'} until you remove them: {', '.join(aside)}",
    )
    say(console, f"resume it with: adloco train --resume {folder}")
    return 0
