"""Where workers live and how they reach one another. The only room that imports torch.distributed."""
