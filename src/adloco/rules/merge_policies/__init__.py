"""Merge policies, one in each file; `rules.merge` has their protocol."""
