"""Switch mode and balanced plans, by hand."""

import itertools
import math

import pytest

from adloco.rules.switch import BatchPlan, SwitchMode, balanced, smallest_share


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
def test_plans(
    share: int, switch: tuple[int, ...], always: tuple[int, ...], never: tuple[int, ...]
) -> None:
    for mode, expected in (("switch", switch), ("always", always), ("never", never)):
        rule = SwitchMode(max_micro_batch=8, multiplier=2, mode=mode)  # type: ignore[arg-type]
        assert rule.plan(rule.clipped(share)).micro_batches == expected


def test_a_plan_in_mode_never_does_not_accumulate() -> None:
    assert SwitchMode(max_micro_batch=8, mode="never").plan(12).micro_batches == (8,)
    assert SwitchMode(max_micro_batch=8, mode="never").plan(17, ranks=2).micro_batches == (8, 8)


def test_most_samples_of_a_worker() -> None:
    """Two workers on two ranks that fit 4 each: 16 in one pass, and accumulation from 33 on."""
    for mode, below, above in (("switch", 8, None), ("never", 8, 8), ("always", None, None)):
        switch = SwitchMode(max_micro_batch=4, multiplier=2, mode=mode)  # type: ignore[arg-type]
        assert switch.most_per_worker(10, workers=2, ranks=2) == below
        assert switch.most_per_worker(32, workers=2, ranks=2) == below
        assert switch.most_per_worker(33, workers=2, ranks=2) == above


def test_smaller_passes_of_the_same_samples() -> None:
    plan = SwitchMode(max_micro_batch=8, mode="always").plan(17)
    assert plan.at_most(8) == plan
    assert plan.at_most(3).micro_batches == (3, 3, 3, 3, 3, 2)
    groups = plan.with_samples(5).in_groups(4)
    assert groups.micro_batches == (2, 1, 1, 1) and groups.at_most(2) == groups
    # Two ranks with three samples, one at a time: the fourth is added.
    two = SwitchMode(max_micro_batch=4, pass_limit=1).plan(3, ranks=2)
    assert (two.micro_batches, two.rounded_up) == ((1, 1, 1, 1), 1)
    # What was added before still counts: a sample for two ranks, none for smaller passes.
    before = BatchPlan(micro_batches=(2, 2), ranks=2, rounded_up=1).at_most(1)
    assert (before.micro_batches, before.rounded_up) == ((1, 1, 1, 1), 1)


def test_plan_in_numbers() -> None:
    plan = BatchPlan(micro_batches=(6, 6, 5))
    assert (plan.worker_batch, plan.accumulation_steps, plan.micro_batch) == (17, 3, 6)


def test_groups_for_statistics_keep_the_samples() -> None:
    assert BatchPlan(micro_batches=(8,)).in_groups(4).micro_batches == (2, 2, 2, 2)
    assert BatchPlan(micro_batches=(3,)).in_groups(4).micro_batches == (1, 1, 1)
    assert BatchPlan(micro_batches=(6, 6, 5)).in_groups(2).micro_batches == (5, 4, 4, 4)
    assert BatchPlan(micro_batches=(6, 5)).in_groups(4).micro_batches == (3, 3, 3, 2)
    assert BatchPlan(micro_batches=(1, 1, 1, 1, 1)).in_groups(4).micro_batches == (1, 1, 1, 1, 1)


def test_plans_for_several_ranks() -> None:
    """Every rank has a micro-batch in every pass; the plan says how many samples that adds."""
    switch = SwitchMode(max_micro_batch=4, mode="always")
    plan = switch.plan(17, ranks=2)  # 17 do not fit in 2 x 4 at once: three passes of two ranks.
    assert (plan.micro_batches, plan.accumulation_steps, plan.rounded_up) == (
        (3, 3, 3, 3, 3, 2),
        3,
        0,
    )
    assert plan.of_rank(0) == [(0, 3), (6, 3), (12, 3)]
    assert plan.of_rank(1) == [(3, 3), (9, 3), (15, 2)]
    assert SwitchMode(max_micro_batch=1, mode="always").plan(5, ranks=4) == BatchPlan(
        micro_batches=(1,) * 8, ranks=4, rounded_up=3
    )
    assert switch.plan(1, ranks=2) == BatchPlan(micro_batches=(1, 1), ranks=2, rounded_up=1)
    # Two ranks fit 8: 9 to 16 are clipped at that as published, and 17 is accumulated.
    assert [SwitchMode(max_micro_batch=4).clipped(share, ranks=2) for share in (8, 9, 16, 17)] == [
        8,
        8,
        8,
        17,
    ]
    # So do two workers of one rank, however the request is then split over them.
    assert [
        SwitchMode(max_micro_batch=4).clipped(share, workers=2) for share in (8, 9, 16, 17)
    ] == [8, 8, 8, 17]


