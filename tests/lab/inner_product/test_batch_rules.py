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


def drawn(samples: int, gradient: np.ndarray, draws: np.random.Generator) -> Moments:
    """Statistics of four tests of Gaussian gradients with S = 1, alike in all d directions."""
    dims, moments = len(gradient), Moments()
    for _ in range(4):
        means = gradient + draws.standard_normal((4, dims)) * math.sqrt(4 / samples / dims)
        mean, even = means.mean(0), means[::2].mean(0)
        sizes, norms = [samples // 4] * 4, (means**2).sum(1).tolist()
        inner = unbiased(sizes, norms, (means @ mean).tolist(), (means @ even).tolist())
        moments += group_moments(sizes, norms, float(mean @ mean), inner)
    return moments


def courses(
    dims: int, norm_sq: float, rule: InnerProductTest, rounds: int, batch: int
) -> list[list[tuple[int, float]]]:
    """For each round of ten steps the requests of 20 runs, each with Var<g_i, G> as a part of the
    true one. batch: That of the tests; 0: what was requested, at least 4.
    """
    found: list[list[tuple[int, float]]] = [[] for _ in range(rounds)]
    for seed in range(20):
        draws, seen = np.random.default_rng(seed), 0
        gradient = draws.standard_normal(dims)
        gradient *= math.sqrt(norm_sq) / np.linalg.norm(gradient)
        controller = BatchController(rule, BatchGuards())
        for round in found:
            samples = batch or max(4, controller.requested_batch // 4 * 4)
            seen += 10 * samples
            controller.update(estimate(drawn(samples, gradient, draws)), seen)
            assert controller.estimate is not None
            part = controller.estimate.inner_variance * dims / norm_sq
            round.append((controller.requested_batch, part))
    return found


@pytest.mark.parametrize(("dims", "batch"), [(20, 16), (200, 64), (2000, 64)])
def test_the_variance_along_a_gradient_that_is_known(dims: int, batch: int) -> None:
    """|G|^2 is 10 S, and Var<g_i, G> from a twentieth to a two thousandth of the whole."""
    rounds = courses(dims, 10.0, InnerProductTest(), 8, batch)
    middle = [statistics.median(part for _, part in round) for round in rounds]
    assert middle[0] == pytest.approx(1.0, abs=0.35)
    assert middle[1:] == pytest.approx([1.0] * 7, abs=0.25)


@pytest.mark.parametrize(
    ("dims", "norm_sq", "theta", "ideal"),
    [(20, 0.5, 0.2, 2.5), (200, 0.02, 0.1, 25), (2000, 0.002, 0.05, 100)],
)
def test_a_batch_that_follows_its_own_request(
    dims: int, norm_sq: float, theta: float, ideal: float
) -> None:
    """At the batches of the last two noise dominates, whose tests say little by themselves."""
    rounds = courses(dims, norm_sq, InnerProductTest(theta=theta), 30, batch=0)
    late = [request for round in rounds[15:] for request, _ in round]
    assert ideal / 1.6 < statistics.median(late) < 1.6 * ideal
    assert late.count(1) < 0.05 * len(late)


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
    known = replace(estimate_of(2.0, 3.0, 0.6), tests=4, inner_spread=0.01)
    for _ in range(4):
        controller.update(known, 100)
    before = share_along(controller)
    noisy = replace(known, plugin_norm_sq=300.0, inner_variance=600.0, inner_spread=1e6)
    controller.update(noisy, 100)
    assert before < share_along(controller) < 2 * before


def test_a_merge_pools_the_shares_along_the_gradient() -> None:
    pair = {key: BatchController(InnerProductTest(), BatchGuards()) for key in (0, 1)}
    for key, inner in ((0, 0.6), (1, 2.4)):
        pair[key].update(replace(estimate_of(2.0, 3.0, inner), tests=4), 100)
    one, other = (share_along(each) for each in pair.values())
    assert other == pytest.approx(4 * one)
    untested = BatchController(InnerProductTest(), BatchGuards())
    pair[0].merge(pair | {2: untested}, {0: 0.1, 1: 0.4, 2: 0.5})
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
