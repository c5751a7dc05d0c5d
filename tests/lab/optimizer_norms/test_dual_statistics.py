"""The statistics of a test step in the norms of sign, Adam's and Muon's steps, against formulas on
per-sample gradients in NumPy, on every placement; and their expectation against the truth.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from adloco import InnerAdamW, InnerMuon, InnerSGD, SwitchMode
from adloco.algorithms.optimizers import InnerFactory
from adloco.distributed.launch.launcher import place
from adloco.distributed.parallel.gradient_norms import trainable
from adloco.distributed.placement.placement import Placement
from adloco.distributed.testing import run_on_ranks
from adloco.lab.optimizer_norms.batch_rules import Metric
from adloco.lab.optimizer_norms.dual_stats import DualStep
from adloco.lab.optimizer_norms.step_geometry import StepGeometry
from adloco.rules.moments import Moments
from adloco.rules.switch import BatchPlan
from tests.problems import cases, next_token, tokens

LR = 1e-30
"""Learning rate of steps so short that the parameters stay."""
SPLIT = {"blocks.0.up": (4, 5), "blocks.1.down": (3, 6)}
CASES: Sequence[tuple[Metric, InnerFactory]] = (
    ("sign", InnerSGD(lr=LR)),
    ("adam", InnerAdamW(lr=LR)),
    ("muon", InnerMuon(lr=LR)),
    ("muon", InnerMuon(lr=LR, split=SPLIT)),
)
"""Metrics and inner optimizers. In the last case some matrices are measured in blocks."""
BATCHES = ((13, 4), (5, 12))
"""Samples and groups: eight groups of two samples and of one; five of one, not one for each rank in
every pass."""
WARMING = 20
"""Number of the first sample of the step that gives AdamW its second moments."""


class Block(nn.Module):
    """A tall, a wide and a square matrix, of sizes that nothing divides, and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 9), nn.Linear(9, 5)
        self.mix = nn.Linear(5, 5, bias=False)

    def forward(self, state: Tensor) -> Tensor:
        return state + self.mix(self.down(torch.tanh(self.up(state))))


class TallAndWide(nn.Module):
    """Two blocks, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        state = self.embedding(ids)
        for block in self.blocks:
            state = block(state)
        logits: Tensor = self.head(state)
        return logits


class Measuring:
    """A model on this rank's engine, and its steps with statistics in a metric."""

    def __init__(
        self, metric: Metric, inner: InnerFactory, placement: Placement, model: nn.Module
    ) -> None:
        self.engine, self.ranks = placement.engine(model), placement.ranks_per_worker
        self.params, self.optimizers = trainable(model), inner(model)
        self.geometry = StepGeometry.of(metric, self.params, self.optimizers)
        self.ids = tokens(40, 1).read(0, 0, 40)

    def backward(self, first: int, samples: int, groups: int) -> Moments:
        """The moments of a step with these samples."""
        for parameter in self.params:
            parameter.grad = None

        def passes(plan: BatchPlan) -> Iterator[Tensor]:
            own = plan.of_rank(self.engine.rank)
            for index, (offset, count) in enumerate(own):
                rows = self.ids[first + offset :][: max(count, 1)]
                with self.engine.reducing(last=index == len(own) - 1):
                    loss = next_token(self.engine.forward, rows) * (count / plan.worker_batch)
                    loss.backward()  # type: ignore[no-untyped-call]
                yield loss.detach()

        assert self.geometry is not None
        plan = SwitchMode(max_micro_batch=3, mode="always").plan(samples, self.ranks)
        step = DualStep(
            plan=plan.in_groups(groups),
            passes=passes,
            engine=self.engine,
            params=self.params,
            geometry=self.geometry,
        )
        return step.backward()[1]


def measured(shards: int, replicas: int) -> list[list[float]]:
    """The moments of a second step, for each metric and batch, on whatever ranks there are."""
    placement, rows = place(1, torch.device("cpu"), 1, shards, replicas), []
    for metric, inner in CASES:
        one = Measuring(metric, inner, placement, TallAndWide())
        one.backward(WARMING, 13, 4)
        one.optimizers[-1].step()  # Muon, which works on whole matrices, is the first of two.
        rows += [one.backward(0, *batch).to_numbers() for batch in BATCHES]
    return rows


def gradients_of_samples(ids: Tensor) -> dict[str, np.ndarray]:
    """The gradients of samples [b, ...], by name of the parameter."""
    model = TallAndWide()

    def loss(values: dict[str, Tensor], row: Tensor) -> Tensor:
        logits = functional_call(model, values, (row[None, :-1],))
        return nn.functional.cross_entropy(logits[0], row[1:])

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found = vmap(grad(loss), in_dims=(None, 0))(parameters, ids)
    return {name: gradient.numpy() for name, gradient in found.items()}


