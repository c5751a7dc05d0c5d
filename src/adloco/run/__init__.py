"""A run and its folder: what it needs before the first round, its loop, records, checkpoints,
trackers.
"""
