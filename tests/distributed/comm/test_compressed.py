"""Pseudo-gradients in a wire format: they match the formats themselves, are the same bits on all
ranks, and leave the right residuals.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from adloco.distributed.comm import block_sums as compression
from adloco.distributed.comm import buckets as sums
from adloco.distributed.comm.buckets import Contributions
from adloco.distributed.comm.comm import Comm
from adloco.distributed.comm.sum_islands import Islands
from adloco.distributed.launch.launcher import place
from adloco.distributed.testing import run_on_ranks
from adloco.distributed.traffic import Traffic
from adloco.distributed.wire.bf16 import Bf16
from adloco.distributed.wire.feedback import Feedback
from adloco.distributed.wire.int1 import Int1
from adloco.distributed.wire.int2 import Int2
from adloco.distributed.wire.int4 import Int4
from adloco.distributed.wire.int8 import Int8
from adloco.distributed.wire.wire_format import WireFormat
from adloco.rules.sync_schedule import SyncEvent
from tests.operations import Operations
from tests.problems import cases, outer_sync, replica, sync_all

FORMATS: dict[str, tuple[WireFormat, Feedback]] = {
    "bf16": (Bf16(), Feedback()),
    "int8": (Int8(), Feedback()),
    "int4": (Int4(), Feedback()),
    "int4 feedback": (Int4(), Feedback(feedback="params", feedback_decay=1.0)),
    "int2": (Int2(), Feedback()),
    "int1": (Int1(), Feedback()),
}
RANKS_AND_WORKERS = [(2, 2), (2, 5), (3, 4), (4, 4)]
SHAPES = [(3, 70), (5,), (), (0,), (1000,), (64, 128)]


def problem(workers: int, seed: int = 0) -> tuple[list[Tensor], list[list[Tensor]], list[float]]:
    """Global parameters, each worker's parameters, weights."""
    generator = torch.Generator().manual_seed(seed)
    origin = [torch.randn(shape, generator=generator) for shape in SHAPES]
    deltas = [
        [
            torch.randn(shape, generator=generator) / torch.rand(shape, generator=generator)
            for shape in SHAPES
        ]
        for _ in range(workers)
    ]
    weights = torch.rand(workers, generator=generator, dtype=torch.float64)
    return (
        origin,
        [[a - 0.01 * d for a, d in zip(origin, own, strict=True)] for own in deltas],
        (weights / weights.sum()).tolist(),
    )


