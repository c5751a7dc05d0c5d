"""`adloco probe`: finds the largest micro-batch that fits, and prints what was measured."""

from argparse import Namespace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from adloco.cli.arguments import Commands, add_command, add_ranks, read_recipe

if TYPE_CHECKING:
    from adloco.run.micro_batch_probe import Probe


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "probe",
        run,
        summary="measure the largest micro-batch that fits in memory",
        description="Find the largest micro-batch that fits, by training real steps. A run with\n"
        "--switch.max_micro_batch auto uses it. On a CPU, --memory.gib says how much\n"
        "memory may be taken.",
        takes_settings=True,
    )
    add_ranks(parser)
    parser.add_argument(
        "--again", action="store_true", help="measure even if the answer is known from before"
    )


def run(arguments: Namespace) -> int:
    from adloco.cli.rank_processes import end_rank, on_ranks
    from adloco.distributed.launch.launcher import num_ranks, process_group, this_rank
    from adloco.run.start import find_micro_batch

    recipe = read_recipe(arguments)
    if arguments.ranks != 1 and num_ranks() == 1:
        return on_ranks(arguments.ranks, recipe, arguments.words)
    console = Console(highlight=False, quiet=this_rank() != 0)
    with process_group(end_rank):
        with console.status("training steps of rising size ..."):
            found, notice = find_micro_batch(recipe, again=arguments.again)
        if notice:
            console.print(notice, style="bold red", soft_wrap=True)
        _show(found, console)
    return 0


def _show(found: "Probe", console: Console) -> None:
    table = Table()
    for title in (
        "micro-batch",
        "peak memory of a worker",
        "part of its budget",
        "seconds per step",
        "samples per second",
    ):
        table.add_column(title, justify="right")
    table.add_column("fits")
    for row in found.measured:
        ran = row.seconds > 0
        table.add_row(
            str(row.micro_batch),
            f"{row.peak_bytes / 2**20:,.0f} MiB" if ran else "out of memory",
            f"{row.peak_bytes / found.budget_bytes:.0%}" if ran else "-",
            f"{row.seconds:.3f}" if ran else "-",
            f"{row.micro_batch / row.seconds:,.1f}" if ran else "-",
            "yes" if row.fits else "no",
        )
    console.print(table)
    again = " (known from before; --again measures again)" if found.cached else ""
    budget = f"a budget of {found.budget_bytes / 2**20:,.0f} MiB for each worker of a rank"
    console.print(
        f"largest micro-batch: {found.max_micro_batch} samples within {budget}{again}",
        soft_wrap=True,
    )
    console.print(
        f'use it with --switch.max_micro_batch {found.max_micro_batch}, or "auto"', soft_wrap=True
    )
