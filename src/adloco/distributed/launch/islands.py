"""Divides ranks into islands, each of which serves one or more workers."""

MOST_RANKS = 1 << 16
"""Larger numbers of ranks are not proposed."""
CHOICES_SHOWN = 6
"""Number of possible rank counts that an error names, the nearest ones."""


def island_shape(
    count: int, num_workers: int, shard_size: int, replica_size: int
) -> tuple[int, int]:
    """The shape of each island.

    Args:
        count: Number of ranks.
        num_workers: Number of workers.
        shard_size: Ranks over which a worker is sharded. 0: as many as there are for each worker.
        replica_size: Replicas of each shard. 0: as many as there are for each worker.

    Returns:
        (shards, replicas).

    Raises:
        ValueError: That many ranks cannot share the workers in islands of these sizes.
    """
    shape = _shape(count, num_workers, shard_size, replica_size)
    if shape is None:
        most = (
            num_workers
            * max(shard_size, 1)
            * max(replica_size, 1)
            * (1 if shard_size and replica_size else max(4, count))
        )
        possible = [
            ranks
            for ranks in range(1, min(most, MOST_RANKS) + 1)
            if _shape(ranks, num_workers, shard_size, replica_size)
        ]
        nearest = sorted(sorted(possible, key=lambda ranks: abs(ranks - count))[:CHOICES_SHOWN])
        workers = f"{num_workers} workers" if num_workers > 1 else "1 worker"
        sizes = (
            f" with placement.shard_size {shard_size} and placement.replica_size {replica_size}"
            if (shard_size, replica_size) != (1, 1)
            else ""
        )
        advice = f"start {' or '.join(map(str, nearest))} ranks" if nearest else "lower these sizes"
        raise ValueError(
            f"{count} ranks cannot share {workers}{sizes}; {advice}, or ask for more workers"
        )
    return shape


def _shape(
    count: int, num_workers: int, shard_size: int, replica_size: int
) -> tuple[int, int] | None:
    spare = max(1, count // (num_workers * max(shard_size, replica_size, 1)))
    shards, replicas = shard_size or spare, replica_size or spare
    fits = (
        count >= 1
        and count % (shards * replicas) == 0
        and count // (shards * replicas) <= num_workers
    )
    return (shards, replicas) if fits else None
