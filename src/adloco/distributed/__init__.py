"""Where workers live and how they exchange tensors; only this package imports torch.distributed."""
