"""Reductions and their byte counts, by hand."""

import math
import random
from dataclasses import replace

import pytest
import torch

from adloco.distributed.comm import buckets as sums
from adloco.distributed.comm.buckets import (
    Contributions,
    fill_weighted,
    filled_pieces,
)
from adloco.distributed.comm.comm import Comm
from adloco.distributed.comm.sum_islands import Islands
from adloco.distributed.comm.sync_stats import SumStats, SyncStats
from adloco.distributed.traffic import Traffic
from adloco.distributed.wire.int1 import Int1
from adloco.distributed.wire.int8 import Int8


def test_weighted_mean_and_bytes() -> None:
    traffic = Traffic()
    between = Comm(Islands(workers=[2], traffic=traffic))
    first, second = (
        [torch.tensor([1.0, 2.0]), torch.tensor([[10.0]])],
        [torch.tensor([5.0, -2.0]), torch.tensor([[20.0]])],
    )
    # Weights 1 and 3: (1 + 15) / 4 = 4, (2 - 6) / 4 = -1, (10 + 60) / 4 = 17.5.
    mean = between.mean([first, second], [0.25, 0.75])
    assert [tensor.tolist() for tensor in mean] == [[4.0, -1.0], [[17.5]]]
    assert first[0].tolist() == [1.0, 2.0]
    # Two workers send three float32 each.
    assert traffic.between == 2 * 3 * 4


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_has_no_weight_does_not_count(bad: float) -> None:
    """Even if it is not finite. With weight, a mask of -inf stays one."""
    entries = [[torch.tensor([1.0, -math.inf])], [torch.tensor([bad, -math.inf])]]
    (mean,) = Comm(Islands(workers=[2], traffic=Traffic())).mean(entries, [1.0, 0.0])
    assert mean.tolist() == [1.0, -math.inf]
    origin, entries = [torch.zeros(300)], [[torch.full((300,), each)] for each in (-1.0, bad, -1.0)]
    for wire in (None, Int8(), Int1()):
        given = Contributions(per_worker=entries, weights=[0.5, 0.0, 0.5], origin=origin, wire=wire)
        (moved,) = Comm(Islands(workers=[3], traffic=Traffic())).start_mean(given).wait()
        torch.testing.assert_close(moved, torch.ones(300))


def test_every_tensor_is_averaged() -> None:
    entries = [
        [torch.full((size,), float(worker)) for size in (1, 7, 1000, 3)] for worker in (1, 3)
    ]
    for mean, size in zip(
        Comm(Islands(workers=[2], traffic=Traffic())).mean(entries, [0.5, 0.5]),
        (1, 7, 1000, 3),
        strict=True,
    ):
        assert mean.tolist() == [2.0] * size


@pytest.mark.parametrize("seed", range(20))
def test_pieces_cover_every_element_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for any sizes, empty tensors included; pieces are full before they are sent."""
    rng = random.Random(seed)
    monkeypatch.setattr(sums, "PIECE", rng.choice([1, 7, 100, 10_000]))
    tensors = [
        torch.full([rng.choice([0, 1, 5, 64, 300])], index + 1.0)
        for index in range(rng.randint(1, 12))
    ]
    buckets = torch.zeros(2, sum(tensor.numel() for tensor in tensors))
    given = Contributions(per_worker=[tensors, tensors], weights=[1, 1], origin=())
    sent = []
    for piece in filled_pieces(given, range(len(tensors)), buckets):
        assert piece.numel() > 0
        assert bool((piece > 0).all())
        sent.append(piece.clone())
    for row in torch.cat([torch.zeros(2, 0), *sent], dim=1).tolist():
        assert row == [
            float(index + 1) for index, tensor in enumerate(tensors) for _ in range(tensor.numel())
        ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(10))
def test_weighted_sums_of_any_sizes(
    seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large tensors are handled block by block and small ones together: the result is the plain
    formula's, with and without an origin, as a sum and as the workers' terms.
    """
    monkeypatch.setattr(sums, "BLOCK", 16)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shapes = rng.choices([(), (0,), (1,), (3,), (2, 4), (16,), (17,), (3, 11)], k=7)
    exact, workers = sums.sum_dtype(dtype), 1 + seed % 3
    entries, (origin,) = (
        [[torch.randn(shape, generator=generator).to(own) for shape in shapes] for _ in range(many)]
        for many, own in ((workers, dtype), (1, exact))
    )
    weights = [0.5, 0.0, 0.2][:workers]
    for left_out in entries[1:2]:
        left_out[0].fill_(torch.nan)
    chosen = [0, 1, 3, 4, 5, 6]
    for start in ((), origin):
        given = Contributions(per_worker=entries, weights=weights, origin=start)
        expected = [
            torch.cat(
                [
                    (
                        (start[index].to(dtype).to(exact) if start else 0) - own[index].to(exact)
                    ).flatten()
                    * (weight if start else -weight)
                    for index in chosen
                ]
            ).nan_to_num()
            for own, weight in zip(entries, weights, strict=True)
        ]
        for rows in (1, workers):
            results = torch.full([rows, len(expected[0])], torch.nan, dtype=exact)
            norms_sq = torch.zeros(workers, dtype=torch.float64)
            fill_weighted(given, chosen, results, norms_sq)
            assert results.equal(sum(expected)[None] if rows == 1 else torch.stack(expected))
            torch.testing.assert_close(
                norms_sq, torch.stack(expected).double().square().sum(1), rtol=1e-6, atol=0
            )