def test_a_plan_with_other_samples() -> None:
    """Micro-batches are no larger, and no samples are added for ranks without one."""
    assert BatchPlan(micro_batches=(4, 4, 3, 3, 3)).with_samples(6).micro_batches == (3, 3)
    two = BatchPlan(micro_batches=(4, 4), ranks=2)
    assert [two.with_samples(few).micro_batches for few in (1, 5, 9)] == [
        (1,),
        (3, 2),
        (3, 2, 2, 2),
    ]
    assert [two.with_samples(1).of_rank(rank) for rank in (0, 1)] == [[(0, 1)], [(0, 0)]]
    four = SwitchMode(max_micro_batch=1, mode="always").plan(5, ranks=4).with_samples(5)
    assert (four.micro_batches, four.rounded_up) == ((1, 1, 1, 1, 1), 0)
    assert four.of_rank(3) == [(3, 1), (0, 0)]


@pytest.mark.parametrize("count", [2, 3, 4, 6, 12])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6])
def test_groups_do_not_depend_on_the_ranks(count: int, ranks: int) -> None:
    """This holds for all small batches; ranks that do not divide `count` raise it to their common
    multiple.
    """
    unit = math.lcm(count, ranks)
    small = itertools.product(range(1, 9), range(3), range(1, 41))
    for max_micro_batch, pass_limit, samples in small:
        switch = SwitchMode(max_micro_batch=max_micro_batch, pass_limit=pass_limit, mode="always")
        plan = switch.plan(samples, ranks)
        groups = plan.in_groups(count)
        assert groups.micro_batches == switch.plan(plan.worker_batch).in_groups(unit).micro_batches
        assert groups.micro_batches == balanced(plan.worker_batch, len(groups.micro_batches))
        assert groups.micro_batch <= min(max_micro_batch, pass_limit or max_micro_batch)
        assert len(groups.micro_batches) % unit == 0 or groups.micro_batch == 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6])
def test_the_ranks_share_the_groups(ranks: int) -> None:
    for count, samples in itertools.product(range(2, 9), range(1, 31)):
        groups = SwitchMode(max_micro_batch=3, mode="always").plan(samples, ranks).in_groups(count)
        parts = [groups.of_rank(rank) for rank in range(ranks)]
        assert {len(own) for own in parts} == {groups.accumulation_steps}, "all take part in all"
        assert all(own[0][1] > 0 for own in parts), "every rank has a group"
        before_last = [size for own in parts for _, size in own[:-1]]
        assert 0 not in before_last, "a rank is without a group in the last pass alone"
        taken = sorted(part for own in parts for part in own if part[1] > 0)
        ends = [0, *itertools.accumulate(groups.micro_batches)]
        assert taken == list(zip(ends[:-1], groups.micro_batches, strict=True))


def test_a_rank_without_a_group_takes_part_with_weight_0() -> None:
    # Three samples make three groups for one rank as for two; the second has none in pass two.
    switch = SwitchMode(max_micro_batch=8)
    assert switch.plan(3).in_groups(6).micro_batches == (1, 1, 1)
    groups = switch.plan(3, ranks=2).in_groups(6)
    assert (groups.micro_batches, groups.accumulation_steps) == ((1, 1, 1), 2)
    assert (groups.of_rank(0), groups.of_rank(1)) == ([(0, 1), (2, 1)], [(1, 1), (0, 0)])


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_smallest_share_has_its_groups_on_any_ranks(groups: int, ranks: int) -> None:
    """All larger shares have them too, when a test asks for 4, 8 or 12 groups."""
    for share in range(smallest_share(groups, ranks), 40):
        for max_micro_batch in (1, 3, 8):
            plan = SwitchMode(max_micro_batch=max_micro_batch, mode="always").plan(share, ranks)
            for count in (4, 8, 12):
                assert len(plan.in_groups(count).micro_batches) >= groups


def test_smallest_shares_by_hand() -> None:
    assert [smallest_share(4, ranks) for ranks in (1, 2, 3, 4, 5)] == [4, 4, 6, 4, 4]
    assert [smallest_share(2, ranks) for ranks in (1, 2, 3)] == [2, 2, 2]


@pytest.mark.parametrize("total", range(1, 60))
def test_balanced_is_exact(total: int) -> None:
    for parts in range(1, total + 1):
        shares = balanced(total, parts)
        assert sum(shares) == total
        assert len(shares) == parts
        assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_micro_batch": 0}, "^max_micro_batch must be > 0"),
        ({"pass_limit": -1}, "^pass_limit must be >= 0"),
        ({"multiplier": 0.5}, "^multiplier must be >= 1"),
        ({"mode": "maybe"}, "^mode"),
    ],
)
def test_refusals(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SwitchMode(**settings)  # type: ignore[arg-type]


def test_what_auto_finds_is_not_known_before() -> None:
    with pytest.raises(
        ValueError, match=r"^switch\.max_micro_batch must be a number here, got auto"
    ):
        SwitchMode(max_micro_batch="auto").plan(8)


def test_the_lower_of_two_caps_holds() -> None:
    capped = SwitchMode(max_micro_batch=8, pass_limit=4)
    assert [capped.at_most(limit).pass_limit for limit in (0, 2, 6)] == [4, 2, 4]
    assert SwitchMode(max_micro_batch=8).at_most(0).pass_limit == 0
    limits = (0, 4, 20)
    assert [SwitchMode(max_micro_batch=8, pass_limit=limit).at_once for limit in limits] == [
        8,
        4,
        8,
    ]
