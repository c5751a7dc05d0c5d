"""Predicts a candidate's steps, syncs, bytes, seconds, memory and price on a cluster."""

import math
from dataclasses import dataclass, replace

import torch

from adloco.algorithms.inner.sgd import InnerSGD
from adloco.algorithms.optimizers import OuterOptimizer
from adloco.config.sections import Recipe
from adloco.plan.candidates import Candidate, ranks_of_island, shards_of_worker
from adloco.plan.cluster import Cluster
from adloco.plan.exchange import bytes_of_mean, exchange_of
from adloco.plan.fitted_link import FittedLinks
from adloco.plan.round_time import RoundTime, mean_round
from adloco.plan.step_samples import largest_pass, samples_of_islands, trained_of
from adloco.plan.target import Target
from adloco.rules.batch_rules.norm_test import NormTest
from adloco.rules.merge_policies.timed import TimedMerge
from adloco.run.opened import ADAMW_MOMENTS, copies_of_worker, outer_copies, residual_copies


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Parameters, sample length and noise scale of a training."""

    parameters: float
    tokens_per_sample: int
    noise_scale: float | None
    """B = S / |G|^2 in samples; None if it is not known."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A candidate's costs until the target."""

    candidate: Candidate
    batch: float
    """Samples of an inner step, over all workers of a trainer."""
    tokens: float
    inner_steps: float
    syncs: float
    bytes_sent: float
    """Bytes that leave each island."""
    step_seconds: tuple[float, ...]
    """Mean seconds of an inner step of each island."""
    workers: int
    """Workers that sync with one another."""
    round: RoundTime
    """Mean seconds of a round, or of a step of data-parallel training."""
    seconds: float
    loss: float | None
    """After these tokens; None if it is not predicted."""
    memory_bytes: float
    """Parameters, gradients, optimizer states and global parameters of an island, without
    activations."""
    price: float
    """Price of all islands until then."""
    spread: tuple[float, float] | None = None
    """Times its tokens, least and most, between which 90% of the laws of the target are; steps,
    syncs, bytes, seconds and price follow the tokens, but for what is sent beside syncs. None if it
    is not known."""

    @property
    def reachable(self) -> bool:
        """True if the target can be reached."""
        return math.isfinite(self.seconds)

    @property
    def varies(self) -> bool:
        """True if its spread is known and reaches further than half a percent."""
        return self.spread is not None and not (0.995 < self.spread[0] <= self.spread[1] < 1.005)


def predict(
    candidate: Candidate,
    workload: Workload,
    cluster: Cluster,
    target: Target,
    measured: FittedLinks | None = None,
) -> Prediction:
    """Predicts the costs of a candidate until the target.

    AdLoCo is taken after its last merge: one trainer with all workers, if it merges.

    measured: What measured rounds say about the link; None: it is as the cluster says.

    Raises:
        ValueError: The norm test's batch follows the noise scale, which is not known.
    """
    recipe = candidate.recipe
    workers, trainers = _workers(recipe, cluster)
    batch = trained_batch(candidate, workload, cluster)
    tokens = target.tokens(recipe, batch)
    steps = tokens / workload.tokens_per_sample / batch / trainers
    # The last round of a run is cut short, and ends in a sync like the others.
    every = 1 if recipe.data_parallel else min(recipe.mean_sync_every, max(1.0, steps))
    samples = samples_of_islands(recipe, cluster, int(batch), workers)
    most = largest_pass(recipe, cluster)
    passes = cluster.passes(max(samples), most)
    sync = exchange_of(recipe, workload.parameters, workers, cluster, passes)
    if link := measured.link_of(candidate.name, sync) if measured else None:
        cluster = link.applied(cluster)
        sync = link.hiding(sync, every)
    step_seconds = cluster.step_seconds(samples, most)
    found = mean_round(cluster, step_seconds, every, sync)
    syncs = steps / every if workers > 1 else 0.0
    in_merges = _bytes_of_merges(recipe, workload, workers, trainers)
    seconds = steps / every * found.total + in_merges / cluster.link.bytes_per_second
    return Prediction(
        candidate=candidate,
        batch=batch,
        tokens=tokens,
        inner_steps=steps,
        syncs=syncs,
        bytes_sent=syncs * sync.bytes_sent + in_merges,
        step_seconds=step_seconds,
        workers=workers,
        round=found,
        seconds=seconds,
        memory_bytes=memory_of_island(recipe, workload.parameters, cluster),
        loss=target.loss(recipe, batch, tokens) if target.loss else None,
        price=seconds / 3600 * cluster.islands * cluster.price_per_hour,
    )


