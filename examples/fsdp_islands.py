"""AdLoCo with your model, loss and data on islands of two ranks; each island shards the models of
its workers (FSDP2).

    # Two islands of two shards, with two workers each.
    torchrun --nproc-per-node 4 examples/fsdp_islands.py
    # One island with all four workers: the same numbers.
    torchrun --nproc-per-node 2 examples/fsdp_islands.py
"""

import torch
from torch import Tensor, nn

import adloco

NUM_TRAINERS, WORKERS_PER_TRAINER = 2, 2


class Residual(nn.Module):
    """A residual network. FSDP2 gathers and frees the blocks of its ModuleList one by one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))
        self.last = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = self.first(x)
        for block in self.blocks:
            state = state + block(state)
        output: Tensor = self.last(state)
        return output


def main() -> None:
    inputs = torch.randn(8192, 8, generator=torch.Generator().manual_seed(0))
    targets = inputs.square().sum(1, keepdim=True)
    num_workers = NUM_TRAINERS * WORKERS_PER_TRAINER
    run = adloco.AdLoCo(
        adloco.Problem(
            build_model=Residual,
            loss_fn=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
            data=adloco.TensorSource(inputs, targets, num_streams=num_workers),
        ),
        adloco.Method(
            num_trainers=NUM_TRAINERS, workers_per_trainer=WORKERS_PER_TRAINER, sync_every=20
        ),
        inner=adloco.InnerAdamW(lr=3e-3),
        syncing=adloco.Syncing(
            outer=adloco.OuterOptimizer(lr=0.7, options={"momentum": 0.6, "nesterov": True})
        ),
        batching=adloco.Batching(
            rule=adloco.NormTest(eta=0.8),
            guards=adloco.BatchGuards(initial=32, minimum=16, maximum=256),
            switch=adloco.SwitchMode(max_micro_batch=64, mode="always"),
        ),
        merging=adloco.Merging(policy=adloco.MergeSmallest(count=2, every=2, first_round=2)),
        placement=adloco.place(num_workers, shard_size=2),
    )
    for report in run.rounds(5):
        if run.placement.is_rank_zero:
            requests = [trainer.requested_batch for trainer in report.trainers]
            sent = (
                f"{report.bytes_communicated / 1e3:.0f} kB between islands, "
                f"{report.bytes_inside / 1e6:.1f} MB inside"
            )
            print(
                f"round {report.round}: loss {report.train_loss:.3f}, batches {requests}, "
                f"{sent}, merges {len(report.merges)}"
            )


if __name__ == "__main__":
    with adloco.process_group():
        main()
