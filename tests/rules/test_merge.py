"""Merge decisions and the assignment of workers, by hand."""

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from adloco.rules.merge import Merge, assign_workers
from adloco.rules.merge_policies.largest_with_smallest import MergeLargestWithSmallest
from adloco.rules.merge_policies.no_merge import NoMerge
from adloco.rules.merge_policies.smallest import MergeSmallest


def test_the_smallest_merge_and_the_largest_of_them_survives() -> None:
    merge = MergeSmallest(count=3, every=1, first_round=1).decide(1, {0: 40, 1: 10, 2: 30, 3: 20})
    assert merge is not None
    assert (merge.survivor, merge.absorbed) == (2, (1, 3))
    assert merge.weights == {1: 10 / 60, 2: 30 / 60, 3: 20 / 60}


def test_the_largest_merges_with_the_smallest() -> None:
    merge = MergeLargestWithSmallest(count=2, every=1, first_round=1).decide(
        1, {0: 40, 1: 10, 2: 30, 3: 20}
    )
    assert merge is not None
    assert (merge.survivor, merge.absorbed, merge.weights) == (0, (1,), {0: 0.8, 1: 0.2})


def test_ties_go_by_id() -> None:
    merge = MergeSmallest(count=2, every=1, first_round=1).decide(1, {5: 8, 2: 8, 9: 8})
    assert merge is not None
    assert (merge.survivor, merge.absorbed) == (2, (5,))


def test_more_asked_for_than_there_are() -> None:
    for policy in (
        MergeSmallest(count=4, every=1, first_round=1),
        MergeLargestWithSmallest(count=4, every=1, first_round=1),
    ):
        merge = policy.decide(1, {0: 1, 1: 2})
        assert merge is not None
        assert (merge.survivor, merge.absorbed) == (1, (0,))
        assert policy.decide(1, {1: 2}) is None


@pytest.mark.parametrize(
    "merge",
    [
        Merge(survivor=0, absorbed=(1,), weights={0: 1.0}),
        Merge(survivor=0, absorbed=(1,), weights={0: 1.0, 1: 1.0}),
        Merge(survivor=0, absorbed=(0, 1), weights={0: 0.5, 1: 0.5}),
        Merge(survivor=0, absorbed=(1, 1), weights={0: 0.5, 1: 0.5}),
        Merge(survivor=0, absorbed=(1,), weights={0: 0.5, 1: 0.25, 2: 0.25}),
        Merge(survivor=0, absorbed=(9,), weights={0: 0.5, 9: 0.5}),
        Merge(survivor=9, absorbed=(1,), weights={9: 0.5, 1: 0.5}),
        Merge(survivor=0, absorbed=(), weights={0: 1.0}),
        Merge(survivor=0, absorbed=(1,), weights={0: -0.5, 1: 1.5}),
    ],
)
def test_a_merge_that_cannot_be_is_refused(merge: Merge) -> None:
    for rounded in ({0: 1.0, 1: 0.0, 2: 0.0}, {0: 0.3000001, 1: 0.3, 2: 0.4}):
        Merge(survivor=0, absorbed=(1, 2), weights=rounded).checked([0, 1, 2])
    with pytest.raises(ValueError, match=r"^merge\.policy must .* \[0, 1, 2\], .* got Merge"):
        merge.checked([0, 1, 2])


def test_a_merge_in_numbers_of_numpy_is_written_as_any_other() -> None:
    numbers: list[Any] = [np.int64(0), np.int64(1), np.float32(0.5)]
    zero, one, half = numbers
    merge = Merge(survivor=one, absorbed=(zero,), weights={zero: half, one: half})
    written = json.dumps(asdict(merge.checked([0, 1])))
    assert written == '{"survivor": 1, "absorbed": [0], "weights": {"0": 0.5, "1": 0.5}}'


def test_when() -> None:
    policy = MergeSmallest(count=2, every=3, first_round=4)
    assert [round for round in range(1, 12) if policy.decide(round, {0: 1, 1: 2})] == [4, 7, 10]
    assert NoMerge().decide(4, {0: 1, 1: 2}) is None


def test_freed_workers_follow_the_demand() -> None:
    # 3 freed; requests 60 and 20 with 1 worker each. Per worker after joining: 60/2 = 30 > 20/2 =
    # 10; 60/3 = 20 > 10; 60/4 = 15 > 10.
    assert assign_workers({0: 60, 1: 20}, {0: 1, 1: 1}, 3) == [0, 0, 0]
    # Equal demand: the emptier first, ties to the smallest id.
    assert assign_workers({0: 10, 1: 10}, {0: 2, 1: 1}, 3) == [1, 0, 1]
    # 40/2, 40/3 and 40/4 (a tie) before 20/2, which comes before 40/5.
    assert assign_workers({0: 40, 1: 20}, {0: 1, 1: 1}, 5) == [0, 0, 0, 1, 0]
    assert assign_workers({0: 10}, {0: 1}, 0) == []


@pytest.mark.parametrize("settings", [{"count": 1}, {"every": 0}, {"first_round": 0}])
def test_refusals(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(settings))} must be >="):
        MergeSmallest(**settings)
