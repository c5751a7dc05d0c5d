"""Ranks and machines that fail, and return, while the others train: README.md has a page on it."""
