"""A whole run: recipe, data, model, task, records, checkpoints, reports."""
