"""Measures how far the gradients of batches are from the full gradient, at a checkpoint."""