def cut(gradients: Mapping[str, np.ndarray], split: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The gradients of samples, with those of matrices that are split in their blocks."""
    found: dict[str, np.ndarray] = {}
    for name, each in gradients.items():
        sizes = [own for part, own in split.items() if part in name and each.ndim == 3]
        parts = [each]
        if sizes:
            along = 1 if each.shape[1] >= each.shape[2] else 2
            parts = np.split(each, np.cumsum(sizes[0])[:-1], axis=along)
        found |= {f"{name} {number}": part for number, part in enumerate(parts)}
    return found


def expected(
    metric: Metric,
    gradients: Mapping[str, np.ndarray],
    warm: Mapping[str, np.ndarray],
    groups: int,
) -> list[float]:
    """The moments by their definitions.

    Args:
        metric: The metric.
        gradients: The gradients of the step's samples [b, ...], by name.
        warm: Those of the step before it, AdamW's only one.
        groups: Into how many groups the samples are cut.
    """
    noise, mean_norm, mean_noise = np.zeros(3)
    means = {name: each.mean(0) for name, each in gradients.items()}
    matrices = [
        n for n, mean in means.items() if metric == "muon" and "blocks" in n and mean.ndim > 1
    ]
    roots = {
        name: np.maximum(np.abs(warm[name].mean(0)), np.abs(mean)) + 1e-8
        if metric != "sign"
        else np.ones_like(mean)
        for name, mean in means.items()
    }
    length = np.concatenate([roots[name].ravel() for name in roots if name not in matrices]).mean()
    c4 = math.sqrt(2 / (groups - 1)) * math.gamma(groups / 2) / math.gamma((groups - 1) / 2)
    for name, samples in gradients.items():
        parts = np.array_split(samples, groups)
        mean = means[name]
        weighted = [math.sqrt(len(part)) * (part.mean(0) - mean) for part in parts]
        if name not in matrices:
            deviation = np.sqrt(np.square(weighted).sum(0) / (groups - 1))
            own_noise = (length * deviation / roots[name]).sum() / c4
            noise += own_noise
            mean_norm += (length * np.abs(mean) / roots[name]).sum()
            mean_noise += own_noise * math.sqrt(2 / math.pi / len(samples))
            continue
        even, odd = np.concatenate(parts[::2]), np.concatenate(parts[1::2])
        share = math.sqrt(len(even) * len(odd)) / len(samples)
        stacked = [each if mean.shape[0] < mean.shape[1] else each.T for each in weighted]
        covariance = sum(each @ each.T for each in stacked) / (groups - 1)
        root = np.sqrt(np.linalg.eigvalsh(covariance).clip(0)).sum()
        contrast = np.linalg.norm(share * (even.mean(0) - odd.mean(0)), "nuc")
        step = 0.2 * math.sqrt(max(mean.shape))
        noise += step * (root + (root - math.sqrt(len(samples)) * contrast) / (groups - 2))
        mean_norm += step * np.linalg.norm(mean, "nuc")
        mean_noise += step * contrast
    weight, dof, norm_sq = len(samples) ** 2, groups - 1, mean_norm**2 - mean_noise**2
    moments = [1, weight, weight * norm_sq, weight * norm_sq**2, weight * mean_norm**2]
    moments += [dof, dof * noise**2, dof * noise**4, 0, 0]
    return [float(number) for number in moments]


@pytest.mark.parametrize(
    ("shards", "replicas"),
    cases(
        {"one process": (1, 1), "DDP": (1, 2), "FSDP2": (2, 1), "HSDP": (2, 2), "3 shards": (3, 1)},
        default=("one process", "DDP", "FSDP2"),
    ),
)
def test_they_are_those_of_the_samples(shards: int, replicas: int) -> None:
    results = (
        run_on_ranks(measured, shards * replicas, shards, replicas)
        if shards * replicas > 1
        else [measured(1, 1)]
    )
    ids = tokens(40, 1).read(0, 0, 40)
    ranks = shards * replicas
    warm = gradients_of_samples(ids[WARMING : WARMING + 13])
    truth = []
    for metric, inner in CASES:
        split = inner.split if isinstance(inner, InnerMuon) else {}
        for samples, groups in ((13, 8 if ranks != 3 else 12), (5, 5)):
            own = gradients_of_samples(ids[:samples])
            truth.append(expected(metric, cut(own, split), cut(warm, split), groups))
    for result in results:
        for row, true in zip(result, truth, strict=True):
            assert row == pytest.approx(true, rel=1e-6)


class Unused(TallAndWide):
    """A model of which one parameter takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(5, 5).double()


def refused() -> None:
    placement = place(1, torch.device("cpu"), 1, 2, 1)
    with pytest.raises(ValueError, match="some parameters got no gradient, so the others cannot"):
        Measuring("sign", InnerSGD(lr=LR), placement, Unused()).backward(0, 13, 4)


@pytest.mark.nightly
def test_shards_need_the_gradients_of_all_parameters() -> None:
    run_on_ranks(refused, 2)
