"""Divides ranks into islands, each of which serves one or more workers."""


def island_of(place: int, places: int, islands: int) -> int:
    """The island, from 0, that has this one of several workers or streams: neighbours share one,
    and islands have equally many, as far as possible.
    """
    return place * islands // places


def island_shape(
    count: int, num_workers: int, shard_size: int, replica_size: int
) -> tuple[int, int]:
    """(shards, replicas) of each island of so many ranks.

    Args:
        shard_size: Ranks over which a worker is sharded. 0: as many as there are for each worker.
        replica_size: Replicas of each shard. 0: as many as there are for each worker.

    Raises:
        ValueError: That many ranks cannot share the workers in islands of these sizes.
    """
    fixed = max(shard_size, 1) * max(replica_size, 1)
    most = num_workers * fixed
    spare = max(1, count // most)
    shards, replicas = shard_size or spare, replica_size or spare
    size = shards * replicas
    if count % size == 0 and count // size <= num_workers:
        return shards, replicas
    sizes = (
        f" with placement.shard_size {shard_size} and placement.replica_size {replica_size}"
        if (shard_size, replica_size) != (1, 1)
        else ""
    )
    if 0 in (shard_size, replica_size):
        possible = f"a multiple of {most} ranks"
    else:
        possible = f"at most {most} rank{'s' * (most > 1)}"
        possible += f", a multiple of {fixed}" if fixed > 1 else ""
    several, left = divmod(count, num_workers)
    possible += ", or ask for more workers"
    if fixed == 1 and not left:
        possible += f", or for {several} ranks of each by placement.replica_size or shard_size"
    raise ValueError(
        f"{count} rank{'s' * (count != 1)} cannot share {num_workers} "
        f"worker{'s' * (num_workers != 1)}{sizes}; start {possible}"
    )
