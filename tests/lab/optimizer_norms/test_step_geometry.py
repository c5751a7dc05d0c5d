"""Norm tests in the norm of the inner optimizer's steps: runs against per-sample truth, and what
they refuse.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from adloco import (
    AdLoCo,
    BatchGuards,
    InnerAdamW,
    InnerMuon,
    InnerSGD,
    NormTest,
    SwitchMode,
    TensorSource,
)
from adloco.algorithms.optimizers import InnerFactory
from adloco.lab.optimizer_norms.batch_rules import Metric, StepNormTest
from tests.problems import make_run

SHAPES = {"hidden": (24, 32), "embedding": (100, 30), "bias": (40,)}
SIZE, LR = sum(map(math.prod, SHAPES.values())), 1e-30
BATCH, STEPS, ROUNDS = 16, 8, 8
INNER: dict[Metric, InnerFactory] = {
    "sign": InnerSGD(lr=LR),
    "adam": InnerAdamW(lr=LR),
    "muon": InnerMuon(lr=LR),
}


class Bowl(nn.Module):
    """Loss |w - x|^2 / 2, whose gradient from a sample is w - x, and w is zero."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.cat([parameter.flatten() for parameter in self.parameters()])
        return ((flat - x) ** 2).sum(1).mean() / 2


def samples(count: int = ROUNDS * STEPS * BATCH) -> Tensor:
    """Normal samples with unequal variances, around a point of a quarter of their deviations."""
    generator = torch.Generator().manual_seed(0)
    sigma = torch.exp(torch.randn(SIZE, generator=generator) / 2)
    mean = 0.25 * sigma * torch.randn(SIZE, generator=generator)
    return mean + sigma * torch.randn(count, SIZE, generator=generator)


def run_on(
    x: Tensor, metric: Metric | None, inner: InnerFactory | None = None, **changes: object
) -> AdLoCo:
    """A run with the norm test of a metric; None: with the Euclidean one."""
    settings = {
        "build_model": Bowl,
        "loss_fn": lambda model, x: model(x),
        "data": TensorSource(x, num_streams=1),
        "workers_per_trainer": 1,
        "inner": inner or INNER[metric or "sign"],
        "sync_every": STEPS,
        "batch": StepNormTest(metric=metric) if metric else NormTest(),
        "guards": BatchGuards(initial=BATCH, minimum=BATCH, maximum=BATCH),
        "switch": SwitchMode(max_micro_batch=BATCH),
    }
    return make_run(**settings | changes)


def truth(metric: Metric, x: np.ndarray, run: AdLoCo) -> tuple[float, float]:
    """(N^2, |G|_*^2) of the samples with what AdamW's state is now."""
    parts = np.split(x, np.cumsum([math.prod(shape) for shape in SHAPES.values()])[:-1], axis=1)
    (worker,) = run.workers.values()
    noise = norm = 0.0
    scaled: list[np.ndarray] = []
    for part, shape, parameter in zip(parts, SHAPES.values(), worker.replica.params, strict=True):
        deviations = (part - part.mean(0)).reshape(-1, *shape)
        if metric == "muon" and shape == SHAPES["hidden"]:
            covariance = np.einsum("jik,jlk->il", deviations, deviations) / (len(x) - 1)
            step = 0.2 * math.sqrt(32)
            noise += step * np.sqrt(np.linalg.eigvalsh(covariance)).sum()
            norm += step * np.linalg.norm(part.mean(0).reshape(shape), "nuc")
            continue
        state = worker.optimizers[-1].state.get(parameter, {})
        moments = state.get("exp_avg_sq", torch.ones(shape)).double().numpy()
        corrected = moments / (1 - 0.95 ** float(state["step"])) if "step" in state else moments
        sigma = deviations.std(0, ddof=1)
        scaled.append(np.stack([sigma, np.abs(part.mean(0)).reshape(shape)]).reshape(2, -1))
        scaled.append(np.sqrt(corrected).reshape(1, -1))
    numbers, roots = np.concatenate(scaled[::2], 1), np.concatenate(scaled[1::2], 1)
    own = (numbers / roots).sum(1) * roots.mean()
    return (noise + own[0]) ** 2, (norm + own[1]) ** 2


@pytest.mark.parametrize("metric", ["sign", "adam", "muon"])
def test_the_noise_scale_is_that_of_the_samples(metric: Metric) -> None:
    """Within 5%, from four groups of four samples on the first of eight steps of a round."""
    x = samples()
    run, found, true = run_on(x, metric), [], []
    for _ in range(ROUNDS):
        true.append(truth(metric, -x.double().numpy(), run))
        run.round()
        estimate = run.trainers[0].controller.measured
        assert estimate is not None
        found.append((estimate.grad_variance, estimate.grad_norm_sq))
    (variance, norm_sq), (true_variance, true_norm_sq) = np.mean(found, 0), np.mean(true, 0)
    assert variance == pytest.approx(true_variance, rel=0.05)
    assert norm_sq == pytest.approx(true_norm_sq, rel=0.05)
    assert variance / norm_sq == pytest.approx(true_variance / true_norm_sq, rel=0.05)


def test_the_test_leaves_the_training_as_it_is() -> None:
    ends = []
    for metric in (None, "muon"):
        run = run_on(samples(), metric, InnerMuon(lr=0.01))  # type: ignore[arg-type]
        list(run.rounds(3))
        ends.append([parameter.detach() for parameter in run.workers[0].replica.params])
    torch.testing.assert_close(ends[1], ends[0])


def test_numbers_that_are_not_finite_are_no_statistics() -> None:
    steps = iter(range(100))

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = model(x)
        return found * math.nan if next(steps) // 4 == 1 else found  # The second test's groups.

    run = run_on(samples(), "muon", loss_fn=loss, on_nonfinite="skip", sync_every=1)
    first, second, third = run.rounds(3)
    assert [report.workers[0].skipped_steps for report in (first, second, third)] == [0, 1, 0]
    seen = [report.trainers[0].grad_variance for report in (first, second, third)]
    assert seen[1] == seen[0]
    assert math.isfinite(seen[2] or math.nan)


@pytest.mark.parametrize(
    ("metric", "inner", "sentence"),
    [
        ("adam", InnerSGD(), "batch.metric adam needs second moments.* SGD does not.*use sign"),
        ("adam", InnerMuon(), "batch.metric adam needs .* Muon does not have; use muon"),
        ("muon", InnerAdamW(), "batch.metric muon measures the steps of Muon.*is AdamW; use adam"),
    ],
)
def test_a_metric_that_does_not_fit_the_optimizer(
    metric: Metric, inner: InnerFactory, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        run_on(samples(BATCH), metric, inner)


def test_metrics_that_the_rule_refuses() -> None:
    with pytest.raises(ValueError, match="metric must be sign, adam or muon, got 'l2'"):
        StepNormTest(metric="l2")  # type: ignore[arg-type]
