"""The law of the loss: constants that made the points come back, and what points cannot tell is
named.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from adloco.plan.loss_law import LossLaw, fit_loss_law
from adloco.plan.loss_points import Batch, LossPoint, tell

LAW = LossLaw(
    irreducible=1.6,
    scale=60,
    exponent=0.35,
    critical_batch=20,
    methods={"ddp": 1, "diloco": 1.3},
    sync_exponent=0.05,
)
ARMS: list[tuple[str, Batch, float]] = [
    ("ddp", 8, 1),
    ("ddp", 32, 1),
    ("diloco", {8: 1, 24: 3}, 10),
    ("diloco", 32, 50),
]
BUDGETS = (1e5, 2e5, 4e5, 8e5)


def measured(
    arms: Sequence[tuple[str, Batch, float]] = ARMS,
    budgets: Sequence[float] = BUDGETS,
    noise: float = 0,
    seed: int = 0,
) -> list[LossPoint]:
    """A run of each arm and budget, with relative errors of the loss."""
    random = np.random.default_rng(seed)
    return [
        LossPoint(
            run=f"{method} {batch} {sync_every} {tokens}",
            method=method,
            tokens=tokens,
            loss=LAW.loss_at(tokens, method=method, batch=batch, sync_every=sync_every)
            * (1 + noise * random.standard_normal()),
            batch=batch,
            sync_every=sync_every,
        )
        for tokens in budgets
        for method, batch, sync_every in arms
    ]


def test_the_law_by_hand() -> None:
    """81 tokens of cost 1 end 2 / 81^(1/4) = 2 / 3 above 1.5; b = B doubles the cost."""
    law = LossLaw(
        irreducible=1.5,
        scale=2,
        exponent=0.25,
        critical_batch=16,
        methods={"ddp": 1, "diloco": 3},
        sync_exponent=0.5,
    )
    assert law.loss_at(162, method="ddp", batch=16) == pytest.approx(1.5 + 2 / 3)
    assert law.tokens_to(1.5 + 2 / 3, method="ddp", batch=16) == pytest.approx(162)
    assert law.tokens_to(1.5 + 2 / 3, method="diloco", batch=16, sync_every=4) == pytest.approx(972)
    assert law.tokens_to(1.5, method="ddp", batch=16) == math.inf
    assert law.tokens_to(1.5 + 1e-90, method="ddp", batch=16) == math.inf
    with pytest.raises(ValueError, match="no short run has the method 'fsdp'; measured were 'ddp'"):
        law.tokens_to(2, method="fsdp", batch=16)


def test_a_batch_that_varies_is_the_sum_of_its_steps() -> None:
    """The progress of every step, added up, 1 / (1 + B / b) each: 100 steps of 8 and 300 of 24."""
    cost = LAW.cost("ddp", {8: 800, 24: 7200})
    progress = 100 / (1 + LAW.critical_batch / 8) + 300 / (1 + LAW.critical_batch / 24)
    assert (800 + 7200) / cost == pytest.approx(progress * LAW.critical_batch)
    eta = 0.5  # The norm test holds B / eta^2, which costs 1 + 1 / eta^2.
    assert LAW.cost("ddp", LAW.critical_batch / eta**2) == pytest.approx(1 + 1 / eta**2)


def test_constants_come_back_from_exact_points() -> None:
    found = fit_loss_law(measured(), draws=0)
    law = found.law
    assert law.irreducible == pytest.approx(LAW.irreducible, rel=0.01)
    assert law.scale == pytest.approx(LAW.scale, rel=0.01)
    assert law.exponent == pytest.approx(LAW.exponent, rel=0.01)
    assert law.critical_batch == pytest.approx(LAW.critical_batch, rel=0.01)
    assert law.methods == pytest.approx(dict(LAW.methods), rel=0.01)
    assert law.sync_exponent == pytest.approx(LAW.sync_exponent, rel=0.01)
    assert found.assumptions == ()
    assert found.runs is not None and found.longest is not None
    assert found.runs.worst < 1e-3 and found.runs.count == 16
    assert found.longest.worst < 1e-3 and found.longest.count == 4


def test_noise_of_one_percent() -> None:
    """Tokens to a loss inside the measured range are right to 10%, and the error that is shown for
    runs that were left out is that of the noise.
    """
    points = measured(noise=0.01, seed=1)
    found = fit_loss_law(points)
    loss = LAW.loss_at(6e5, method="diloco", batch=16, sync_every=20)
    assert found.law.tokens_to(loss, method="diloco", batch=16, sync_every=20) == pytest.approx(
        6e5, rel=0.1
    )
    assert found.runs is not None and 0.01 < found.runs.median < 0.1
    interval = found.tokens_interval(loss, method="diloco", batch=16, sync_every=20)
    assert interval is not None and interval[0] < 6e5 < interval[1] < 1.5 * interval[0]
    needed = sorted(
        law.tokens_to(loss, method="diloco", batch=16, sync_every=20) for law in found.draws
    )
    assert len(needed) == 100 and interval == (needed[5], needed[94]), "90 of 100"
    assert fit_loss_law(points, draws=2).draws == found.draws[:2], "seeded"


def test_left_out_runs_are_predicted_by_the_others() -> None:
    """An exact law, but one run that is 10% worse: its error is seen from outside."""
    points = measured(ARMS[:2])
    worse = replace(points[2], loss=1.1 * points[2].loss)
    found = fit_loss_law([*points[:2], worse, *points[3:]], draws=0)
    assert found.runs is not None
    at = {"method": worse.method, "batch": worse.batch, "sync_every": worse.sync_every}
    exact = LAW.tokens_to(worse.loss, **at)  # type: ignore[arg-type]
    assert found.runs.worst == pytest.approx(1 - exact / worse.tokens, rel=0.1)
    alone = [*points, *measured(ARMS[2:3], BUDGETS[:1])]
    several = fit_loss_law(alone, draws=0).runs
    assert several is not None and several.count == len(points), "no other run has its method"


def test_a_larger_h_never_saves_tokens() -> None:
    """Runs of H = 15 that are 1% better than those of H = 5 would make one of H = 500 take 8%
    fewer tokens."""
    points = [
        replace(point, loss=0.99 * point.loss) if point.sync_every == 15 else point
        for point in measured([("diloco", 8, 5), ("diloco", 8, 15)])
    ]
    found = fit_loss_law(points)
    assert found.law.sync_exponent == 0
    assert "the losses show no cost of a larger H" in found.assumptions[-1]
    assert all(law.sync_exponent >= 0 for law in found.draws)


def test_what_points_cannot_tell_is_named_and_left_out() -> None:
    one_arm = fit_loss_law(measured(ARMS[:1], BUDGETS[:2]))
    assert one_arm.law.irreducible == 0
    assert one_arm.law.critical_batch == math.inf
    assert one_arm.law.sync_exponent == 0
    assert [text.partition(",")[0] for text in one_arm.assumptions] == [
        "no method was measured at three budgets",
        "no method was measured with two batches",
    ]
    assert one_arm.draws == () and one_arm.runs is None, "two points, two constants"
    assert one_arm.tokens_interval(2.0, method="ddp", batch=8) is None
    # The law goes through both points.
    for point in measured(ARMS[:1], BUDGETS[:2]):
        assert one_arm.law.tokens_to(point.loss, method="ddp", batch=8) == pytest.approx(
            point.tokens, rel=1e-4
        )
    one_h = fit_loss_law(measured([("diloco", 8, 10), ("diloco", 32, 10)]), draws=0)
    assert one_h.law.critical_batch == pytest.approx(20, rel=0.01)
    assert one_h.assumptions == (
        "no method was measured with two H, so H is taken to change no tokens",
    )
    # Two H with two batches: who of them costs the tokens cannot be told.
    together = fit_loss_law(measured([("diloco", 8, 5), ("diloco", 32, 50)]), draws=0)
    assert together.law.sync_exponent == 0
    assert any("changed together with the batch" in text for text in together.assumptions)
    # The methods were measured at a budget each, at b >> B so that batches cost what H cannot.
    apart = measured(ARMS[:1], BUDGETS[:1]) + measured(ARMS[3:], BUDGETS[3:])
    found = fit_loss_law(apart, draws=0)
    assert found.law.methods == {"ddp": 1, "diloco": 1}
    assert found.assumptions[0].startswith("no method was measured at two budgets")


def test_losses_before_the_rate_falls_have_their_own_cost() -> None:
    """Of four runs, a loss before the decay stands at 80% of the tokens; it needs twice as many."""
    points = measured(ARMS[:2])
    early = [
        replace(
            point,
            tokens=0.8 * point.tokens,
            loss=LAW.loss_at(0.4 * point.tokens, method="ddp", batch=point.batch),
            annealed=False,
        )
        for point in points
    ]
    law = fit_loss_law([*early, *points], draws=0).law
    assert law.annealing == pytest.approx(2, rel=0.01)
    assert law.exponent == pytest.approx(0.35, rel=0.01)


def test_constants_at_the_end_of_their_range_are_named() -> None:
    """Losses that depend on steps alone, and on tokens alone; and that soon fall no more."""
    steps = [
        replace(point, loss=30 * (point.tokens / point.mean_batch) ** -0.3)
        for point in measured(ARMS[:2])
    ]
    tokens = [replace(point, loss=30 * point.tokens**-0.3) for point in steps]
    few = fit_loss_law(steps, draws=0)
    assert "samples or less" in few.assumptions[0]
    assert few.assumptions[1].startswith("the losses show no L_inf above 0")
    assert "samples or more" in fit_loss_law(tokens, draws=0).assumptions[0]
    for scale, said in ((1, "p is at its bound, 2"), (0.1, "L_inf is close to the lowest")):
        soon = [
            replace(point, loss=2 + scale * (point.tokens / 1e5) ** -4)
            for point in measured(ARMS[:1])
        ]
        assert fit_loss_law(soon, draws=0).assumptions[-1].startswith(said)


def test_points_that_have_no_law() -> None:
    with pytest.raises(
        ValueError, match="needs runs of two budgets.*got runs of 100,000 to 100,000 tokens;"
    ):
        fit_loss_law(measured(budgets=BUDGETS[:1]))
    with pytest.raises(ValueError, match="needs runs of two budgets.*got no run;"):
        fit_loss_law([])
    rising = [replace(point, loss=2 + point.tokens / 1e6) for point in measured(ARMS[:1])]
    with pytest.raises(ValueError, match="do not fall as tokens grow"):
        fit_loss_law(rising)


def test_losses_before_the_rate_falls_cost_more_and_a_run_counts_once() -> None:
    law = LossLaw(
        irreducible=1.0,
        scale=9.0,
        exponent=0.5,
        critical_batch=math.inf,
        methods={"a": 1.0},
        sync_exponent=0.0,
        annealing=2.0,
    )
    points = [
        LossPoint(run=run, method="a", tokens=tokens, loss=2.0, batch=8.0, annealed=annealed)
        for run, tokens, annealed in (("1", 100, False), ("1", 200, True), ("2", 400, True))
    ]
    assert [law.cost_of(point) for point in points] == [2.0, 1.0, 1.0]
    assert tell(points).observe(points).weights.tolist() == [0.5, 0.5, 1.0]
