"""Where it lives: tensors, reductions, threads and gradient statistics. The only layer that may import torch.distributed or know DTensor."""
