"""The inner-product tests by hand, and where they are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adloco import BatchGuards, SwitchMode
from adloco.cli.main import main
from adloco.cluster.job import plan_job
from adloco.distributed.testing import run_on_ranks
from adloco.lab.inner_product.batch_rules import AugmentedInnerProductTest, InnerProductTest
from adloco.rules.batch_rules.batch_rule import UNBOUNDED
from adloco.rules.controller import BatchController
from adloco.rules.moments import GradientEstimate
from tests.distributed.test_islands import run_here
from tests.problems import BlockLM, at, make_run


def estimate_of(variance: float, norm_sq: float, inner: float) -> GradientEstimate:
    return GradientEstimate(
        grad_variance=variance, grad_norm_sq=norm_sq, plugin_norm_sq=norm_sq, inner_variance=inner
    )


@pytest.mark.parametrize(
    "rule",
    [
        InnerProductTest(),
        AugmentedInnerProductTest(),
        AugmentedInnerProductTest(nu=0.6),
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
            tests=4,
            variance_spread=(0.1 * variance) ** 2,
            norm_spread=(0.1 * norm_sq) ** 2,
        )
        controller.update(seen, 1000 * round)
        assert controller.requested_batch == rule.requested(seen, at(0, 1))


def test_inner_product_and_augmented_by_hand() -> None:
    # Var<g_i, G> = 50, |G|^2 = 2: theta = 0.5 asks for 50 / (0.25 * 4) = 50. Var_orth = S - 50/2 =
    # 100 - 25 = 75: nu = 0.5 asks for 75 / (0.25 * 2) = 150, nu = 5 for 75 / 50 = 2 (rounded up).
    seen = estimate_of(100, 2, inner=50)
    assert InnerProductTest(theta=0.5).requested(seen, at(0, 1)) == 50
    assert AugmentedInnerProductTest(theta=0.5, nu=0.5).requested(seen, at(0, 1)) == 150
    assert AugmentedInnerProductTest(theta=0.5, nu=5.0).requested(seen, at(0, 1)) == 50
    assert (
        AugmentedInnerProductTest().requested(estimate_of(100, 0, inner=50), at(0, 1)) == UNBOUNDED
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: InnerProductTest(theta=0), r"^theta must be > 0, got 0"),
        (lambda: AugmentedInnerProductTest(nu=0), r"^nu must be > 0, got 0"),
        (
            lambda: make_run(batch=InnerProductTest(), switch=SwitchMode(max_micro_batch=1)),
            "switch.max_micro_batch must be >= 2 for this batch rule, which compares 2 samples",
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


@pytest.mark.nightly
@pytest.mark.parametrize("rule", ["inner-product", "augmented"])
def test_a_recipe_runs_and_learns(rule: str, small: list[str], tmp_path: Path) -> None:
    assert main(["train", "adloco", *small, "--run.tokens", "8000", "--batch.rule", rule]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["val_loss"] for line in lines]
    assert losses[-1] < losses[0]


def test_help_on_a_setting_of_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--search", "batch."]) == 0
    plain = " ".join(capsys.readouterr().out.split())
    assert "With batch.rule augmented or inner-product: Tolerated relative error of the" in plain
