"""Traffic between the workers of a recipe in a round."""

from adloco.config.sections import Recipe
from adloco.distributed.traffic import ring
from adloco.distributed.wire.wire_format import WireFormat, bytes_per_value
from adloco.plan.candidates import islands_of_copy
from adloco.plan.cluster import Cluster
from adloco.plan.gradient_buckets import Buckets
from adloco.plan.round_time import Sync

OF_A_STEP = 2
"""Exchanges of a step of data-parallel training: gradients, then losses and norms."""


def exchange_of(
    recipe: Recipe, parameters: float, workers: int, cluster: Cluster, passes: int = 1
) -> Sync:
    """The sync of a round, or of a step of data-parallel training.

    Args:
        workers: Workers that exchange with one another.
        passes: Micro-batches of a step on each rank.
    """
    if recipe.data_parallel:
        across = islands_of_copy(recipe, cluster)
        each = 2 if recipe.model_options.dtype == "bf16" else 4
        gradients = each * parameters
        # Every pass gathers parameters twice among these islands and scatters gradients once, and
        # a step sums up the gradients of all copies.
        sent = gradients * (1.5 * ring(across) * passes + ring(workers // across) / across)
        whole = recipe.placement.shard_size == 1
        buckets = Buckets.of(gradients, passes) if whole else None
        return Sync(workers=workers, bytes_sent=sent, exchanges=OF_A_STEP, buckets=buckets)
    sent = bytes_of_mean(recipe.wire_format, parameters, workers)
    streaming = recipe.streaming
    return Sync(workers=workers, bytes_sent=sent, fragments=streaming.fragments, tau=streaming.tau)


def bytes_of_mean(wire: WireFormat | None, parameters: float, workers: int) -> float:
    """Bytes that leave each worker for a mean over all of them; wire None: in float32."""
    return ring(workers) * bytes_per_value(wire) * parameters
