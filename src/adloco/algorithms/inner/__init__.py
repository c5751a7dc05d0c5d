"""Inner optimizers, which a worker uses between two syncs, one in each file."""
