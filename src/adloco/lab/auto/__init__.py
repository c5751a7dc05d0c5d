"""Chooses H while a run trains, for the least time to a loss."""
