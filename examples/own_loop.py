"""DiLoCo's outer step in a training loop of your own: four workers, `diloco.step()` after each
inner step. All three commands print the same numbers.

    python examples/own_loop.py
    torchrun --nproc-per-node 2 examples/own_loop.py
    torchrun --nproc-per-node 4 examples/own_loop.py
"""

import torch
from torch import nn

import adloco

NUM_WORKERS = 4


def main() -> None:
    placement = adloco.place(NUM_WORKERS)
    # All four in one process, two on each of two ranks, or one on each of four.
    here = placement.local(range(NUM_WORKERS))

    torch.manual_seed(0)
    inputs = torch.randn(4096, 8)
    targets = inputs.square().sum(1, keepdim=True)
    data = adloco.TensorSource(inputs, targets, num_streams=NUM_WORKERS)

    replicas = [nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)) for _ in here]
    optimizers = [torch.optim.AdamW(replica.parameters(), lr=3e-3) for replica in replicas]
    outer = adloco.OuterOptimizer(lr=0.7, options={"momentum": 0.6, "nesterov": True})
    diloco = adloco.DiLoCo(replicas, outer=outer, sync_every=20, placement=placement)

    for step in range(400):
        for worker, replica, optimizer in zip(here, replicas, optimizers, strict=True):
            x, y = data.read(worker, 16 * step, 16)
            loss = nn.functional.mse_loss(replica(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if diloco.step() and (step + 1) % 100 == 0:
            with torch.no_grad():
                loss = nn.functional.mse_loss(replicas[0](inputs), targets)
            between = placement.total_bytes().between
            if placement.is_rank_zero:
                print(
                    f"step {step + 1}: loss {loss.item():.3f}, "
                    f"{between / NUM_WORKERS / 1e3:.0f} kB sent per worker"
                )


if __name__ == "__main__":
    with adloco.process_group():
        main()
