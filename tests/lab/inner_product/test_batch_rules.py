"""The inner-product tests by hand, and where they are refused."""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adloco import BatchGuards, SwitchMode
from adloco.cli.main import main
from adloco.cluster.job import plan_job
from adloco.distributed.testing import run_on_ranks
from adloco.lab.inner_product.batch_rules import AugmentedInnerProductTest, InnerProductTest
from adloco.lab.inner_product.inner_variance import unbiased
from adloco.rules.batch_rules.batch_rule import UNBOUNDED
from adloco.rules.controller import BatchController
from adloco.rules.moments import GradientEstimate, Moments, estimate, group_moments
from tests.distributed.test_islands import run_here
from tests.problems import BlockLM, at, make_run


def estimate_of(variance: float, norm_sq: float, inner: float) -> GradientEstimate:
    return GradientEstimate(
        grad_variance=variance, grad_norm_sq=norm_sq, plugin_norm_sq=norm_sq, inner_variance=inner
    )


def drawn(samples: int, groups: int, gradient: np.ndarray, draws: np.random.Generator) -> Moments:
    """Statistics of four tests of Gaussian gradients whose covariance is the identity over d."""
    dims = len(gradient)
    moments = Moments()
    for _ in range(4):
        noise = draws.standard_normal((groups, dims)) * math.sqrt(groups / samples / dims)
        means = gradient + noise
        mean, even = means.mean(0), means[::2].mean(0)
        sizes, norms = [samples // groups] * groups, (means**2).sum(1).tolist()
        inner = unbiased(sizes, norms, (means @ mean).tolist(), (means @ even).tolist())
        moments += group_moments(sizes, norms, float(mean @ mean), inner)
    return moments


@pytest.mark.parametrize(("dims", "samples"), [(20, 16), (200, 64), (2000, 64)])
def test_the_variance_along_the_gradient_is_found_whatever_its_share_of_all(
    dims: int, samples: int
) -> None:
    """S = 1 and |G|^2 = 10, so Var<g_i, G> is 10 / d: medians over 20 runs of 8 rounds."""
    found = []
    for seed in range(20):
        draws = np.random.default_rng(seed)
        gradient = draws.standard_normal(dims)
        gradient *= math.sqrt(10) / np.linalg.norm(gradient)
        controller = BatchController(InnerProductTest(), BatchGuards())
        for round in range(1, 9):
            controller.update(estimate(drawn(samples, 4, gradient, draws)), 1000 * round)
            found += [(round, controller.estimate.inner_variance * dims / 10)]
    for round in (1, 2, 4, 8):
        middle = statistics.median(ratio for own, ratio in found if own == round)
        assert middle == pytest.approx(1.0, abs=0.35 if round == 1 else 0.25)


@pytest.mark.parametrize(
    "rule",
    [
        InnerProductTest(estimator="plug-in"),
        AugmentedInnerProductTest(estimator="plug-in"),
        AugmentedInnerProductTest(estimator="plug-in", nu=0.6),
    ],
)
def test_the_published_form_asks_for_what_the_last_tests_alone_say(
    rule: InnerProductTest | AugmentedInnerProductTest,
) -> None:
    controller = BatchController(rule, BatchGuards(maximum=100_000))
    for round, (variance, norm_sq, inner) in enumerate(
        [(100.0, 50.0, 2000.0), (100.0, 5.0, 200.0), (60.0, 5.0, 200.0), (200.0, 5.0, 200.0)], 1
    ):
        seen = replace(
            estimate_of(variance, norm_sq, inner),
            plugin_inner_variance=inner,
            tests=4,
            variance_spread=(0.1 * variance) ** 2,
            norm_spread=(0.1 * norm_sq) ** 2,
        )
        controller.update(seen, 1000 * round)
        assert controller.requested_batch == rule.requested(seen, at(0, 1))


def share_along(controller: BatchController) -> float:
    seen = controller.estimate
    assert seen is not None
    return seen.inner_variance / (seen.grad_variance * seen.grad_norm_sq)


def test_tests_in_which_noise_dominates_say_little_of_the_share() -> None:
    """The mean gradient's square is 100 times |G|^2: such a test counts about 1/10,000."""
    controller = BatchController(InnerProductTest(), BatchGuards())
    for _ in range(4):
        controller.update(estimate_of(2.0, 3.0, 0.6), 100)
    before = share_along(controller)
    controller.update(replace(estimate_of(2.0, 3.0, 600.0), plugin_norm_sq=300.0), 100)
    assert before < share_along(controller) < 2 * before


def test_a_merge_pools_the_shares_along_the_gradient() -> None:
    pair = {key: BatchController(InnerProductTest(), BatchGuards()) for key in (0, 1)}
    for key, inner in ((0, 0.6), (1, 2.4)):
        pair[key].update(estimate_of(2.0, 3.0, inner), 100)
    one, other = (share_along(each) for each in pair.values())
    assert other == pytest.approx(4 * one)
    pair[0].merge(pair, {0: 0.2, 1: 0.8})
    assert share_along(pair[0]) == pytest.approx(0.2 * one + 0.8 * other)


def test_inner_product_and_augmented_by_hand() -> None:
    # Var<g_i, G> = 50, |G|^2 = 2: theta = 0.5 asks for 50 / (0.25 * 4) = 50. Var_orth = S - 50/2 =
    # 100 - 25 = 75: nu = 0.5 asks for 75 / (0.25 * 2) = 150, nu = 5 for 75 / 50 = 2 (rounded up).
    seen = estimate_of(100, 2, inner=50)
    assert InnerProductTest(theta=0.5).requested(seen, at(0, 1)) == 50
    assert AugmentedInnerProductTest(theta=0.5, nu=0.5).requested(seen, at(0, 1)) == 150
    assert AugmentedInnerProductTest(theta=0.5, nu=5.0).requested(seen, at(0, 1)) == 50
    assert (
        AugmentedInnerProductTest().requested(estimate_of(100, -1, inner=50), at(0, 1)) == UNBOUNDED
    )


def test_groups() -> None:
    assert InnerProductTest(estimator="plug-in").fewest_groups == 2
    assert InnerProductTest().fewest_groups == 4
    assert AugmentedInnerProductTest().fewest_groups == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: InnerProductTest(estimator="unbiassed"),  # type: ignore[arg-type]
            r"^estimator must be unbiased or plug-in",
        ),
        (lambda: InnerProductTest(theta=0), r"^theta must be > 0, got 0"),
        (lambda: AugmentedInnerProductTest(nu=0), r"^nu must be > 0, got 0"),
        (
            lambda: make_run(batch=InnerProductTest(), switch=SwitchMode(max_micro_batch=3)),
            "switch.max_micro_batch must be >= 4 for this batch rule, which compares 4 samples",
        ),
        (
            lambda: make_run(batch=InnerProductTest(), test_groups=6),
            r"test\.groups must be a multiple of 4 for this batch rule with .*, got 6",
        ),
    ],
)
def test_refusals(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_an_island_of_a_job_has_replicas() -> None:
    """Shards would lack whole gradients."""
    planned = plan_job(
        "diloco",
        [("batch.rule", "inner-product")],
        islands=2,
        gpus_per_island=8,
        gpus_per_node=None,
        started="20261122-120000",
    )
    found = {key: value for key, value in planned.settings if key.startswith("placement.")}
    assert found == {"placement.replica_size": "8"}


def refused(shards: int, replicas: int) -> str:
    try:
        run_here(
            shards,
            replicas,
            build_model=lambda: BlockLM().float(),
            guards=BatchGuards(initial=8),
            batch=InnerProductTest(),
        ).round()
    except ValueError as error:
        return str(error)
    return ""


def test_shards_are_refused_and_replicas_run() -> None:
    assert "this batch rule needs whole gradients" in run_on_ranks(refused, 2, 2, 1)[0]
    assert run_on_ranks(refused, 2, 1, 2) == ["", ""]


@pytest.mark.parametrize(
    "rule", [pytest.param("inner-product", marks=pytest.mark.nightly), "augmented"]
)
def test_a_recipe_runs_and_learns(rule: str, small: list[str], tmp_path: Path) -> None:
    assert main(["train", "adloco", *small, "--run.tokens", "8000", "--batch.rule", rule]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["val_loss"] for line in lines]
    assert losses[-1] < losses[0]


def test_help_on_a_setting_of_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--search", "batch."]) == 0
    plain = " ".join(capsys.readouterr().out.split())
    assert "With batch.rule augmented or inner-product: Tolerated relative error of the" in plain
