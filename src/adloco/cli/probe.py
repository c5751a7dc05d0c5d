"""`adloco probe`: finds the largest micro-batch that fits, or measures the speed of an island."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from adloco.cli.arguments import RanksCommand, argument
from adloco.cli.terminal import open_console, table_of, working
from adloco.errors import require
from adloco.report.readable import counted

if TYPE_CHECKING:
    from adloco.config.sections import Recipe


@dataclass(kw_only=True)
class Probe(RanksCommand):
    """Find the largest micro-batch that fits, by training real steps. A run with
    --switch.max_micro_batch auto uses it. On a CPU, --memory.gib says how much memory may be taken.
    With --throughput, measure the samples per second of one island (a worker with its ranks) at
    each micro-batch, for adloco plan.
    """

    key = "probe"
    summary = "measure the largest micro-batch that fits in memory"
    throughput: Path | None = argument(None, "CLUSTER.toml")
    """Description of a cluster to write what was measured to; what else it has is kept."""
    micro_batches: list[int] = argument([], "SIZE,...")
    """Micro-batches to measure for it, as in 1,4,16 (default: 1, 2, 4, ... to the largest that
    fits).
    """

    def run(self) -> int:
        given = ",".join(map(str, self.micro_batches))
        require(
            all(size > 0 for size in self.micro_batches),
            f"--micro-batches must be > 0, as in 1,4,16, got {given}",
        )
        require(
            self.throughput is not None or not self.micro_batches,
            "--micro-batches needs --throughput CLUSTER.toml; give both or neither",
        )
        recipe = self.read_recipe()
        # These import torch, which takes seconds: a line that is wrong is refused before.
        from adloco.cli import elastic_room
        from adloco.cli.rank_processes import RankEnd, on_ranks
        from adloco.distributed.launch.launcher import num_ranks, process_group, this_rank

        if self.ranks != 1 and num_ranks() == 1:
            return on_ranks(self.ranks, recipe, self.words)
        console = open_console(quiet=this_rank() != 0)
        watch = elastic_room.watch(RankEnd().after_failure, recipe.run)
        with process_group(recipe.run.timeout_seconds, watch=watch):
            if self.throughput is None:
                self._find_micro_batch(recipe, console)
            else:
                self._find_throughput(recipe, self.throughput, console)
        return 0

    def _find_micro_batch(self, recipe: "Recipe", console: Console) -> None:
        from adloco.run.micro_batch_probe import probe
        from adloco.run.start import open_recipe

        with working(console, "reading text and building the model ...") as tell:
            found = probe(open_recipe(recipe), on_micro_batch=partial(_trying, tell))
        table = table_of(
            *("micro-batch", "peak memory of a worker", "part of its budget"),
            *("seconds per step", "samples per second", "fits"),
        )
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
        budget = f"a budget of {found.budget_bytes / 2**20:,.0f} MiB for each worker of a rank"
        largest = found.max_micro_batch
        bounded = largest == found.largest
        no_more = "; batch.maximum allows no larger one, memory may" if bounded else ""
        console.print(
            f"largest micro-batch: {largest} samples within {budget}{no_more}\n"
            f'use it with --switch.max_micro_batch {largest}, or "auto"',
            soft_wrap=True,
        )

    def _find_throughput(self, recipe: "Recipe", file: Path, console: Console) -> None:
        from adloco.distributed.launch.launcher import num_ranks, this_rank
        from adloco.plan.cluster import BUSY
        from adloco.plan.measured_cluster import cluster_text, write_measured
        from adloco.run.micro_batch_probe import probe
        from adloco.run.probe_worker import doublings, measure_throughput
        from adloco.run.start import open_recipe

        if this_rank() == 0:
            cluster_text(file)  # It is refused before minutes of measuring, not after.
        with working(console, "reading text and building the model ...") as tell:
            opened, sizes = open_recipe(recipe), sorted({*self.micro_batches})
            if not sizes:
                limit = probe(opened, on_micro_batch=partial(_trying, tell)).max_micro_batch
                sizes = doublings(limit)
            found = measure_throughput(opened, sizes, on_micro_batch=partial(_trying, tell))
        table = table_of("micro-batch", "seconds per step", "samples per second")
        rates = found.samples_per_second.values()
        for (size, seconds), rate in zip(found.median_seconds.items(), rates, strict=True):
            table.add_row(str(size), f"{seconds:.3f}", f"{rate:,.1f}")
        console.print(table)
        if this_rank() == 0:
            words = [self.recipe or "adloco"]
            words += [word for key, value in self.settings for word in (f"--{key}", value)]
            words += ["--ranks", str(num_ranks())] if num_ranks() > 1 else []
            write_measured(
                file,
                samples_per_second=found.samples_per_second,
                ranks=found.ranks,
                update_seconds=found.update_seconds,
                jitter=found.jitter,
                origin=f"on {date.today()} with {shlex.join(words)}",
            )
        console.print(
            f"an island of {counted(found.ranks, 'rank')}; {found.update_seconds:.3f} s of a step "
            f"are its update; jitter {found.jitter:.2g}: standard "
            "deviation of a step's seconds over their mean"
            f"{' (a busy machine: measure again on an idle one)' * (found.jitter > BUSY)}\n"
            f"written to {file}; describe your islands and their link there, for adloco plan "
            "--cluster",
            soft_wrap=True,
        )


def _trying(tell: Callable[[str], None], size: int) -> None:
    tell(f"trying micro-batches of {counted(size, 'sample')} ...")
