"""DiLoCo's outer step in a loop written with accelerate: every process is a worker, and between
syncs nothing is exchanged.

    # One worker: the outer step acts on its own steps.
    python examples/accelerate_loop.py
    # Two workers; `accelerate launch` sets the same variables.
    torchrun --nproc-per-node 2 examples/accelerate_loop.py

Two lines differ from a data-parallel script. First, `Accelerator.prepare` would wrap the model in
DDP, which averages gradients over all processes at every step; `prepare_model(...,
evaluation_mode=True)` skips the wrapper and does the rest (device, mixed precision, compilation;
the model trains as usual). Second, `diloco.step()` follows each optimizer step (with gradient
accumulation: `if accelerator.sync_gradients:`).
"""

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import adloco

STEPS, SYNC_EVERY = 200, 20


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))


def make_loader() -> DataLoader[tuple[Tensor, ...]]:
    inputs = torch.randn(4096, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    return DataLoader(data, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(0))


def make_outer() -> adloco.OuterOptimizer:
    return adloco.OuterOptimizer(lr=0.7, options={"momentum": 0.6, "nesterov": True})


def apart(accelerator: Accelerator, model: nn.Module) -> float:
    """The largest difference of any parameter between a worker and the first one."""
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyone: Tensor = accelerator.gather(flat[None])
    return float((everyone - everyone[0]).abs().max())


def main() -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = accelerator.prepare_model(make_model(), evaluation_mode=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # The loader distributes its batches over the processes: each worker has its own.
    optimizer, loader = accelerator.prepare(optimizer, make_loader())
    num_workers = accelerator.num_processes
    placement = adloco.place(num_workers, accelerator.device.type)
    diloco = adloco.DiLoCo(model, outer=make_outer(), sync_every=SYNC_EVERY, placement=placement)

    step = 0
    while step < STEPS:
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()
            step += 1
            if step % 100 in (90, 0):
                accelerator.print(
                    f"step {step}: loss {loss.item():.2f}, "
                    f"workers {apart(accelerator, model):.1e} apart"
                )
            if step == STEPS:
                break
    total = sum(parameter.detach().double().sum().item() for parameter in model.parameters())
    accelerator.print(
        f"{num_workers} workers, {STEPS // SYNC_EVERY} syncs: sum of all parameters {total:.5f}"
    )


if __name__ == "__main__":
    with adloco.process_group():
        main()
