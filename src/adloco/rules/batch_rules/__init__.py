"""Batch rules: how many samples a trainer requests. `batch_rule` has their protocol."""
