"""Experiment trackers, a file each; `tracker` has their protocol."""
