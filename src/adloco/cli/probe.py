"""`adloco probe`: the largest micro-batch that fits, and the table that was measured to find it."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from adloco.cli.commands import end_rank, on_ranks, parser_of, take_settings
from adloco.config.recipe import build_recipe, override, read_values
from adloco.distributed.launch.launcher import num_ranks, process_group, this_rank
from adloco.run.micro_batch_probe import Probe
from adloco.run.start import find_micro_batch


def probe(words: Sequence[str]) -> int:
    """Print what `switch.max_micro_batch = "auto"` finds for a recipe."""
    parser = parser_of(
        "probe",
        "Find the largest micro-batch that fits, by real steps; on a CPU, --memory.gib says what may be taken.",
    )
    parser.add_argument(
        "recipe",
        nargs="?",
        default="adloco",
        help="a file, or the name of a shipped recipe (default: adloco)",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="processes on this machine to spread the workers over (default: 1)",
    )
    parser.add_argument(
        "--again", action="store_true", help="measure, also if it is known from before"
    )
    settings, others = take_settings(words)
    known = parser.parse_args(others)
    recipe = build_recipe(override(read_values(known.recipe), settings))
    if known.ranks != 1 and num_ranks() == 1:
        return on_ranks(known.ranks, recipe, ["probe", *words])
    console = Console(highlight=False, quiet=this_rank() != 0)
    with process_group(end_rank):
        with console.status("training steps of rising size ..."):
            found, notice = find_micro_batch(recipe, again=known.again)
        if notice:
            console.print(notice, style="bold red", soft_wrap=True)
        _show(found, console)
    return 0


def _show(found: Probe, console: Console) -> None:
    table = Table(
        "micro-batch",
        "peak memory of a worker",
        "part of its budget",
        "seconds per step",
        "samples per second",
        "fits",
    )
    for column in table.columns[:-1]:
        column.justify = "right"
    for row in found.measured:
        ran = row.seconds > 0
        table.add_row(
            str(row.micro_batch),
            f"{row.peak_bytes / 2**20:,.0f} MiB" if ran else "more than there is",
            f"{row.peak_bytes / found.budget_bytes:.0%}" if ran else "-",
            f"{row.seconds:.3f}" if ran else "-",
            f"{row.micro_batch / row.seconds:,.1f}" if ran else "-",
            "yes" if row.fits else "no",
        )
    console.print(table)
    again = " (known from before; --again measures anew)" if found.cached else ""
    budget = f"a budget of {found.budget_bytes / 2**20:,.0f} MiB for each worker of a rank"
    console.print(
        f"largest micro-batch: {found.max_micro_batch} samples within {budget}{again}",
        soft_wrap=True,
    )
    console.print(
        f'use it with --switch.max_micro_batch {found.max_micro_batch}, or "auto"', soft_wrap=True
    )