def test_norms_are_the_same_bits_in_one_process_and_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sums, "BLOCK", 64)
    monkeypatch.setattr(sums, "PIECE", 80)
    generator = torch.Generator().manual_seed(0)
    origin, *workers = ([torch.randn(30, generator=generator) for _ in range(9)] for _ in range(3))
    given = Contributions(per_worker=workers, weights=[0.3, 0.7], origin=origin)
    work = Comm(Islands(workers=[2], traffic=Traffic())).start_mean(given)
    norms_sq = torch.zeros(2, dtype=torch.float64)
    assert len([*filled_pieces(given, range(9), torch.zeros(2, 270), norms_sq)]) == 3
    assert norms_sq.tolist() == list(work.stats.sent_sq)
    total = torch.cat(work.wait())
    assert work.stats.total_sq == pytest.approx(float(total.double().square().sum()), rel=1e-6)


def test_a_worker_alone_sends_nothing() -> None:
    traffic = Traffic()
    value = torch.tensor([1 / 3])
    assert Comm(Islands(workers=[1], traffic=traffic)).mean([[value]], [1.0])[0].equal(value)
    assert traffic.between == 0


def test_broadcast_is_handed_over_once_if_anyone_needs_it() -> None:
    traffic = Traffic()
    between = Comm(Islands(workers=[3], traffic=traffic))
    between.broadcast([torch.zeros(5)], source=0, receivers=[])
    assert traffic.between == 0
    between.broadcast([torch.zeros(5)], source=0, receivers=[1, 2])
    assert (traffic.between, traffic.sent) == (20, 40)


def test_costs_of_syncs_add_up_but_for_the_fastest() -> None:
    one, two = (SyncStats(num_bytes=8.0, peak_bytes_per_second=peak) for peak in (3.0, 2.0))
    assert one + two == SyncStats(num_bytes=16.0, peak_bytes_per_second=3.0)
    seen = SumStats([1.0], [1.0], [0.0], num_bytes=8.0, transfer_seconds=4.0, hidden_seconds=2.0)
    (mine,) = seen.of_workers(ranks=2, crossing=True)
    assert (mine.hidden_seconds, mine.transfer_seconds) == (1.0, 2.0)
    assert (mine.num_bytes, mine.peak_bytes_per_second) == (8.0, 2.0)
    both = SumStats([1.0, 2.0], [3.0, 4.0], [5.0, 6.0], total_sq=7.0, num_bytes=8.0)
    assert both.of_workers(ranks=1, crossing=True) == [
        SyncStats(wanted_sq=1.0, sent_sq=3.0, error_sq=5.0, total_sq=7.0, num_bytes=4.0),
        SyncStats(wanted_sq=2.0, sent_sq=4.0, error_sq=6.0, total_sq=0.0, num_bytes=4.0),
    ]
    assert seen.of_workers(ranks=2, crossing=False) == [replace(mine, peak_bytes_per_second=0.0)]
