"""A worker's model on its ranks (one rank, DDP or FSDP2), gradient norms, and layers."""