def in_format(values: Tensor, wire: WireFormat) -> Tensor:
    """Encode and decode a tensor; its last block is filled with its values, again and again."""
    rows = -(-values.numel() // wire.block)
    padded = torch.zeros(rows * wire.block)
    padded[: values.numel()] = values.flatten()
    own = values.flatten()[(rows - 1) * wire.block :]
    for index in range(values.numel(), len(padded)):
        padded[index] = own[(index - values.numel()) % len(own)]
    return (
        wire.decode(wire.encode(padded.view(rows, wire.block)))
        .flatten()[: values.numel()]
        .view(values.shape)
    )


def by_hand(
    origin: list[Tensor],
    params: list[list[Tensor]],
    weights: list[float],
    wire: WireFormat,
    residuals: list[list[Tensor]],
    decay: float = 0.0,
) -> list[Tensor]:
    """The compressed sum by its definition, tensor by tensor; it changes residuals in place."""
    added = [torch.zeros(tensor.shape) for tensor in origin]
    for worker, weight in enumerate(weights):
        for index, tensor in enumerate(origin):
            wanted = tensor - params[worker][index] + residuals[worker][index]
            sent = in_format(wanted * weight, wire)
            added[index] += sent
            residuals[worker][index] = (wanted - sent / weight) * decay
    if len(weights) <= 2:
        return added
    sent = [in_format(total, wire) for total in added]
    for index, (total, summed) in enumerate(zip(added, sent, strict=True)):
        for block in range(-(-total.numel() // wire.block)):
            owner = block % len(weights)
            share = slice(block * wire.block, (block + 1) * wire.block)
            lost = (total - summed).flatten()[share]
            kept = decay / max(weights[owner], 1 / len(weights))
            residuals[owner][index].view(-1)[share] += lost * kept
    return sent


def summed(
    comm: Comm,
    origin: list[Tensor],
    params: list[list[Tensor]],
    weights: list[float],
    wire: WireFormat | None,
    residuals: Any,
    decay: float = 0.9,
) -> Any:
    work = comm.start_mean(
        Contributions(
            per_worker=params,
            weights=weights,
            origin=origin,
            wire=wire,
            feedback=Feedback(feedback_decay=decay),
            residuals=residuals,
        )
    )
    return [tensor.clone() for tensor in work.wait()], work.stats


def zeros(workers: int) -> list[list[Tensor]]:
    return [[torch.zeros(shape) for shape in SHAPES] for _ in range(workers)]


@pytest.mark.parametrize(("wire", "feedback"), FORMATS.values(), ids=FORMATS.keys())
def test_equals_the_definition(wire: WireFormat, feedback: Feedback) -> None:
    origin, params, weights = problem(3)
    keeps = feedback.place(wire) != "none"
    decay = feedback.feedback_decay
    mine, theirs = zeros(3) if keeps else [], zeros(3)
    for _ in range(3):
        total, stats = summed(
            Comm(Islands(workers=[3], traffic=Traffic())),
            origin,
            params,
            weights,
            wire,
            mine,
            decay,
        )
        expected = by_hand(origin, params, weights, wire, theirs, decay if keeps else 0.0)
        for got, wanted in zip(total, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        for own, other in zip(mine, theirs, strict=False):
            for got, wanted in zip(own, other, strict=True):
                torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        if not keeps:
            norms = [
                sum(
                    float((a - b).double().square().sum()) for a, b in zip(origin, own, strict=True)
                )
                for own in params
            ]
            assert stats.wanted_sq == pytest.approx(
                [weight**2 * norm for weight, norm in zip(weights, norms, strict=True)], rel=1e-5
            )
        assert all(
            0 < error < wanted
            for error, wanted in zip(stats.error_sq, stats.wanted_sq, strict=True)
        )


@pytest.mark.parametrize(
    ("wire", "workers"),
    [
        (Int1(), 2),
        (Int8(), 2),
        (Int2(), 4),
        (Int1(), 3),
    ],
    ids=str,
)
def test_feedback_loses_nothing(wire: WireFormat, workers: int) -> None:
    """All that was sent plus what is kept equals what had to be sent, up to rounding, also where
    sums are encoded again.
    """
    origin, params, _ = problem(workers)
    weights = [1 / workers] * workers
    residuals, sent = zeros(workers), [torch.zeros(shape) for shape in SHAPES]
    for _ in range(20):
        comm = Comm(Islands(workers=[workers], traffic=Traffic()))
        total, _ = summed(comm, origin, params, weights, wire, residuals, 1.0)
        sent = [before + now for before, now in zip(sent, total, strict=True)]
    for index, tensor in enumerate(origin):
        kept = sum(weight * own[index] for weight, own in zip(weights, residuals, strict=True))
        wanted = 20 * sum(
            weight * (tensor - own[index]) for weight, own in zip(weights, params, strict=True)
        )
        torch.testing.assert_close(sent[index] + kept, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wire", [Bf16(), Int8(), Int4(), Int2(), Int1()], ids=lambda w: w.key)
@pytest.mark.parametrize("size", [1, 5, 64, 300])
def test_a_block_that_is_not_full_loses_no_more(wire: WireFormat, size: int) -> None:
    """Norms and biases are shorter than a block: where all workers have moved all of their values
    by the same number, the sum is that number, also where it is encoded again.
    """
    origin, params = [torch.zeros(size)], [[torch.full((size,), -0.5)] for _ in range(4)]
    comm = Comm(Islands(workers=[4], traffic=Traffic()))
    (total,), stats = summed(comm, origin, params, [0.25] * 4, wire, [])
    torch.testing.assert_close(total, torch.full((size,), 0.5), rtol=1e-6, atol=0)
    assert stats.total_sq == pytest.approx(0.25 * size)


def test_a_worker_without_weight_sends_nothing() -> None:
    origin, params, _ = problem(2)
    residuals = zeros(2)
    summed(
        Comm(Islands(workers=[2], traffic=Traffic())),
        origin,
        params,
        [1.0, 0.0],
        Int4(),
        residuals,
        0.5,
    )
    for kept, start, own in zip(residuals[1], origin, params[1], strict=True):
        torch.testing.assert_close(kept, (start - own) * 0.5)


@pytest.mark.parametrize(("wire", "feedback"), FORMATS.values(), ids=FORMATS.keys())
def test_bytes_are_those_of_the_blocks(wire: WireFormat, feedback: Feedback) -> None:
    origin, params, weights = problem(4)
    traffic = Traffic()
    residuals = [] if feedback.place(wire) == "none" else zeros(4)
    comm = Comm(Islands(workers=[4], traffic=traffic))
    _, stats = summed(comm, origin, params, weights, wire, residuals)
    blocks = sum(-(-tensor.numel() // wire.block) for tensor in origin)
    assert stats.num_bytes == traffic.between == 4 * blocks * wire.block_bytes
    # Each byte to its owner but for the own share, and each sum to three others.
    assert traffic.sent == pytest.approx(traffic.between * 1.5)


def test_a_worker_alone_sends_nothing_and_loses_nothing() -> None:
    origin, params, _ = problem(1)
    traffic = Traffic()
    total, _ = summed(
        Comm(Islands(workers=[1], traffic=traffic)), origin, params, [1.0], Int4(), []
    )
    assert traffic.between == 0
    for got, start, own in zip(total, origin, params[0], strict=True):
        assert got.equal(start - own)


def on_ranks(names: list[str], workers: int, replicas: int = 1) -> dict[str, Any]:
    """Sums, squares, residuals and bytes of this rank, twice over."""
    placement = place(workers, replica_size=replicas)
    here = placement.local(range(workers))
    origin, params, weights = problem(workers)
    results: dict[str, Any] = {}
    for name in names:
        wire, feedback = FORMATS.get(name, (None, Feedback()))
        kept = zeros(workers) if feedback.place(wire) != "none" else []
        residuals = [own for worker, own in enumerate(kept) if worker in here]
        before, squares = placement.total_bytes(), []
        for _ in range(2):
            own = [params[worker] for worker in here]
            total, seen = summed(
                placement.comm(range(workers)),
                origin,
                own,
                [weights[worker] for worker in here],
                wire,
                residuals,
                feedback.feedback_decay,
            )
            squares.append((seen.wanted_sq, seen.sent_sq, seen.error_sq, seen.total_sq))
        handed = placement.total_bytes() - before
        results[name] = {
            "sums": total,
            "squares": squares,
            "residuals": residuals,
            "bytes": (handed.between, handed.sent),
        }
    return results


@pytest.mark.parametrize(
    ("ranks", "workers"),
    cases(
        {f"{ranks}-{workers}": (ranks, workers) for ranks, workers in RANKS_AND_WORKERS},
        default=("2-5", "4-4"),
    ),
)
def test_the_same_bits_on_all_ranks_and_in_one_process(ranks: int, workers: int) -> None:
    names = ["uncompressed", *FORMATS]
    everyone = run_on_ranks(on_ranks, ranks, names, workers)
    alone = on_ranks(names, workers)
    for name in names:
        for rank in range(ranks):
            for got, wanted in zip(everyone[rank][name]["sums"], alone[name]["sums"], strict=True):
                assert got.equal(wanted), (
                    f"{name}: all islands, and one process, end with the same bits"
                )
        kept = [tensors for result in everyone for tensors in result[name]["residuals"]]
        assert all(
            a.equal(b)
            for own, other in zip(kept, alone[name]["residuals"], strict=True)
            for a, b in zip(own, other, strict=True)
        )
        assert everyone[0][name]["bytes"] == pytest.approx(alone[name]["bytes"], rel=1e-12)
        for turn in range(2):
            for part in range(3):
                assert [
                    value for result in everyone for value in result[name]["squares"][turn][part]
                ] == alone[name]["squares"][turn][part]
            total = sum(result[name]["squares"][turn][3] for result in everyone)
            assert total == pytest.approx(alone[name]["squares"][turn][3], rel=1e-6), (
                "parts add up to the norm of the sum"
            )


@pytest.mark.parametrize("ranks", [2, 4], ids=["one island", "two islands"])
def test_replicas_of_a_worker_count_it_once(ranks: int) -> None:
    names = ["uncompressed", "int8"]
    everyone, alone = run_on_ranks(on_ranks, ranks, names, 2, 2), on_ranks(names, 2)
    for name in names:
        wanted = alone[name]
        for found in everyone:
            assert all(map(torch.equal, found[name]["sums"], wanted["sums"]))
            assert found[name]["bytes"] == pytest.approx(wanted["bytes"], rel=1e-12)
        for turn, squares in enumerate(wanted["squares"]):
            for part, expected in enumerate(squares):
                total = sum(
                    torch.tensor(found[name]["squares"][turn][part]).sum() for found in everyone
                )
                assert float(total) == pytest.approx(float(torch.tensor(expected).sum()), rel=1e-5)


def random_buckets(seeds: Sequence[int]) -> list[str]:
    """Syncs of random sizes, empty and scalar tensors included, cut into random fragments, sent in
    pieces of random caps; what was wrong with any.
    """
    problems = []
    for seed in seeds:
        rng = random.Random(seed)
        sums.PIECE, sums.BLOCK = rng.choice([1, 10, 100, 10_000]), rng.choice([1, 7, 64, 1 << 16])
        compression.PIECE = sums.PIECE
        shapes = [
            rng.choice(
                [(), (0,), (1,), (rng.randint(2, 300),), (rng.randint(1, 20), rng.randint(1, 20))]
            )
            for _ in range(rng.randint(1, 10))
        ]
        workers = rng.randint(dist.get_world_size(), 5)
        placement = place(workers)
        generator = torch.Generator().manual_seed(seed)
        start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        params = [
            [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
            for _ in range(workers)
        ]
        weights = [1 / workers] * workers
        order = rng.sample(range(len(shapes)), len(shapes))
        cuts = sorted(rng.choices(range(len(shapes) + 1), k=rng.randint(0, 3)))
        fragments = [order[a:b] for a, b in itertools.pairwise([0, *cuts, len(shapes)])]
        for wire in (
            None,
            Int8(block=rng.choice([1, 3, 32])),
            Int2(block=rng.choice([4, 32])),
            Int1(block=rng.choice([8, 64])),
        ):
            outer = outer_sync(start, None, fragments, wire=wire)
            here = placement.local(range(workers))
            own = [[tensor.clone() for tensor in params[worker]] for worker in here]
            sync_all(outer, own, weights[: len(here)], placement.comm(range(workers)))
            for index, moved in enumerate(outer.global_params):
                own = [[given[index].float()] for given in params]
                rounded = (
                    by_hand(
                        [start[index].float()],
                        own,
                        weights,
                        wire,
                        [[torch.zeros(shapes[index])] for _ in own],
                    )
                    if wire
                    else []
                )
                exact = sum(
                    weight * given[index] for weight, given in zip(weights, params, strict=True)
                )
                expected = start[index] - rounded[0].double() if wire else exact
                if not torch.allclose(moved, expected, rtol=1e-5, atol=1e-5):
                    problems.append(
                        f"seed {seed}, {wire}, tensor {index} of {shapes[index]}: "
                        f"{(moved - expected).abs().max()}"
                    )
    return problems


@pytest.mark.parametrize(
    ("ranks", "seeds"),
    cases(
        {"2 ranks": (2, range(25)), "3 ranks": (3, range(6)), "3 ranks, more": (3, range(6, 25))},
        default=("3 ranks",),
    ),
)
def test_any_sizes_in_any_buckets(ranks: int, seeds: Sequence[int]) -> None:
    assert run_on_ranks(random_buckets, ranks, seeds) == [[]] * ranks


def sent_in_exchanges(wire: WireFormat | None) -> list[int]:
    """Bytes that this rank sends in each exchange of one sum over three ranks, recorded at the
    calls of torch.distributed; and those that are counted.
    """
    placement = place(3)
    origin, params, weights = problem(3)
    comm, me = placement.comm(range(3)), dist.get_rank()
    seen: list[int] = []
    start = dist.batch_isend_irecv

    def spy(operations: list[dist.P2POp]) -> Any:
        kinds = [one.op for one in operations]
        assert kinds == [dist.irecv, dist.irecv, dist.isend, dist.isend], "ready before sending"
        sent = [one.tensor for one in operations if one.op is dist.isend]
        seen.append(sum(tensor.numel() * tensor.element_size() for tensor in sent))
        return start(operations)

    dist.batch_isend_irecv = spy
    summed(comm, origin, [params[me]], [weights[me]], wire, [])
    return [*seen, placement.traffic.between]


@pytest.mark.parametrize("wire", [None, Int8()])
def test_counted_bytes_are_those_that_are_sent(wire: WireFormat | None) -> None:
    """Every rank's mean is a ring's bytes of all values, or blocks; shares are about equal."""
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    payload = 260 * sum(-(-size // 256) for size in sizes) if wire else 4 * sum(sizes)
    found = run_on_ranks(sent_in_exchanges, 3, wire)
    sent = [first + second for first, second, _ in found]
    for _, _, counted in found:
        assert counted == payload
    assert sum(sent) / 3 == pytest.approx(4 / 3 * payload)
    assert max(sent) < 1.5 * payload


@pytest.mark.parametrize("wire", [None, Int1()])
def test_many_small_tensors_take_as_many_operations_as_a_few(wire: WireFormat | None) -> None:
    counts = []
    for tensors in (3, 3, 60):  # What is cached is made the first time.
        origin = [torch.zeros(256) for _ in range(tensors)]
        workers = [
            replace(
                replica([torch.ones(256) for _ in range(tensors)]),
                residuals=[torch.zeros(256) for _ in range(tensors)] if wire else [],
            )
            for _ in range(3)
        ]
        outer = outer_sync(origin, None, wire=wire)
        comm = Comm(Islands(workers=[3], traffic=Traffic()))
        event = SyncEvent(step=0, kind="sync", fragment=0)
        with Operations() as operations:
            outer.sync(event, workers, [1 / 3] * 3, comm)
        counts.append(operations.count)
    assert counts[1] == counts[2]


def test_tensors_are_handled_together_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "BLOCK", 10)
    tensors = [torch.zeros(size) for size in (4, 6, 1, 20, 0, 3)]
    assert [[*range(6)][part] for part in sums.together(tensors)] == [[0, 1], [2], [3], [4, 5]]
    assert list(sums.together([])) == []
    short = torch.zeros(1, dtype=torch.bfloat16)
    mixed = [short, torch.zeros(1), torch.zeros(1), short]
    assert [[*range(4)][part] for part in sums.together(mixed)] == [[0], [1, 2], [3]]
