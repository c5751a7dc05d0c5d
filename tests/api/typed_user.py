"""A user's file, which `make check` type-checks with the package: names and types of the public API
reach checkers and editors although the package imports them late. Nothing runs it.

A line with `type: ignore` must be an error: strict mode refuses ignores without one.
"""

from typing import Any, assert_type

import torch

import adloco

run = adloco.train("diloco", tokens="10k", **{"method.sync_every": 50, "wire.format": "int4"})
assert_type(run, adloco.TrainedRun)
assert_type(adloco.train(resume="runs/x"), adloco.TrainedRun)
assert_type(adloco.load("runs/x", round=3).model, torch.nn.Module)
assert_type(run.summary, dict[str, Any])
assert_type(run.evaluate(), dict[str, float])
assert_type(run.recipe.method.num_trainers, int)
assert_type(adloco.__version__, str)

problem = adloco.Problem(
    build_model=lambda: torch.nn.Linear(1, 1),
    loss_fn=lambda model, batch: model(batch).mean(),
    data=adloco.TensorSource(torch.zeros(4, 1), num_streams=1),
)
own = adloco.AdLoCo(
    problem, adloco.Method(), inner=adloco.InnerAdamW(), syncing=adloco.Syncing(outer=None)
)
for report in own.rounds(2):
    assert_type(report, adloco.RoundReport)
    assert_type(report.trainers[0].noise_scale, float | None)

adloco.load(5)  # type: ignore[arg-type]
adloco.Method(num_trainer=2)  # type: ignore[call-arg]
_ = adloco.Adloco  # type: ignore[attr-defined]
