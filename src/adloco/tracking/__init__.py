"""Experiment trackers, one file each; `tracker` has their protocol."""
