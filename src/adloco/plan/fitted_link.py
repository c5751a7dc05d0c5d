"""A cluster's link as measured rounds show it, for a plan.

`plan/calibration.py` fits the time of a round to rows of a method. On a cluster its constants
replace what was assumed:

- `latency` becomes `sync_seconds` (of each fragment), and the link has no latency besides;
- `volume` and `inefficiency`, up to the ceiling, become the bandwidth at which the bytes of the
  method take as long as was measured;
- steps that hide transfers hide them in the plan, too, in place of those of the recipe's streaming;
- `stragglers` becomes the jitter that lets as many workers wait as long;
- `overhead` makes steps slower, if utilisations were measured, unless it is the wait for the
  cluster's slowest island. From seconds it cannot be told from computation, and steps stay as the
  cluster has them. In rounds of one H (data-parallel training) it cannot be told from the latency:
  what both exceed the cluster's steps by becomes `sync_seconds`.

A candidate takes the rows of its own recipe: those in its wire format, or else those that send the
most similar number of bytes, whose time is then scaled by the bytes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.sections import Recipe
from adloco.errors import require
from adloco.plan.calibration import Calibration, calibrate, describe
from adloco.plan.candidates import on_all_ranks, ranks_of_island
from adloco.plan.cluster import Cluster
from adloco.plan.exchange import exchange_of
from adloco.plan.measured_rows import Group, Rows
from adloco.plan.round_model import TERMS
from adloco.plan.round_time import Sync, expected_largest
from adloco.plan.step_samples import largest_pass, samples_of_islands, trained_of

FREE_BITS = 1e18
"""Bandwidth in bits/s of a link on which bytes took no time."""

SAME_SIZE = 0.01
"""Part by which the size of a measured model may differ from that of the plan."""


@dataclass(frozen=True, kw_only=True)
class FittedLink:
    """The link that the rows of a method show."""

    group: Group
    calibration: Calibration
    sync: Sync
    """The exchange of the measured rounds."""
    step_seconds: tuple[float, ...]
    """Mean seconds of an inner step of each island, by the recipe."""
    bandwidths: tuple[float, float]
    """The lowest and the highest in bits/s that were measured."""
    single: float = 0.0
    """H of the rows if all have the same; 0 if they differ."""

    def applied(self, cluster: Cluster) -> Cluster:
        """The cluster with what was measured."""
        constants = self.calibration.constants
        terms = {**dict.fromkeys(TERMS, 0.0), **constants.terms}
        step, longest = sum(self.step_seconds) / cluster.islands, max(self.step_seconds)
        by_ratio = constants.measure == "compute_utilisation"
        second = step if by_ratio else 1.0
        bits = min(8 * cluster.link.bytes_per_second, constants.ceiling)
        moving = second * (terms["volume"] / bits + terms["inefficiency"] / math.sqrt(bits))
        rate = 8 * self.sync.bytes_sent / moving if moving else FREE_BITS
        workers = int(self.group[1])
        alone, alike = (0.0,) * workers, (1.0,) * workers
        # Of the rows; the plan itself counts the waiting for the slowest island.
        each = step * (1 + terms["overhead"]) if by_ratio else terms["overhead"]
        slower = max(1.0, each / longest) if by_ratio else 1.0
        latency = second * terms["latency"] + self.single * (each - slower * longest)
        waited = second * terms["stragglers"] / (slower * step * expected_largest(alone, alike))
        # Each of the F fragments has a sync, for which workers wait: F sqrt(H / F) deviations.
        fragments = self.sync.fragments
        return replace(
            cluster,
            bandwidth=f"{rate / 1e3:.6f}kbit",
            latency="0s",
            sync_seconds=max(0.0, latency) / fragments,
            jitter=waited / math.sqrt(fragments),
            update_seconds=slower * cluster.update_seconds,
            samples_per_second={
                size: speed / slower for size, speed in cluster.samples_per_second.items()
            },
        )

    def hiding(self, sync: Sync, sync_every: float) -> Sync:
        """What is exchanged in a round, with what hides it by the rows: beside a part of the steps
        if they say so. Otherwise they lack what the backward pass has hidden, so it hides no more.
        """
        hidden = self.calibration.constants.hidden
        return replace(
            sync,
            buckets=None,
            tau=0 if hidden else sync.tau,
            hidden_steps=hidden * sync_every / sync.fragments,
        )

    def sentence(self, bits_per_second: float) -> str:
        """The rows, how well they predict, and whether they have the bandwidth of a cluster."""
        found = self.calibration
        left_out = found.held_out_bandwidths
        assert left_out is not None
        lowest, highest = self.bandwidths
        beyond = (
            ""
            if lowest <= bits_per_second <= highest
            else f" The cluster's is not between the {lowest / 1e6:g} and {highest / 1e6:g} Mbit/s "
            "that were measured, so errors are larger."
        )
        return (
            f"Link, waiting and overheads are fitted to {found.fitted.count} measured rounds of "
            f"{describe(self.group)}; each bandwidth, left out, is predicted with errors of "
            f"{left_out.median:.1%} (median) and {left_out.worst:.1%} (worst).{beyond}"
        )


@dataclass(frozen=True, kw_only=True)
class FittedLinks:
    """Links fitted to measured rounds, for the recipes of a plan."""

    links: Mapping[str, Sequence[FittedLink]]
    """Name of a recipe -> what its rows say."""

    def link_of(self, name: str, sync: Sync) -> FittedLink | None:
        """The fit to the rounds of a recipe whose syncs are most similar; None if there is none."""
        sent = sync.bytes_sent
        return min(
            self.links.get(name, ()),
            key=lambda link: abs(math.log(link.sync.bytes_sent / sent)) if sent else 0.0,
            default=None,
        )

    def assumptions(self, names: Sequence[str], cluster: Cluster) -> list[str]:
        """Sentences."""
        bits = 8 * cluster.link.bytes_per_second
        said = [link.sentence(bits) for links in self.links.values() for link in links]
        without = [name for name in names if name not in self.links]
        if without:
            said.append(
                f"No rounds of {', '.join(without)} with so many workers and parameters were "
                "measured: there the link is as described."
            )
        return said


def fit_links(rows: Rows, names: Sequence[str], cluster: Cluster, parameters: float) -> FittedLinks:
    """Fit what was measured of a model of this size, on as many workers as the cluster has islands.

    rows: The rows; their method is the name of a recipe, or NAME-FORMAT with a wire format.

    Raises:
        ValueError: No row fits the plan, a group has too few rows, or a method has rows of one
            bandwidth only.
    """
    recipes = {row.group: _recipe_of(row.group, names, cluster) for row in rows.rows}
    of_plan = {
        group: found
        for group, found in recipes.items()
        if found
        and cluster.islands // found[1].after_merges[1] > 1  # A trainer's workers exchange.
        and math.isclose(group[2], parameters, rel_tol=SAME_SIZE)
    }
    measured = "; ".join(map(describe, recipes))
    require(
        bool(of_plan),
        f"--measured needs rows of the recipes of the plan ({', '.join(names)}, or NAME-FORMAT as "
        f"in {names[-1]}-int4) with workers = {cluster.islands}, the islands of the cluster, "
        f"and parameters = {parameters:.0f}, the size of the model, within {SAME_SIZE:.0%}; "
        f"measured were {measured}",
    )
    links: dict[str, list[FittedLink]] = {}
    own = replace(rows, rows=[row for row in rows.rows if row.group in of_plan])
    for group, calibration in calibrate(own).items():
        require(
            calibration.held_out_bandwidths is not None,
            f"a plan needs rows of at least two bandwidths, got one of {describe(group)}",
        )
        name, recipe = of_plan[group]
        recipe = on_all_ranks(recipe, cluster)
        workers = cluster.islands // recipe.after_merges[1]
        mine = [row for row in own.rows if row.group == group]
        bandwidths = [row.bits_per_second for row in mine]
        if recipe.switch.max_micro_batch == "auto":  # What fits is the largest that was measured.
            fits = max(1, max(cluster.samples_per_second) // ranks_of_island(recipe, cluster))
            recipe = replace(recipe, switch=replace(recipe.switch, max_micro_batch=fits))
        most = largest_pass(recipe, cluster)
        batch = trained_of(recipe.guards.initial, recipe, cluster, workers)
        samples = samples_of_islands(recipe, cluster, batch, workers)
        passes = cluster.passes(max(samples), most)
        every = {row.sync_every for row in mine}
        link = FittedLink(
            group=group,
            calibration=calibration,
            sync=exchange_of(recipe, group[2], workers, cluster, passes),
            step_seconds=cluster.step_seconds(samples, most),
            bandwidths=(min(bandwidths), max(bandwidths)),
            single=every.pop() if len(every) == 1 else 0.0,
        )
        links.setdefault(name, []).append(link)
    return FittedLinks(links=links)


def _recipe_of(group: Group, names: Sequence[str], cluster: Cluster) -> tuple[str, Recipe] | None:
    """The recipe of the plan that was measured, and its name; None if there is none."""
    method, workers, _ = group
    if workers != cluster.islands:
        return None
    if method in names:
        return method, build_recipe(read_values(method))
    name, _, wire = method.rpartition("-")
    if name not in names:
        return None
    try:
        return name, build_recipe(override(read_values(name), [("wire.format", wire)]))
    except ValueError as error:
        raise ValueError(f"method {method!r} of --measured: {error}") from error
