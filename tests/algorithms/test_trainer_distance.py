"""Distances of trainers: the sketch against NumPy, and what a run reports against its parameters.

That all placements report the same is a matter of tests/distributed/test_ranks.py.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from adloco.algorithms import trainer_distance
from adloco.algorithms.trainer_distance import BLOCK, BUCKETS, sketch
from adloco.rules.agreement import mean_cosine, relative_distances
from adloco.rules.merge_policies.smallest import MergeSmallest
from tests.operations import Operations
from tests.problems import make_run, params_of

CPU = torch.device("cpu")
STANDARD_ERROR = 1 / math.sqrt(2 * BUCKETS)
"""Of a norm, relative to it."""


def test_elements_keep_their_sign_and_sum_wherever_tensors_end() -> None:
    """The sketch of a single element is its sign at one place, and all places are used."""
    size = BUCKETS + 40
    places = []
    for one in torch.eye(size):
        found = sketch([one], CPU)
        (place,) = found.nonzero().flatten().tolist()
        assert abs(float(found[place])) == 1
        assert sketch([one[:100].view(10, 10), one[100:101], one[101:]], CPU).equal(found)
        places.append(place)
    assert set(places) == set(range(BUCKETS)) and places[BUCKETS:] == places[:40]


def test_blocks_are_summed_alike_however_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator) for size in (7, 3 * BLOCK + 5, BLOCK)]
    whole = sketch(tensors, CPU)
    monkeypatch.setattr(trainer_distance, "BLOCKS", 1)
    torch.testing.assert_close(sketch(tensors, CPU), whole, rtol=1e-9, atol=1e-9)


def test_no_elements_add_nothing() -> None:
    """A rank that is a further replica gives none, and of a small tensor a shard may have none."""
    assert not sketch([], CPU).any()
    assert not sketch([torch.ones(0)], CPU).any()


def test_a_large_model_takes_few_operations() -> None:
    """On a GPU each is a launch, for each trainer after each round; ten for each block once."""
    model = [torch.ones(5 * BLOCK) for _ in range(10)]
    with Operations() as operations:
        sketch(model, CPU)
    assert operations.count < 2 * 50


def test_blocks_differ() -> None:
    """Equal blocks would add up to 8 times the sketch of one if their signs were the same."""
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0))
    whole = sketch([block.repeat(8)], CPU)
    parts = sketch([block.repeat(8)[:-7], block[-7:]], CPU)
    torch.testing.assert_close(whole, parts, rtol=1e-12, atol=1e-9)
    expected = math.sqrt(8) * float(block.norm())
    assert float(whole.norm()) == pytest.approx(expected, rel=3 * STANDARD_ERROR)


@pytest.mark.parametrize(
    "change",
    [
        lambda noise: noise,
        lambda noise: noise.mean(1, keepdim=True) * noise.mean(0),  # Rank one.
        lambda noise: noise * (torch.arange(noise.shape[1]) % 128 == 5),  # A few columns.
        torch.sign,
    ],
)
def test_distances_are_those_of_numpy_within_the_error(change: Callable[[Tensor], Tensor]) -> None:
    """Three models of 256 columns, moved from a common start by 10%, 20% and 40% of its norm."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(200, 256, generator=generator)
    models = []
    for size in (0.1, 0.2, 0.4):
        move = change(torch.randn(200, 256, generator=generator))
        models.append(start + size * start.norm() / move.norm() * move)
    found = relative_distances([sketch([model], CPU).tolist() for model in models])
    flat = np.stack([model.double().flatten().numpy() for model in models])
    mean = flat.mean(0)
    exact = np.linalg.norm(flat - mean, axis=1) / np.linalg.norm(mean)
    assert exact.max() > 1.5 * exact.min()
    # A quotient of two norms, within three standard errors.
    np.testing.assert_allclose(found, exact, rtol=3 * math.sqrt(2) * STANDARD_ERROR)


def test_relative_distances_by_hand() -> None:
    """(3, 4) and (3, -4) are 4 away from their mean (3, 0)."""
    assert relative_distances([[3, 4], [3, -4]]) == pytest.approx([4 / 3, 4 / 3])
    assert relative_distances([[1, 0], [-1, 0]]) == [None, None]


def test_a_run_reports_the_distance_before_a_merge() -> None:
    """Four parameters are each in a sum of their own, so the estimate is exact."""
    alone = make_run(num_trainers=3)
    params = []
    for _ in alone.rounds(2):
        params.append(np.stack([params_of(alone, trainer).numpy() for trainer in range(3)]))
    merged = make_run(num_trainers=3, merge=MergeSmallest(count=3, every=2, first_round=2))
    reports = list(merged.rounds(3))
    for report, found in zip(reports, params, strict=False):
        mean = found.mean(0)
        exact = np.linalg.norm(found - mean, axis=1) / np.linalg.norm(mean)
        assert exact.min() > 0
        assert [row.distance_to_mean for row in report.trainers] == pytest.approx(exact, rel=1e-5)
    assert [row.distance_to_mean for row in reports[2].trainers] == [None]


def test_one_vector_has_no_cosine_whatever_rounding_says() -> None:
    """sqrt(2)^2 - 2 is 4e-16, which is no product of two norms."""
    assert mean_cosine([2.0], 2.0) is None
    assert mean_cosine([2.0, 0.0], 2.0) is None
    assert mean_cosine([1.0, 4.0], 5.0 + 2.0) == pytest.approx(0.5)
