"""The mean of the momentum of the workers' inner optimizers (DES-LOC, arXiv 2505.22549).

A worker's momentum remembers its own last gradients. A sync makes the parameters of a trainer's
workers equal, and this makes their momentum equal too.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from adloco.algorithms.worker import Worker
from adloco.distributed.codecs.codec import WireFormat
from adloco.distributed.comm.comm import Comm
from adloco.distributed.dtensor import in_memory_of
from adloco.errors import require

KEYS = {"momentum": "momentum_buffer", "betas": "exp_avg"}
"""The name of a momentum in an optimizer's state, by the setting that says that there is one: SGD's
and Muon's, and that of Adam and its kin."""


def check_momentum_syncs(optimizers: Sequence[torch.optim.Optimizer], every: int) -> None:
    """Raise ValueError if workers are to average momentum that their optimizers do not have."""
    require(
        every == 0 or any(map(_keys, optimizers)),
        "method.sync_momentum_every needs an inner optimizer with a momentum > 0 or with betas, "
        f"as SGD, AdamW and Muon, got {', '.join(type(each).__name__ for each in optimizers)}",
    )


@torch.no_grad()
def average_momentum(
    workers: Sequence[Worker], weights: Sequence[float], comm: Comm, codec: WireFormat | None
) -> None:
    """Set the momentum of a trainer's local workers to the mean over all of its workers.

    A worker without momentum (it has just started again) counts as one with zeros, and gets none.

    Args:
        workers: The local workers of the trainer.
        weights: Each one's share of the trainer's samples; over all ranks they add up to 1.
        comm: Reductions among all workers of the trainer.
        codec: Wire format of the momentum of SGD and Muon. That of Adam crosses uncompressed,
            because it is divided by roots of second moments, which may be close to 0.
    """
    if comm.num_workers == 1:
        return
    for key, wire in (("momentum_buffer", codec), ("exp_avg", None)):
        held = [list(_momenta(worker, key)) for worker in workers]
        given = [
            [torch.zeros_like(owner) if own is None else own for owner, own in entries]
            for entries in held
        ]
        means = comm.mean(given, weights, wire)
        for entries in held:
            for (_, own), mean in zip(entries, means, strict=True):
                if own is not None:
                    own.copy_(in_memory_of(mean, own))


def _keys(optimizer: torch.optim.Optimizer) -> set[str]:
    """Names of the momenta that an optimizer keeps."""
    return {
        key for name, key in KEYS.items() for group in optimizer.param_groups if group.get(name)
    }


def _momenta(worker: Worker, key: str) -> Iterator[tuple[Tensor, Tensor | None]]:
    """(parameter, its momentum) of each parameter that has a momentum of this name."""
    for optimizer in worker.optimizers:
        if key in _keys(optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield parameter, optimizer.state.get(parameter, {}).get(key)
