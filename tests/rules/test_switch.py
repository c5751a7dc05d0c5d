"""Switch mode and balanced plans, by hand."""

import pytest

from adloco.rules.switch import BatchPlan, SwitchMode, balanced, worker_shares


@pytest.mark.parametrize(
    ("share", "switch", "always", "never"),
    [
        (1, (1,), (1,), (1,)),
        (8, (8,), (8,), (8,)),
        (9, (8,), (5, 4), (8,)),  # Does not fit, but is below n * b_max = 16: the paper clips.
        (16, (8,), (8, 8), (8,)),
        (17, (6, 6, 5), (6, 6, 5), (8,)),  # Never 8 + 8 + 8.
        (64, (8,) * 8, (8,) * 8, (8,)),
    ],
)
def test_plans(share: int, switch: tuple[int, ...], always: tuple[int, ...], never: tuple[int, ...]) -> None:
    for mode, expected in (("switch", switch), ("always", always), ("never", never)):
        assert SwitchMode(max_micro_batch=8, multiplier=2, mode=mode).plan(share).micro_batches == expected  # type: ignore[arg-type]


def test_plan_in_numbers() -> None:
    plan = BatchPlan(micro_batches=(6, 6, 5))
    assert (plan.worker_batch, plan.accumulation_steps, plan.micro_batch) == (17, 3, 6)


def test_groups_for_statistics_keep_the_samples() -> None:
    assert BatchPlan(micro_batches=(8,)).in_groups(4).micro_batches == (2, 2, 2, 2)
    assert BatchPlan(micro_batches=(3,)).in_groups(4).micro_batches == (1, 1, 1)
    assert BatchPlan(micro_batches=(6, 6, 5)).in_groups(2).micro_batches == (6, 6, 5)
    assert BatchPlan(micro_batches=(6, 5)).in_groups(4).micro_batches == (3, 3, 3, 2)


@pytest.mark.parametrize("total", range(1, 60))
def test_balanced_is_exact(total: int) -> None:
    for parts in range(1, total + 1):
        shares = balanced(total, parts)
        assert sum(shares) == total
        assert len(shares) == parts
        assert max(shares) - min(shares) <= 1


def test_shares_of_workers() -> None:
    assert worker_shares(17, 4, minimum=1) == (5, 4, 4, 4)
    assert worker_shares(3, 4, minimum=1) == (1, 1, 1, 1)
    assert worker_shares(3, 4, minimum=2) == (2, 2, 2, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_micro_batch": 0}, "switch.max_micro_batch must be > 0"),
        ({"multiplier": 0.5}, "switch.multiplier must be >= 1"),
        ({"mode": "maybe"}, "switch.mode"),
    ],
)
def test_refusals(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SwitchMode(**settings)  # type: ignore[arg-type]
