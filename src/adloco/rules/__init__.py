"""What to do: pure decisions over plain numbers. Nothing in here imports torch."""
