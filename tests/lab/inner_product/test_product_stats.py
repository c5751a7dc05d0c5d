"""What a run measures for the inner-product tests against per-sample truth, on every placement."""

from typing import Any

import numpy as np
import pytest
import torch

from adloco import BatchGuards, NormTest, SwitchMode, TensorSource
from adloco.distributed.testing import run_on_ranks
from adloco.lab.inner_product import product_stats
from adloco.lab.inner_product.batch_rules import AugmentedInnerProductTest, InnerProductTest
from adloco.lab.inner_product.product_stats import plug_in, products_with
from tests.algorithms.test_adloco import normed, running_statistics
from tests.algorithms.test_dropout import Dropping, loss
from tests.algorithms.test_micro_batch_limit import forgets_the_attempt
from tests.algorithms.test_statistics import (
    Bowl,
    one_round,
    trains_as_without,
)
from tests.distributed import scenarios
from tests.distributed.test_gradients import Tied, flat_gradient, loss_of
from tests.distributed.test_ranks import assert_same, same_anywhere
from tests.problems import make_run, sgd, tokens


@pytest.mark.parametrize(("batch", "groups"), [(16, 4), (13, 5)])
def test_one_round_equals_the_formula_on_per_sample_gradients(batch: int, groups: int) -> None:
    seen, truth = one_round(AugmentedInnerProductTest(), batch, groups)
    inner, norms, weights = 0.0, [], []
    for sizes, means, mean in truth:
        inner += sum(
            m * (float(g @ mean) - float(mean @ mean)) ** 2
            for m, g in zip(sizes, means, strict=True)
        )
        norms.append(float(mean @ mean))
        weights.append(sum(sizes) ** 2)
    assert seen.plugin_norm_sq == pytest.approx(np.average(norms, weights=weights), rel=1e-4)
    assert seen.inner_variance == pytest.approx(inner / (2 * (groups - 1)), rel=1e-3)


def test_plug_in_by_hand() -> None:
    """Two groups of 1 and 3 samples with means (4, 0) and (0, 0): gbar = (1, 0), <g_j, gbar> = 4
    and 0, so 1 (4 - 1)^2 + 3 (0 - 1)^2 = 12 with one degree of freedom.
    """
    assert plug_in([1, 3], 1.0, [4.0, 0.0]) == 12
    assert plug_in([4], 2.0, [2.0]) == 0


def test_expectation_of_the_inner_variance_on_a_quadratic() -> None:
    """200 rounds of two workers with 5 + 4 samples in four groups each, on the problem above.

    Sigma is diag(1, 4, 0.25) and G = (0.5, -1, 2): Var<g_i, G> = 0.25 + 4 + 1 = 5.25, and
    tr(Sigma^2) = 17.0625. The plug-in form is too large by that, times the mean of 1/5 and 1/4.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200 * 9 * 2, 3, generator=generator) * torch.tensor([1.0, 2.0, 0.5])
    run = make_run(
        build_model=Bowl,
        loss_fn=lambda model, x: ((model.w - x) ** 2).sum(1).mean() / 2,
        data=TensorSource(x, num_streams=2),
        inner=sgd(1e-30),
        sync_every=1,
        batch=InnerProductTest(),
        guards=BatchGuards(initial=9, minimum=9, maximum=9),
    )
    seen = [run.trainers[0].controller.measured for _ in run.rounds(200)]
    values = [estimate.inner_variance for estimate in seen if estimate]
    truth = 5.25 + 17.0625 * (1 / 5 + 1 / 4) / 2
    assert np.mean(values) == pytest.approx(truth, abs=4 * np.std(values) / np.sqrt(200))


def test_the_second_pass_does_not_change_the_training() -> None:
    trains_as_without(AugmentedInnerProductTest())


def test_running_statistics_see_each_sample_once() -> None:
    """Groups of the same sizes see the same samples, and the batch is constant, so both tests train
    alike.
    """
    once, twice = normed(NormTest()), normed(InnerProductTest())
    list(once.rounds(2))
    list(twice.rounds(2))
    assert running_statistics(twice) == running_statistics(once)
    forgets_the_attempt(InnerProductTest())


def test_the_second_pass_sees_the_same_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With other masks the mean of <g_j, gbar> would differ from |gbar|^2."""
    run = make_run(
        build_model=Dropping,
        loss_fn=loss,
        data=tokens(500, 2),
        inner=sgd(0.1),
        batch=InnerProductTest(),
        guards=BatchGuards(initial=16, minimum=16, maximum=16),
        switch=SwitchMode(max_micro_batch=16),
    )
    seen: list[float] = []

    def recording(samples: Any, mean_norm_sq: float, inner: Any) -> float:
        mean = sum(m * product for m, product in zip(samples, inner, strict=True)) / sum(samples)
        seen.append(mean / mean_norm_sq)
        return 1.0

    monkeypatch.setattr(product_stats, "plug_in", recording)
    run.round()
    assert seen == [pytest.approx(1.0, rel=1e-9)] * 2


def one_trainer(replicas: int) -> dict[str, Any]:
    """Five workers on one rank or two, or one worker on replicas."""
    scenarios.ISLAND[:] = 1, replicas
    run = (
        scenarios.run_here(
            batch=AugmentedInnerProductTest(),
            num_trainers=1,
            workers_per_trainer=5,
            guards=BatchGuards(initial=21, minimum=20, maximum=90),
        )
        if replicas == 1
        else alone()
    )
    return scenarios.result(run, 3)


def alone() -> Any:
    return scenarios.language_model(**scenarios.FEW | {"batch": AugmentedInnerProductTest(nu=0.2)})


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_placement(replicas: int) -> None:
    placed = run_on_ranks(one_trainer, 2, replicas)[0]
    scenarios.ISLAND[:] = 1, 1
    here = one_trainer(1) if replicas == 1 else scenarios.result(alone(), 3)
    assert_same(same_anywhere(placed), same_anywhere(here))


def test_inner_products_with_a_reference() -> None:
    torch.manual_seed(0)
    model, ids = Tied(), torch.randint(0, 11, (4, 5))
    reference = [torch.randn_like(parameter) for parameter in model.parameters()]
    flat = torch.cat([tensor.flatten() for tensor in reference]).double()
    with products_with(list(model.parameters()), reference) as incoming:
        loss_of(model, ids).backward()
        assert abs(incoming.take() / float(flat_gradient(model, ids) @ flat) - 1) < 1e-6
