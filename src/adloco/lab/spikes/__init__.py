"""Spikes of the loss, named."""
