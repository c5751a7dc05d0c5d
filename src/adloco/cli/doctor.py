"""`adloco doctor`: checks machines and the links between them before a long run."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from adloco.cli.arguments import MachinesCommand, argument
from adloco.cli.terminal import open_console, print_error, working

if TYPE_CHECKING:
    from adloco.cluster.findings import Finding
    from adloco.cluster.rank_facts import RankFacts
    from adloco.config.sections import Recipe

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
TIMEOUT_SECONDS = 12.0
"""Without a recipe: how long a rank may be silent; one that is late, ten times as long."""


@dataclass(kw_only=True)
class Doctor(MachinesCommand):
    """Check what a long run needs: versions, devices, network, shared folder, disk, clocks, and
    bandwidth and latency between islands. Exit code 1 if there is a problem. The largest
    micro-batch is found by `adloco probe`.

      adloco doctor                                  # this machine
      adloco doctor diloco                           # for a recipe
      adloco doctor RECIPE --machines 2 --meet HOST:29400    # the machines of a run
      torchrun ... -m adloco doctor RECIPE           # the same, started by torchrun

    Every machine runs the same line, as for a run; it takes less than two minutes.
    """

    key = "doctor"
    summary = "check machines and their links before a long run"
    recipe: str | None = argument(None, "RECIPE", place=True, nargs="?")
    """A recipe to be trained; without one, its needs are not compared."""

    def run(self) -> int:
        from adloco.cli import elastic_room
        from adloco.cli.rank_processes import Machines, RankEnd, on_ranks
        from adloco.cluster.findings import interface
        from adloco.cluster.rank_facts import look
        from adloco.config.settings import RunSettings
        from adloco.distributed.launch.launcher import num_ranks, process_group, this_rank

        given = self.recipe is not None or bool(self.settings)
        recipe = self.read_recipe() if given else None
        machines = Machines.read(self.machines, self.meet)
        if (self.ranks != 1 or machines) and num_ranks() == 1:
            return on_ranks(self.ranks, recipe, self.words, machines=machines)
        brief = RunSettings(silent_seconds=TIMEOUT_SECONDS, timeout_seconds=TIMEOUT_SECONDS)
        settings = recipe.run if recipe else brief
        elastic_room.check_settings(settings)
        mine = look(Path(settings.folder or "runs"), settings.device)
        own = interface(mine, int(os.environ.get("GROUP_WORLD_SIZE", "1")))
        if own.level == "problem":  # The others could not reach it, and all would wait.
            print_error(own.text, f"adloco (rank {this_rank()})")
            return 1
        console = open_console(quiet=this_rank() != 0)
        levels = set()
        watch = elastic_room.watch(RankEnd().after_failure, settings)
        with process_group(settings.timeout_seconds, watch=watch):
            for finding in _findings(mine, recipe, console):
                levels.add(finding.level)
                console.print(f"{finding.level:<8}", style=STYLES[finding.level], end="")
                console.print(f" {finding.check:<12} {finding.text}", soft_wrap=True)
        return 1 if "problem" in levels else 0


def _findings(mine: "RankFacts", recipe: "Recipe | None", console: Console) -> Iterator["Finding"]:
    """Each finding as soon as it is known, the same on all ranks."""
    from adloco.cluster import findings
    from adloco.cluster.rank_facts import all_facts, first_of_islands, who_sees
    from adloco.distributed.launch.link_probe import measure_links
    from adloco.run.start import open_recipe

    facts = all_facts(mine)
    machines = len({each.machine for each in facts})
    yield findings.versions(facts)
    yield findings.devices(facts)
    for number in range(machines):
        yield findings.interface(next(each for each in facts if each.machine == number), machines)
    yield findings.ports(facts)
    with working(console, "checking that all see the same folder ..."):
        writable = not facts[0].writable
        seen = who_sees(Path(facts[0].folder)) if writable else [True] * len(facts)
    yield findings.folder(facts, seen)
    size, kept = None, 0
    if recipe:
        with working(console, "reading text, building the model's shape ..."):
            size = open_recipe(recipe).checkpoint_bytes()
        # One more is written before the oldest is removed.
        kept = recipe.run.keep_checkpoints + recipe.run.keep_best + 1
    yield findings.disk(facts, size, kept)
    ranks = first_of_islands(facts, recipe)
    if len(ranks) < 2:
        text = "not measured: there is one island; start more ranks, by --ranks or torchrun"
        yield findings.Finding("links", "ok", text)
        return
    hosts = {rank: facts[rank].host for rank in ranks}
    with working(console, "measuring the links between islands ..."):
        links = measure_links(ranks)
    yield findings.clock(links, hosts)
    yield findings.link(links, hosts)
    lines = "; ".join(findings.cluster_lines(links))
    yield findings.Finding("links", "ok", f"for adloco plan --cluster: {lines}")
