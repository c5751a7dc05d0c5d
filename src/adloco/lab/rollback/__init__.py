"""Spikes of the loss: named, and undone if wanted."""
