"""Tasks: how a model, a batch and a loss come together."""
