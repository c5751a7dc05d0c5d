"""AdLoCo with a model, data and loss of your own.

python examples/own_model.py
"""

import torch

import adloco

x = torch.randn(4096, 8)
nn = torch.nn
outer = adloco.OuterOptimizer(lr=0.7, options={"momentum": 0.6, "nesterov": True})
guards = adloco.BatchGuards(initial=8, maximum=256)
run = adloco.AdLoCo(
    adloco.Problem(
        build_model=lambda: nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)),
        loss_fn=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        data=adloco.TensorSource(x, x.square().sum(1, keepdim=True), num_streams=8),
    ),
    adloco.Method(num_trainers=4, workers_per_trainer=2, sync_every=20),
    inner=adloco.InnerAdamW(lr=3e-3),
    syncing=adloco.Syncing(outer=outer),
    batching=adloco.Batching(rule=adloco.NormTest(eta=0.8), guards=guards),
    merging=adloco.Merging(policy=adloco.MergeSmallest(count=2, every=3)),
)
for report in run.rounds(15):
    print(
        report.round,
        round(report.train_loss, 3),
        [trainer.requested_batch for trainer in report.trainers],
        report.merges,
    )
