"""Kinds of tasks: the settings of each, in a file each. No torch is imported."""
