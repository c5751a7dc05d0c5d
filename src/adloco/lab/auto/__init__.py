"""Chooses H, eta and n while a run trains, for the least time to a loss."""
