"""Leaves out of a sync workers whose pseudo-gradients are far from the others'."""
