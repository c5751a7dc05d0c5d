"""Reductions among workers, with one entry for each local worker, and their statistics."""
