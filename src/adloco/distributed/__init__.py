"""Places workers and exchanges their tensors; only this package imports torch.distributed."""
