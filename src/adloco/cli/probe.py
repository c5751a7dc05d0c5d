"""`adloco probe`: finds the largest micro-batch that fits, or measures the speed of an island, and
prints what was measured.
"""

import shlex
from argparse import Namespace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from adloco.cli.arguments import Commands, add_command, add_ranks, read_recipe
from adloco.cli.terminal import open_console
from adloco.errors import require

if TYPE_CHECKING:
    from adloco.config.sections import Recipe
    from adloco.run.micro_batch_probe import Probe
    from adloco.run.throughput import Throughput


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "probe",
        run,
        summary="measure the largest micro-batch that fits in memory",
        description="Find the largest micro-batch that fits, by training real steps. A run with\n"
        "--switch.max_micro_batch auto uses it. On a CPU, --memory.gib says how much\n"
        "memory may be taken. With --throughput, measure the samples per second of one\n"
        "island (a worker with its ranks) at each micro-batch, for adloco plan.",
        takes_settings=True,
    )
    add_ranks(parser)
    parser.add_argument(
        "--again", action="store_true", help="measure even if the answer is known from before"
    )
    parser.add_argument(
        "--throughput",
        type=Path,
        metavar="CLUSTER.toml",
        help="description of a cluster to write what was measured to; what else it has is kept",
    )
    parser.add_argument(
        "--micro-batches",
        default="",
        metavar="SIZE,...",
        help="micro-batches to measure for it, as in 1,4,16 (default: 1, 2, 4, ... to the largest "
        "that fits)",
    )


def run(arguments: Namespace) -> int:
    from adloco.cli import elastic_room
    from adloco.cli.rank_processes import RankEnd, on_ranks
    from adloco.distributed.launch.launcher import num_ranks, process_group, this_rank

    micro_batches = _parse_sizes(arguments.micro_batches)
    require(
        arguments.throughput is not None or not micro_batches,
        "--micro-batches needs --throughput CLUSTER.toml; give both or neither",
    )
    recipe = read_recipe(arguments)
    if arguments.ranks != 1 and num_ranks() == 1:
        return on_ranks(arguments.ranks, recipe, arguments.words)
    console = open_console(quiet=this_rank() != 0)
    seconds = recipe.run.timeout_seconds
    watch = elastic_room.watch(RankEnd().after_failure, seconds)
    with process_group(seconds, watch=watch):
        if arguments.throughput is None:
            _find_micro_batch(recipe, arguments, console)
        else:
            _find_throughput(recipe, arguments, micro_batches, console)
    return 0


def _parse_sizes(text: str) -> list[int]:
    """Micro-batches from words such as 1,4,16, in rising order."""
    words = [word.strip() for word in text.split(",")] if text else []
    require(
        all(word.isdecimal() and int(word) > 0 for word in words),
        f"--micro-batches must be whole numbers > 0, as in 1,4,16, got {text!r}",
    )
    return sorted({int(word) for word in words})


def _find_micro_batch(recipe: "Recipe", arguments: Namespace, console: Console) -> None:
    from adloco.run.recipe_probe import find_micro_batch

    with console.status("training steps of rising size ..."):
        found, notice = find_micro_batch(recipe, again=arguments.again)
    _show_notice(notice, console)
    _show(found, console)


def _find_throughput(
    recipe: "Recipe", arguments: Namespace, micro_batches: list[int], console: Console
) -> None:
    from adloco.distributed.launch.launcher import num_ranks, this_rank
    from adloco.plan.measured_cluster import cluster_text, write_measured
    from adloco.run.recipe_probe import find_throughput
    from adloco.run.throughput import STEPS

    file = arguments.throughput
    if this_rank() == 0:
        cluster_text(file)  # It is refused before minutes of measuring, not after.
    with console.status("training steps of rising size ...") as status:
        found, notice = find_throughput(
            recipe,
            micro_batches,
            again=arguments.again,
            on_micro_batch=lambda size: status.update(
                f"training {STEPS} steps with micro-batches of {size} ..."
            ),
        )
    _show_notice(notice, console)
    _show_throughput(found, console)
    if this_rank() == 0:
        words = [arguments.recipe or "adloco"]
        words += [word for key, value in arguments.settings for word in (f"--{key}", value)]
        words += ["--ranks", str(num_ranks())] if num_ranks() > 1 else []
        write_measured(
            file,
            samples_per_second=found.samples_per_second,
            jitter=found.jitter,
            origin=f"on {date.today()} with {shlex.join(words)}",
        )
    console.print(
        f"written to {file}; describe your islands and their link there, for adloco plan --cluster",
        soft_wrap=True,
    )


def _show_notice(notice: str, console: Console) -> None:
    if notice:
        console.print(notice, style="bold red", soft_wrap=True)


def _show_throughput(found: "Throughput", console: Console) -> None:
    table = Table()
    for title in ("micro-batch", "seconds per step", "samples per second"):
        table.add_column(title, justify="right")
    rates = found.samples_per_second.values()
    for (size, seconds), rate in zip(found.median_seconds.items(), rates, strict=True):
        table.add_row(str(size), f"{seconds:.3f}", f"{rate:,.1f}")
    console.print(table)
    ranks = f"{found.ranks} ranks" if found.ranks > 1 else "1 rank"
    console.print(
        f"an island of {ranks}; jitter {found.jitter:.2g}: standard deviation of a step's seconds "
        "over their mean",
        soft_wrap=True,
    )


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
