"""Batch rules by hand, and the known dynamics of the norm test (docs/method.md)."""

import math

import numpy as np
import pytest

from adloco.rules.batch_rules.batch_rule import UNBOUNDED
from adloco.rules.batch_rules.constant import ConstantBatch
from adloco.rules.batch_rules.norm_test import NormTest
from adloco.rules.batch_rules.warmup import BatchWarmup
from adloco.rules.controller import BatchController, BatchGuards
from adloco.rules.moments import GradientEstimate
from tests.problems import at


def estimate_of(
    variance: float, norm_sq: float, batch: float = math.inf, inner: float = 0.0
) -> GradientEstimate:
    """Expected statistics of a process with S = variance and |G|^2 = norm_sq, drawn with this
    batch.
    """
    return GradientEstimate(
        grad_variance=variance,
        grad_norm_sq=norm_sq,
        plugin_norm_sq=norm_sq + variance / batch,
        inner_variance=inner,
    )


def test_norm_test_by_hand() -> None:
    # S = 12, |G|^2 = 3, eta = 0.5: 12 / (0.25 * 3) = 16. Plug-in at b = 4: |gbar|^2 = 3 + 12/4 = 6,
    # so 12 / (0.25 * 6) = 8.
    assert NormTest(eta=0.5).requested(estimate_of(12, 3), at(0, 4)) == 16
    assert (
        NormTest(eta=0.5, estimator="plug-in").requested(estimate_of(12, 3, batch=4), at(0, 4)) == 8
    )
    assert NormTest(eta=0.5).requested(estimate_of(12.01, 3), at(0, 4)) == 17  # Rounded up.


def test_norm_test_at_the_edges() -> None:
    assert NormTest().requested(None, at(0, 7)) == 7
    assert NormTest().requested(estimate_of(0, 3), at(0, 7)) == 1
    assert NormTest().requested(estimate_of(12, 0), at(0, 7)) == UNBOUNDED
    assert NormTest().requested(estimate_of(12, -0.5), at(0, 7)) == UNBOUNDED
    assert NormTest().requested(estimate_of(12, 1e-310), at(0, 7)) == UNBOUNDED
    assert NormTest().requested(estimate_of(12, 5e-324), at(0, 7)) == UNBOUNDED


@pytest.mark.parametrize("eta", [0.2, 0.5, 0.8])
def test_plug_in_grows_at_most_by_one_over_eta_squared(eta: float) -> None:
    batch, rule = 4, NormTest(eta=eta, estimator="plug-in")
    for _ in range(6):
        grown = rule.requested(
            estimate_of(1000.0, 0.0, batch=batch), at(0, batch)
        )  # Noise alone: the fastest growth there is.
        assert grown <= math.ceil(batch / eta**2 + 1e-6)
        assert grown >= batch / eta**2 * (1 - 1e-9)
        batch = grown


@pytest.mark.parametrize(("eta", "noise_scale"), [(0.3, 50.0), (0.5, 200.0), (0.8, 300.0)])
def test_fixed_points(eta: float, noise_scale: float) -> None:
    """The plug-in batch stops at B (1 - eta^2) / eta^2, the unbiased one at B / eta^2, from below
    and from above, up to the rounding up to whole samples.
    """
    for estimator, target in (
        ("plug-in", noise_scale * (1 - eta**2) / eta**2),
        ("unbiased", noise_scale / eta**2),
    ):
        for start in (2, 10**5):
            batch = start
            for _ in range(400):
                batch = NormTest(eta=eta, estimator=estimator).requested(
                    estimate_of(noise_scale, 1.0, batch=batch), at(0, batch)
                )
            # Rounding up adds at most 1 per step, which the plug-in's contraction by 1 - eta^2 sums
            # to at most 1/eta^2.
            assert target <= batch + 1e-6
            assert batch <= target + 1 / eta**2 + 1


def test_fixed_point_with_sampled_gradients() -> None:
    """The whole controller on drawn gradients of S = 40, |G|^2 = 1: the request stays around
    B / eta^2 = 62.5.
    """
    from adloco.rules.moments import estimate
    from tests.rules.test_moments import moments_of

    rng = np.random.default_rng(1)
    mean = np.full(40, 40**-0.5)
    controller = BatchController(NormTest(eta=0.8), BatchGuards(initial=8, maximum=1000))
    seen = []
    drawn = 0
    for step in range(600):
        batch = max(8, controller.requested_batch)
        drawn += batch
        samples = mean + rng.normal(size=(batch, 40))
        groups = [batch // 8] * 7 + [batch - 7 * (batch // 8)]
        controller.update(estimate(moments_of(samples, groups)), drawn)
        if step > 100:
            seen.append(controller.requested_batch)
    assert np.median(seen) == pytest.approx(62.5, rel=0.15)


def test_constant_and_warmup() -> None:
    assert ConstantBatch().requested(estimate_of(1e9, 1e-9), at(10**9, 13)) == 13
    stages = BatchWarmup(batches=[16, 64], after_samples=[100, 1000])
    assert [
        stages.requested(None, at(samples, 4)) for samples in (0, 99, 100, 999, 1000, 10**6)
    ] == [
        4,
        4,
        16,
        16,
        64,
        64,
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NormTest(eta=-1.0), r"^eta must be > 0, got -1.0"),
        (
            lambda: NormTest(estimator="exact"),
            r"^estimator must be unbiased or plug-in, got 'exact'",
        ),
        (
            lambda: BatchWarmup(batches=[1, 2], after_samples=[3]),
            r"^batches must have as many numbers as after_samples = \[3\], .* got \[1, 2\]",
        ),
        (
            lambda: BatchWarmup(batches=[1, 2], after_samples=[3, 3]),
            r"^after_samples must be >= 0 and increase",
        ),
        (
            lambda: BatchWarmup(batches=[1, 2], after_samples=[-1, 3]),
            r"^after_samples must be >= 0 and increase",
        ),
    ],
)
def test_refusals(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
