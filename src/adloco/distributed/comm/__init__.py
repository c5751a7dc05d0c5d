"""Reductions with one entry per local worker, and what they count."""
