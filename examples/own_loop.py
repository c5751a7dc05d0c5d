"""DiLoCo's outer step in a training loop of your own: two replicas, `diloco.step()` after each inner step.

python examples/own_loop.py
"""

import torch
from torch import nn

import adloco

torch.manual_seed(0)
inputs = torch.randn(4096, 8)
targets = inputs.square().sum(1, keepdim=True)
data = adloco.TensorSource(inputs, targets, num_streams=2)

replicas = [nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)) for _ in range(2)]
optimizers = [torch.optim.AdamW(replica.parameters(), lr=3e-3) for replica in replicas]
outer = adloco.OuterOptimizer(lr=0.7, options={"momentum": 0.6, "nesterov": True})
diloco = adloco.DiLoCo(replicas, outer=outer, sync_every=20)

for step in range(400):
    for worker, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
        x, y = data.read(worker, 16 * step, 16)
        loss = nn.functional.mse_loss(replica(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if diloco.step() and (step + 1) % 100 == 0:
        with torch.no_grad():
            loss = nn.functional.mse_loss(replicas[0](inputs), targets)
        print(f"step {step + 1}: loss {loss.item():.3f}, {diloco.traffic.bytes / 2 / 1e3:.0f} kB sent per worker")
