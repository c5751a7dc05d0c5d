"""Functions of torch whose names differ between the versions that adloco supports."""

from collections.abc import Callable

import torch.distributed as dist

all_gather_single: Callable[..., dist.Work | None]
reduce_scatter_single: Callable[..., dist.Work | None]
if hasattr(dist, "all_gather_single"):
    all_gather_single = dist.all_gather_single
    reduce_scatter_single = dist.reduce_scatter_single
else:  # torch 2.9 to 2.11. Newer versions still have these names, but warn of them.
    all_gather_single = dist.all_gather_into_tensor
    reduce_scatter_single = dist.reduce_scatter_tensor
