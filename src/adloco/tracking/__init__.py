"""Experiment trackers; `tracker` has their protocol, `with_accelerate` those of accelerate."""
