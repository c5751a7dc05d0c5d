"""Equivalence limits: what AdLoCo must be when its parts are trivial."""

import copy

import pytest
import torch

from adloco import BatchGuards, ConstantBatch, MergeSmallest, NormTest, OneProcess, SwitchMode
from tests.problems import (
    Recording,
    adamw,
    linear,
    make_run,
    outer_sgd,
    params_of,
    regression,
    sgd,
    squared_error,
)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_outer_sgd_of_one_is_local_sgd() -> None:
    exact, by_optimizer = make_run(outer=None), make_run(outer=outer_sgd(1.0))
    for _ in range(5):
        exact.round()
        by_optimizer.round()
        torch.testing.assert_close(params_of(exact), params_of(by_optimizer), rtol=1e-6, atol=1e-7)


def test_sync_at_every_step_is_data_parallel() -> None:
    run = make_run(
        sync_every=1, outer=outer_sgd(1.0), guards=BatchGuards(initial=7), workers_per_trainer=3
    )
    data, model = regression(3), linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    position = [0, 0, 0]
    for _ in run.rounds(10):
        # 7 samples over 3 workers: 3 + 2 + 2; data parallel takes one gradient over all of them.
        parts = [
            data.read(worker, position[worker], count) for worker, count in enumerate((3, 2, 2))
        ]
        position = [at + count for at, count in zip(position, (3, 2, 2), strict=True)]
        optimizer.zero_grad()
        squared_error(
            model, (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
        ).backward()
        optimizer.step()
        torch.testing.assert_close(params_of(run), flat(model), rtol=1e-5, atol=1e-6)


def test_one_trainer_with_a_constant_batch_is_diloco() -> None:
    """This holds also if everything adaptive is switched on but cannot change anything."""
    diloco = make_run(inner=adamw(0.01), outer=outer_sgd(0.7, 0.9, True), batch=ConstantBatch())
    held = make_run(
        inner=adamw(0.01),
        outer=outer_sgd(0.7, 0.9, True),
        batch=NormTest(eta=0.8),
        guards=BatchGuards(initial=8, minimum=8, maximum=8),
        merge=MergeSmallest(every=1, first_round=1),
        test_groups=2,
    )
    for _ in range(5):
        diloco.round()
        held.round()
        torch.testing.assert_close(params_of(diloco), params_of(held), rtol=1e-5, atol=1e-7)


def test_one_worker_is_lookahead() -> None:
    """Lookahead (arXiv 1907.08610): slow = slow + alpha (fast - slow) every k steps."""
    run = make_run(workers_per_trainer=1, outer=outer_sgd(0.5), sync_every=5, inner=sgd(0.05))
    data, fast = regression(1), linear()
    optimizer = torch.optim.SGD(fast.parameters(), lr=0.05)
    slow = copy.deepcopy(fast)
    for index, _ in enumerate(run.rounds(6)):
        for step in range(5):
            optimizer.zero_grad()
            squared_error(fast, data.read(0, 8 * (5 * index + step), 8)).backward()
            optimizer.step()
        with torch.no_grad():
            for behind, ahead in zip(slow.parameters(), fast.parameters(), strict=True):
                behind.add_(ahead - behind, alpha=0.5)
                ahead.copy_(behind)
        torch.testing.assert_close(params_of(run), flat(slow), rtol=1e-5, atol=1e-6)


def test_one_worker_without_outer_optimizer_is_plain_training_exactly() -> None:
    run = make_run(workers_per_trainer=1, outer=None, inner=adamw(0.01), sync_every=7)
    data, model = regression(1), linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(21):
        optimizer.zero_grad()
        squared_error(model, data.read(0, 8 * step, 8)).backward()
        optimizer.step()
    reports = list(run.rounds(3))
    assert params_of(run).equal(flat(model))
    assert (reports[-1].syncs, reports[-1].bytes_communicated) == (0, 0)


@pytest.mark.parametrize(("batch", "micro"), [(12, 4), (17, 8), (5, 1)])
def test_accumulation_is_one_batch(batch: int, micro: int) -> None:
    """Accumulating micro-batches, also unequal ones, equals one batch of all their samples."""
    settings = {
        "workers_per_trainer": 1,
        "guards": BatchGuards(initial=batch),
        "inner": adamw(0.01),
    }
    whole = make_run(**settings, switch=SwitchMode(max_micro_batch=batch))
    parts = make_run(**settings, switch=SwitchMode(max_micro_batch=micro, mode="always"))
    for _ in range(4):
        first, second = whole.round(), parts.round()
        assert first is not None
        assert second is not None
        torch.testing.assert_close(params_of(whole), params_of(parts), rtol=1e-5, atol=1e-6)
        assert first.train_loss == pytest.approx(second.train_loss, rel=1e-5)
    assert second.trainers[0].accumulation_steps == -(-batch // micro)


def test_threads_do_not_change_the_numbers() -> None:
    results = []
    for threads in (1, 2, 4):
        run = make_run(
            num_trainers=3,
            workers_per_trainer=2,
            inner=adamw(0.01),
            batch=NormTest(),
            guards=BatchGuards(initial=8, maximum=40),
            merge=MergeSmallest(every=2, first_round=2),
            placement=OneProcess(threads=threads),
        )
        reports = list(run.rounds(6))
        results.append((params_of(run, next(iter(run.trainers))), reports))
    for params, reports in results[1:]:
        assert params.equal(results[0][0])
        assert reports == results[0][1]


def test_the_same_data_in_the_same_order_whatever_the_batch_schedule() -> None:
    """Each stream is read without gap or repeat, and the samples come in the same order for every
    schedule.
    """
    orders = []
    for batch, guards in (
        (ConstantBatch(), BatchGuards(initial=8)),
        (NormTest(eta=0.3), BatchGuards(initial=8, maximum=60)),
    ):
        source = Recording(regression(2, samples=2_000))
        run = make_run(
            data=source,
            batch=batch,
            guards=guards,
            switch=SwitchMode(max_micro_batch=4, mode="always"),
        )
        list(run.rounds(6))
        for stream in (0, 1):
            positions = [
                at
                for read, first, count in source.reads
                if read == stream
                for at in range(first, first + count)
            ]
            assert positions == list(range(len(positions)))
        orders.append({stream: torch.cat(source.samples[stream]) for stream in (0, 1)})
    for stream in (0, 1):
        constant, adaptive = (order[stream] for order in orders)
        assert len(adaptive) > len(constant)
        assert adaptive[: len(constant)].equal(constant)
        assert len(constant.unique(dim=0)) == len(constant)
