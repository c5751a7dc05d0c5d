"""A Lightning Trainer whose processes are DiLoCo workers: the outer step is a callback.

    # One worker: the outer step acts on its own steps.
    python examples/lightning_trainer.py
    # Two workers that sync every SYNC_EVERY optimizer steps.
    torchrun --nproc-per-node 2 examples/lightning_trainer.py

The Trainer distributes samples over the processes, as it does for DDP, but DDP must not average
gradients over them at every step. So DDP gets a process group that has this process alone.
"""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import adloco

STEPS, SYNC_EVERY = 200, 20


class OuterSync(Callback):
    """Counts the Trainer's optimizer steps, not its micro-batches."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        # Here and not earlier: the Trainer has loaded a resumed module's checkpoint by now.
        placement = adloco.place(trainer.world_size, module.device.type)
        self.diloco = adloco.DiLoCo(
            module, outer=make_outer(), sync_every=SYNC_EVERY, placement=placement
        )
        self.steps = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: object) -> None:
        if trainer.global_step > self.steps:
            self.steps = trainer.global_step
            self.diloco.step()
            if self.steps % 100 in (90, 0):
                flat = torch.cat([each.detach().flatten() for each in module.parameters()])
                everyone: Tensor = module.all_gather(flat).view(-1, len(flat))
                spread = (everyone - everyone[0]).abs().max().item()
                trainer.print(f"step {self.steps}: workers {spread:.1e} apart")


class Squares(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))


def make_data() -> TensorDataset:
    inputs = torch.randn(16 * STEPS, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.square().sum(1, keepdim=True))


def make_outer() -> adloco.OuterOptimizer:
    return adloco.OuterOptimizer(lr=0.7, options={"momentum": 0.6, "nesterov": True})


def main() -> None:
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    strategy = "auto"
    if ranks > 1:
        group, _ = torch.distributed.new_subgroups(group_size=1)
        strategy = DDPStrategy(process_group=group)
    trainer = Trainer(
        strategy=strategy,
        devices=ranks,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        callbacks=[OuterSync()],
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Squares()
    trainer.fit(module, DataLoader(make_data(), batch_size=16))
    total = sum(each.detach().double().sum().item() for each in module.parameters())
    trainer.print(
        f"{ranks} workers, {STEPS // SYNC_EVERY} syncs: sum of all parameters {total:.5f}"
    )


if __name__ == "__main__":
    with adloco.process_group():
        main()
