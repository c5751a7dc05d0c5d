"""Merge policies, a file each; `rules.merge` has their protocol."""
