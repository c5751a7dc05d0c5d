"""Candidates of a plan: recipes on a cluster, with the settings that trade data against traffic.

Each candidate is a recipe that `adloco train` can run. A worker has an island of its own; settings
that change nothing for a recipe (the wire format of data-parallel training) give no candidates.
Micro-batches are those of the fastest pass that was measured on the cluster, unless
`switch.max_micro_batch` is given: a recipe's own fit another machine.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from adloco.algorithms.optimizers import OuterMean
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.sections import Recipe
from adloco.distributed.placement.islands import island_shape
from adloco.errors import require
from adloco.plan.cluster import Cluster
from adloco.rules.batch_rules.constant import ConstantBatch
from adloco.rules.batch_rules.norm_test import NormTest
from adloco.rules.switch import smallest_share

AXES: Mapping[str, tuple[str, ...]] = {
    "method.sync_every": ("10", "20", "50", "100", "200", "500"),
    "wire.format": ("fp32", "int8", "int4", "int2", "int1"),
    "batch.eta": ("0.5", "0.7", "1.0", "1.5", "2.0", "3.5"),
}
"""Values that are tried where none are given."""
BATCHES = (1, 2, 4, 8)
"""Constant batches that are tried where none are given, as multiples of the recipe's own."""
TAUS = ("0", "1", "2", "4", "8")
"""Inner steps in flight that are tried where fragments are given without them."""
OF_SYNCS = ("method.sync_every", "wire.", "streaming.", "outer.", "merge.")
"""Settings that change nothing where workers never sync, except the next ones."""
OF_OUTER_STEPS = ("method.sync_every", "outer.")
"""Settings that also change a lone worker, if it takes outer steps."""
OF_TRAINERS = ("method.num_trainers", "method.workers_per_trainer")
"""Settings that data-parallel training lacks: it is one worker over all islands."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A recipe with some settings, on a cluster."""

    name: str
    """The recipe's name or file, as given."""
    settings: tuple[tuple[str, str], ...]
    """(section.key, value) of the axes on which candidates differ."""
    recipe: Recipe

    @property
    def label(self) -> str:
        """The candidate in words, for instance `diloco, sync_every 50, format int4`."""
        words = [f"{name.rpartition('.')[2]} {value}" for name, value in self.settings]
        return ", ".join([self.name, *words])


def candidates(
    names: Sequence[str],
    settings: Sequence[tuple[str, str]],
    cluster: Cluster,
    *,
    try_batches: bool = False,
) -> list[Candidate]:
    """All candidates.

    Args:
        names: Recipes, by name or file.
        settings: (section.key, value); a key with several values is an axis.
        try_batches: True to try `BATCHES` of recipes with a constant batch.

    Raises:
        ValueError: A recipe or a setting is wrong, a recipe's trainers do not divide the islands,
            or no candidate is left.
    """
    given: dict[str, list[str]] = {}
    for key, value in settings:
        given.setdefault(key, []).append(value)
    axes: dict[str, Sequence[str]] = {**AXES, **given}
    if {*given.get("streaming.fragments", "1")} != {"1"}:
        axes.setdefault("streaming.tau", TAUS)
    found = [
        candidate
        for name in names
        for candidate in _of_recipe(name, axes, given, cluster, try_batches)
    ]
    require(
        bool(found),
        "no candidate is left: streaming.fragments must be at most method.sync_every, "
        "streaming.tau less than their quotient and 0 in a bf16 model, eta of a plug-in norm test "
        "less than 1, and placement's shards and replicas must fit on islands of so many ranks",
    )
    return found


def _of_recipe(
    name: str,
    axes: Mapping[str, Sequence[str]],
    given: Collection[str],
    cluster: Cluster,
    try_batches: bool,
) -> list[Candidate]:
    rules = axes.get("batch.rule", [""])
    # Other rules may need settings of their own, which are not given here. A class of the user's
    # own may be one of these two.
    kinds = [
        build_recipe(override(read_values(name), [("batch.rule", rule)] if rule else []))
        for rule in rules
        if rule in ("", ConstantBatch.key, NormTest.key) or ":" in rule
    ]
    require(
        len(kinds) == len(rules)
        and all(isinstance(kind.batch, ConstantBatch | NormTest) for kind in kinds),
        f"batch.rule of a plan must be constant or norm-test, whose batches it knows; {name} has "
        "another one",
    )
    plain = kinds[0]
    require(
        plain.data_parallel or plain.syncs or cluster.islands == 1,
        f"{name} trains one worker that never syncs, so it takes one island; leave it out, or give "
        "a cluster with islands = 1",
    )
    syncs = not plain.data_parallel and cluster.islands > 1
    kept = () if isinstance(plain.outer, OuterMean) else OF_OUTER_STEPS
    mine = {
        key: values
        for key, values in axes.items()
        if (syncs or not key.startswith(OF_SYNCS) or (key in given and key.startswith(kept)))
        and not (plain.data_parallel and key in OF_TRAINERS)
        and (key != "batch.eta" or any(isinstance(kind.batch, NormTest) for kind in kinds))
    }
    if try_batches and isinstance(plain.batch, ConstantBatch) and "batch.initial" not in mine:
        mine["batch.initial"] = [str(times * plain.guards.initial) for times in BATCHES]
    several_fragments = len(mine.get("streaming.fragments", ())) > 1
    found = []
    for values in itertools.product(*mine.values()):
        point = dict(zip(mine, values, strict=True))
        if recipe := _on_cluster(name, point, cluster, several_fragments):
            varied = tuple((key, value) for key, value in point.items() if len(mine[key]) > 1)
            found.append(Candidate(name=name, settings=varied, recipe=recipe))
    return found


