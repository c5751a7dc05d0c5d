"""`adloco doctor`: checks machines and the links between them before a long run."""

import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from adloco.cli.arguments import Commands, add_command, add_machines, add_ranks, read_recipe
from adloco.cli.terminal import open_console, print_error

if TYPE_CHECKING:
    from adloco.cluster.findings import Finding
    from adloco.cluster.rank_facts import RankFacts
    from adloco.config.sections import Recipe

EXAMPLES = """\
  adloco doctor                                  # this machine
  adloco doctor diloco --memory.gib 8            # for a recipe
  adloco doctor RECIPE --machines 2 --meet HOST:29400    # the machines of a run
  torchrun ... -m adloco doctor RECIPE           # the same, started by torchrun

Every machine runs the same line, as for a run; it takes less than two minutes.
"""
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
TIMEOUT_SECONDS = 12.0
"""Without a recipe: how long a rank may be silent; one that is late, ten times as long."""


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "doctor",
        run,
        summary="check machines and their links before a long run",
        description="Check what a long run needs: versions, devices, network, shared folder,\n"
        "disk, clocks, bandwidth and latency between islands, and for a recipe the\n"
        "largest micro-batch. Exit code 1 if there is a problem.",
        takes_settings=True,
        takes_recipe=False,
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "recipe",
        nargs="?",
        metavar="RECIPE",
        help="a recipe to be trained; without one, its needs are not compared",
    )
    add_ranks(parser)
    add_machines(parser)


def run(arguments: Namespace) -> int:
    from adloco.cli import elastic_room
    from adloco.cli.rank_processes import Machines, RankEnd, on_ranks
    from adloco.cluster.findings import interface
    from adloco.distributed.launch.launcher import num_ranks, process_group, this_rank

    given = arguments.recipe is not None or bool(arguments.settings)
    recipe = read_recipe(arguments) if given else None
    machines = Machines.read(arguments.machines, arguments.meet)
    if (arguments.ranks != 1 or machines) and num_ranks() == 1:
        return on_ranks(arguments.ranks, recipe, arguments.words, machines=machines)
    mine = _look(recipe)
    own = interface(mine, int(os.environ.get("GROUP_WORLD_SIZE", "1")))
    if own.level == "problem":  # The others could not reach it, and all would wait.
        print_error(own.text, f"adloco (rank {this_rank()})")
        return 1
    console = open_console(quiet=this_rank() != 0)
    levels = set()
    seconds = _timeout_seconds(recipe)
    watch = elastic_room.watch(RankEnd().after_failure, seconds)
    with process_group(seconds, watch=watch):
        for finding in _findings(mine, recipe, console):
            levels.add(finding.level)
            _print_line(console, finding.level, finding.check, finding.text)
    return 1 if "problem" in levels else 0


def _print_line(console: Console, level: str, check: str, text: str) -> None:
    console.print(f"{level:<8}", style=STYLES.get(level), end="")
    console.print(f" {check:<12} {text}", soft_wrap=True)


@contextmanager
def _doing(console: Console, check: str, what: str) -> Iterator[Callable[[str], None]]:
    """Show what is being done for a check: beside a spinner on a terminal, elsewhere in a line.

    Yields:
        Shows what is done next.
    """

    def tell(what: str) -> None:
        _print_line(console, "...", check, what)

    if console.is_terminal:
        with console.status(what) as status:
            yield lambda what: status.update(what)
    else:
        tell(what)
        yield tell


def _look(recipe: "Recipe | None") -> "RankFacts":
    from adloco.cluster.rank_facts import look
    from adloco.config.settings import RunSettings

    settings = recipe.run if recipe else RunSettings()
    return look(Path(settings.folder or "runs"), settings.device)


def _timeout_seconds(recipe: "Recipe | None") -> float:
    return recipe.run.timeout_seconds if recipe else TIMEOUT_SECONDS


def _findings(mine: "RankFacts", recipe: "Recipe | None", console: Console) -> Iterator["Finding"]:
    """Each finding as soon as it is known, the same on all ranks."""
    from adloco.cluster import findings
    from adloco.cluster.rank_facts import all_facts, who_sees

    facts = all_facts(mine)
    machines = len({each.machine for each in facts})
    yield findings.versions(facts)
    yield findings.devices(facts)
    for number in range(machines):
        yield findings.interface(next(each for each in facts if each.machine == number), machines)
    yield findings.ports(facts)
    with _doing(console, "folder", "checking that all see the same folder ..."):
        writable = not facts[0].writable
        seen = who_sees(Path(facts[0].folder)) if writable else [True] * len(facts)
    yield findings.folder(facts, seen)
    yield _disk(facts, recipe, console)
    yield from _links(facts, recipe, console)
    if recipe:
        yield _micro_batch(recipe, mine, console)


def _disk(facts: Sequence["RankFacts"], recipe: "Recipe | None", console: Console) -> "Finding":
    from adloco.cluster.findings import disk

    if recipe is None:
        return disk(facts, None, 0)
    from adloco.run.recipe_probe import checkpoint_bytes

    with _doing(console, "disk", "reading text, building the model's shape ..."):
        size = checkpoint_bytes(recipe)
    # One more is written before the oldest is removed.
    return disk(facts, size, recipe.run.keep_checkpoints + recipe.run.keep_best + 1)


def _links(
    facts: Sequence["RankFacts"], recipe: "Recipe | None", console: Console
) -> Iterator["Finding"]:
    from adloco.cluster import findings
    from adloco.cluster.rank_facts import first_of_islands
    from adloco.distributed.launch.link_probe import measure_links

    ranks = first_of_islands(facts, recipe)
    if len(ranks) < 2:
        text = "not measured: there is one island; start more ranks, by --ranks or torchrun"
        yield findings.Finding(check="links", level="ok", text=text)
        return
    hosts = {rank: facts[rank].host for rank in ranks}
    with _doing(console, "links", "connecting the islands ...") as tell:
        links = measure_links(ranks, lambda what: tell(f"measuring {what} ..."))
    yield findings.clock(links, hosts)
    yield findings.link(links, hosts)
    lines = "; ".join(findings.cluster_lines(links))
    yield findings.Finding(check="links", level="ok", text=f"for adloco plan --cluster: {lines}")


def _micro_batch(recipe: "Recipe", mine: "RankFacts", console: Console) -> "Finding":
    from adloco.cluster.findings import Finding

    if mine.device == "cpu" and not recipe.memory.gib:
        text = "not measured: on a CPU, --memory.gib 8 says how much memory may be taken"
        return Finding(check="micro-batch", level="ok", text=text)
    from adloco.run.recipe_probe import find_micro_batch

    with _doing(console, "micro-batch", "training steps of rising size ..."):
        found, _ = find_micro_batch(recipe, again=False)
    largest, limit = found.max_micro_batch, recipe.switch.max_micro_batch
    if isinstance(limit, int) and limit > largest:
        return Finding(
            check="micro-batch",
            level="problem",
            text=f"{largest} samples fit in memory, but switch.max_micro_batch is {limit}; use "
            f"{largest}, or auto",
        )
    text = f"at most {largest} samples fit in memory; switch.max_micro_batch is {limit}"
    return Finding(check="micro-batch", level="ok", text=text)
