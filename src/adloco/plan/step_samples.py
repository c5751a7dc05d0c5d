"""Samples of an inner step of a recipe on the islands of a cluster, and of its largest pass."""

import math

from adloco.config.sections import Recipe
from adloco.plan.candidates import ranks_of_island, smallest_worker_batch
from adloco.plan.cluster import Cluster
from adloco.rules.shares import proportional


def largest_pass(recipe: Recipe, cluster: Cluster) -> int:
    """Most samples of an island in one pass."""
    return ranks_of_island(recipe, cluster) * recipe.switch.b_max


def trained_of(requested: float, recipe: Recipe, cluster: Cluster, workers: int) -> int:
    """Samples of an inner step that a trainer with so many workers takes of its request."""
    # What does not fit in one pass may be clipped. Data-parallel training is one worker with a rank
    # on each island.
    ranks = ranks_of_island(recipe, cluster)
    trained = recipe.switch.clipped(math.ceil(requested), workers, ranks)
    return max(workers * smallest_worker_batch(recipe, cluster), trained)


def samples_of_islands(recipe: Recipe, cluster: Cluster, batch: int, workers: int) -> list[float]:
    """Samples of each island in an inner step.

    In data-parallel training it is as if each of its ranks had as many as the one with the most,
    which all wait for. Speeds are taken for those that a run measures; its shares are then in
    proportion to them.

    Args:
        batch: Samples of a trainer, over all its workers.
        workers: Workers of a trainer.
    """
    ranks = ranks_of_island(recipe, cluster)
    if recipe.data_parallel:
        return [float(ranks * math.ceil(batch / (cluster.islands * ranks)))] * cluster.islands
    speeds = dict(enumerate(cluster.all_speeds))
    return [
        float(share)
        for first in range(0, cluster.islands, workers)
        for share in proportional(
            batch,
            recipe.shares.weights(range(first, first + workers), speeds),
            minimum=smallest_worker_batch(recipe, cluster),
            maximum=recipe.switch.most_per_worker(batch, workers, ranks),
        )
    ]