def _on_cluster(
    name: str, point: Mapping[str, str], cluster: Cluster, several_fragments: bool
) -> Recipe | None:
    """The recipe with a worker on each island, those included that a run of it has dropped.

    A batch that is too small for its workers becomes the smallest that they can take.

    Returns:
        None if fragments do not fit into the recipe's rounds, if a whole model is to be in flight
        although it is one of several numbers of fragments, if a bf16 model is to be in flight (a
        run refuses it), if the norm test holds no batch, or if shards do not fit on the islands.
    """
    first = build_recipe(override(read_values(name), list(point.items())))
    refused = first.streaming.mixes and first.model_options.dtype == "bf16"
    if refused or not _shards_fit(first, cluster):
        return None
    if "placement.replica_size" not in point:
        first = on_all_ranks(first, cluster)
    if point.get("switch.max_micro_batch", "auto") == "auto":
        ranks = ranks_of_island(first, cluster)
        # A run refuses micro-batches that are too small for what its batch rule compares.
        smallest = math.ceil(smallest_worker_batch(first, cluster) / ranks)
        measured = max(smallest, cluster.fastest_pass // ranks)
        first = replace(first, switch=replace(first.switch, max_micro_batch=measured))
    rule = first.batch
    if isinstance(rule, NormTest) and rule.estimator == "plug-in" and rule.eta >= 1:
        return None
    if first.data_parallel:
        return first
    streaming = first.streaming
    whole_in_flight = streaming.fragments == 1 and streaming.tau > 0
    too_short = first.method.sync_every < streaming.fewest_steps
    if too_short or (whole_in_flight and several_fragments):
        return None
    trainers = first.method.num_trainers
    require(
        cluster.islands % trainers == 0,
        f"{name} has {trainers} trainers, which do not divide {cluster.islands} islands evenly; "
        f"give --method.num_trainers",
    )
    workers = cluster.islands // trainers
    batch = max(first.guards.initial, workers * smallest_worker_batch(first, cluster))
    return replace(
        first,
        method=replace(first.method, workers_per_trainer=workers, dropped=()),
        guards=replace(first.guards, initial=batch, maximum=max(batch, first.guards.maximum)),
    )


def on_all_ranks(recipe: Recipe, cluster: Cluster) -> Recipe:
    """The recipe with as many replicas as use all ranks of an island, unless it has its own: what
    was measured of an island is that of all its ranks.
    """
    shape = recipe.placement
    copies, rest = divmod(cluster.ranks, shape.shard_size or cluster.ranks or 1)
    if copies < 2 or rest or shape.replica_size != 1 or recipe.data_parallel:
        return recipe
    return replace(recipe, placement=replace(shape, replica_size=copies))


def check_fragments(found: Sequence[Candidate], layers: int) -> None:
    """Raise ValueError if a candidate cuts a model of so many layers into more fragments."""
    most = max(candidate.recipe.streaming.fragments for candidate in found)
    require(
        most <= layers,
        f"streaming.fragments must be <= {layers}, the layers of this model, got {most}",
    )


def smallest_worker_batch(recipe: Recipe, cluster: Cluster) -> int:
    """The fewest samples of an island in an inner step: every rank takes at least one."""
    ranks = ranks_of_island(recipe, cluster)
    if recipe.data_parallel:
        return ranks
    return max(ranks, smallest_share(recipe.batch.fewest_groups, ranks))


def ranks_of_island(recipe: Recipe, cluster: Cluster) -> int:
    """Ranks of an island. Of data-parallel training they are those that were measured, if they
    are known.
    """
    shards, replicas = recipe.placement.shard_size, recipe.placement.replica_size
    if recipe.data_parallel:
        least = -(-max(1, shards) * max(1, replicas) // cluster.islands)
        return cluster.ranks or least
    if shards and replicas:
        return shards * replicas
    return max(1, cluster.ranks, shards, replicas)  # All ranks of the island.


def shards_of_worker(recipe: Recipe, cluster: Cluster) -> int:
    """Neighbouring ranks over which a worker is sharded: of its island, or in data-parallel
    training, which is one worker, of all islands.

    Raises:
        ValueError: The ranks cannot be divided so.
    """
    ranks = ranks_of_island(recipe, cluster) * (cluster.islands if recipe.data_parallel else 1)
    shape = recipe.placement
    return island_shape(ranks, 1, shape.shard_size, shape.replica_size)[0]


def _shards_fit(recipe: Recipe, cluster: Cluster) -> bool:
    """True if ranks can be divided into shards and replicas, and no copy of the model has a part of
    an island.
    """
    ranks = ranks_of_island(recipe, cluster)
    try:
        shards = shards_of_worker(recipe, cluster)
    except ValueError:
        return False
    return ranks % shards == 0 or shards % ranks == 0


def islands_of_copy(recipe: Recipe, cluster: Cluster) -> int:
    """Islands that have one copy of the model together, in shards; 1 if each has a whole one."""
    return max(1, shards_of_worker(recipe, cluster) // ranks_of_island(recipe, cluster))