def with_spread(found: Prediction, target: Target) -> Prediction:
    """The prediction with its `spread`, which takes longer than all the rest."""
    recipe, tokens = found.candidate.recipe, found.tokens
    between = target.interval(recipe, found.batch) if target.interval else None
    if not between or not math.isfinite(tokens):
        return found
    return replace(found, spread=(between[0] / tokens, between[1] / tokens))


def _workers(recipe: Recipe, cluster: Cluster) -> tuple[int, int]:
    """(workers that sync with one another, trainers) after the last merge."""
    return (cluster.islands, 1) if recipe.data_parallel else recipe.after_merges


def trained_batch(candidate: Candidate, workload: Workload, cluster: Cluster) -> float:
    """Samples of an inner step that are trained, over all workers of a trainer; errors are those of
    `predict`.
    """
    recipe, rule = candidate.recipe, candidate.recipe.batch
    workers, _ = _workers(recipe, cluster)
    wanted = float(recipe.guards.initial)
    if isinstance(rule, NormTest):
        if workload.noise_scale is None:
            raise ValueError(
                f"the batch of {candidate.name} follows the noise scale, which is not known; give "
                "--noise-scale, or --runs with runs that measured it"
            )
        # The plug-in form counts the batch's own noise as gradient.
        held = 1 / rule.eta**2 - (rule.estimator == "plug-in")
        requested = workload.noise_scale * held
        wanted = min(max(requested, recipe.guards.minimum), recipe.guards.maximum)
    return float(trained_of(wanted, recipe, cluster, workers))


def _bytes_of_merges(recipe: Recipe, workload: Workload, workers: int, trainers: int) -> float:
    """Bytes that leave each worker in merges.

    Every merge counts as if all workers took part, which those of the last one do; earlier ones
    send less.
    """
    if recipe.data_parallel:
        return 0.0
    syncing, parameters = recipe.syncing, workload.parameters
    each = bytes_of_mean(syncing.parameter_wire, parameters, workers)
    momentum = isinstance(recipe.outer, OuterOptimizer) and recipe.outer.options.get("momentum", 0)
    if momentum and recipe.fates.outer_momentum == "weighted":
        each += bytes_of_mean(syncing.momentum_wire, parameters, workers)
    # A policy of the user's own is taken to merge two.
    absorbed = recipe.merge.count - 1 if isinstance(recipe.merge, TimedMerge) else 1
    merges = math.ceil((recipe.method.num_trainers - trainers) / absorbed)
    return merges * each


def memory_of_island(recipe: Recipe, parameters: float, cluster: Cluster) -> float:
    """Bytes of an island's devices; what `outer.on_host` keeps beside them is not counted.

    Optimizers other than SGD count as AdamW, like in the check before a run: Muon trains embeddings
    and vectors with it, and their part of the model is not known here.
    The ranks of a sharded worker have its tensors together, and each replica has all of them.
    """
    device = torch.device("cuda")
    each = 2 if recipe.model_options.dtype == "bf16" else 4
    copies: float = copies_of_worker(recipe)
    if isinstance(recipe.inner, InnerSGD):
        copies += bool(recipe.inner.momentum) - ADAMW_MOMENTS
    copies += outer_copies(recipe, device) + residual_copies(recipe, 1, device)
    replicas = ranks_of_island(recipe, cluster) / shards_of_worker(recipe, cluster)
    return each * parameters * replicas * copies
