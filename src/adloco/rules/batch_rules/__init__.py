"""Batch rules: how many samples a trainer asks for. A file each; `batch_rule` has their protocol."""
