"""Batch rules: how many samples a trainer asks for. `batch_rule` has their protocol."""
