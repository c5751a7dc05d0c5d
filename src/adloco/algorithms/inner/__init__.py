"""Inner optimizers: what a worker steps with between two syncs, a file each."""
