"""Captured passes and updates, with graphs that call their function again, for want of a GPU.

`tests/run/test_cuda.py` has the real ones.
"""

import gc
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from adloco import BatchGuards, ConstantBatch, OneProcess
from adloco.algorithms import cuda_graphs, micro_batch_limit, worker
from adloco.algorithms.adloco import AdLoCo
from adloco.algorithms.inner.adamw import InnerAdamW
from adloco.algorithms.inner.muon import InnerMuon
from adloco.algorithms.inner.sgd import InnerSGD
from adloco.algorithms.reports import RoundReport
from adloco.rules.batch_rules.norm_test import NormTest
from adloco.rules.learning_rate import LearningRate
from tests.problems import BlockLM, make_run, next_token, params_of, tokens

ADAMW, MUON = InnerAdamW(lr=0.01), InnerMuon(lr=0.02)


class Again:
    """A graph without a GPU."""

    captures = 0
    lanes: ClassVar[list[Any]] = []

    def __init__(self, function: Callable[[], Any], lane: Any) -> None:
        Again.captures += 1
        Again.lanes.append(lane)
        self._function = function
        self.results: Any = None

    def replay(self) -> None:
        self.results = self._function()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> type[Again]:
    monkeypatch.setattr(cuda_graphs, "Graph", Again)
    monkeypatch.setattr(worker, "has_graphs", lambda device: True)
    monkeypatch.setattr(Again, "captures", 0)
    monkeypatch.setattr(Again, "lanes", [])
    return Again


def language(**changes: Any) -> AdLoCo:
    return make_run(
        **{
            "build_model": BlockLM,
            "loss_fn": next_token,
            "data": tokens(500, 2, context=6),
            "tokens_per_sample": 5,
            "replayable": True,
            "inner": ADAMW,
            "max_grad_norm": 0.5,
            "batch": NormTest(),
            "learning_rate": LearningRate(total_tokens=5_000),
            "sync_every": 4,
        }
        | changes
    )


def same(one: RoundReport, other: RoundReport, rel: float) -> None:
    assert one.train_loss == pytest.approx(other.train_loss, rel=rel)
    for mine, truth in zip(one.trainers, other.trainers, strict=True):
        assert mine.requested_batch == truth.requested_batch
        assert mine.grad_variance == pytest.approx(truth.grad_variance, rel=rel)


# Learning rates are float32 in a captured update.
@pytest.mark.parametrize("inner", [ADAMW, MUON, InnerSGD(lr=0.02)], ids=["adamw", "muon", "sgd"])
def test_the_numbers_are_those_without_graphs(inner: Any, graphs: type[Again]) -> None:
    captured, plain = language(inner=inner), language(inner=inner, replayable=False)
    for one, other in zip(captured.rounds(5), plain.rounds(5), strict=True):
        same(one, other, rel=1e-4 if inner is MUON else 1e-6)
    assert graphs.captures > 2
    assert (params_of(captured) - params_of(plain)).abs().max() < (1e-3 if inner is MUON else 1e-7)


def test_a_state_that_is_loaded_is_the_one_that_is_updated(graphs: type[Again]) -> None:
    undisturbed, first, second = (language() for _ in range(3))
    reports = list(undisturbed.rounds(4))
    list(first.rounds(2))
    list(second.rounds(1))  # Its graphs are of other tensors than those that it gets now.
    second.load_state_dict(first.state_dict())
    for one, other in zip(second.rounds(2), reports[2:], strict=True):
        same(one, other, rel=1e-12)
    assert params_of(second).equal(params_of(undisturbed))


def test_a_parameter_without_a_gradient_is_not_decayed(graphs: type[Again]) -> None:
    class WithSpare(BlockLM):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Parameter(torch.ones(3, 3).double())

    run = language(build_model=WithSpare)
    list(run.rounds(2))
    assert graphs.captures > 2
    for each in run.workers.values():
        assert each.model.spare.equal(torch.ones(3, 3).double())


@pytest.mark.parametrize(("part", "called"), [("passes", "measured"), ("updates", "updated")])
def test_what_cannot_be_captured_is_launched_kernel_by_kernel(
    part: str, called: str, graphs: type[Again], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(function: Callable[[], Any], lane: Any) -> Again:
        if function.__name__ != called:
            return Again(function, lane)
        if part == "passes":
            function()  # Hooks see gradients that are never computed.
        raise RuntimeError("operation not permitted when stream is capturing")

    plain = list(language(replayable=False).rounds(3))
    monkeypatch.setattr(cuda_graphs, "Graph", refuse)
    with pytest.warns(UserWarning, match=f"{part} are launched kernel by kernel: operation not"):
        refused = list(language().rounds(3))
    for one, other in zip(refused, plain, strict=True):
        same(one, other, rel=1e-6)
    # Updates read the gradients of captured passes, which stay in one place.
    assert (graphs.captures > 0) == (part == "updates")


def test_smaller_passes_are_captured_after_memory_ran_out(
    graphs: type[Again], monkeypatch: pytest.MonkeyPatch
) -> None:
    def scarce(function: Callable[[], Any], lane: Any) -> Again:
        if lane.largest > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Again(function, lane)

    monkeypatch.setattr(cuda_graphs, "Graph", scarce)
    weight = nn.Parameter(torch.ones(()))
    lane = cuda_graphs.Lane(torch.device("cpu"))
    passes = cuda_graphs.CapturedPasses([weight], lane, compiled=False)

    def compute(batch: Tensor, share: Tensor | float) -> Tensor:
        loss = (weight * batch).sum() * share
        loss.backward()
        return loss.detach()

    captures = []
    with pytest.warns(UserWarning, match="kernel by kernel: CUDA out of memory"):
        for size in (8, 8, 4, 8, 4):
            passes.run(compute, torch.ones(size), 0.5, None)
            captures.append(graphs.captures)
            assert passes.fit(size) == (size < 8)
    assert captures == [0, 0, 1, 1, 1]
    assert weight.grad is not None and float(weight.grad) == 0.5 * (8 + 8 + 4 + 8 + 4)


def test_a_pass_measures_itself_alone_and_leaves_its_batch_alone(
    graphs: type[Again], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its shape was captured without norms before, and where its capture fails."""
    weight = nn.Parameter(torch.ones(()))
    lane = cuda_graphs.Lane(torch.device("cpu"))
    passes = cuda_graphs.CapturedPasses([weight], lane, compiled=False)
    norms: list[float] = []
    sums: Any = SimpleNamespace(
        drop=norms.clear,
        take=lambda: torch.tensor(norms.pop()),
        add=lambda norm: norms.append(float(norm)),
    )

    def compute(batch: Tensor, share: Tensor | float) -> Tensor:
        loss = (weight * batch).sum() * share
        loss.backward()
        norms.append(float(batch.sum()))
        return loss.detach()

    first = torch.ones(4)
    passes.run(compute, first, 0.5, None)
    norms.clear()
    for batch in (first, 2 * first):
        passes.run(compute, batch, 0.5, sums)
    assert norms == [4.0, 8.0] and first.eq(1).all()
    norms.clear()

    def fails(function: Callable[[], Any], lane: Any) -> Again:
        compute(torch.ones(5), 1.0)
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graphs, "Graph", fails)
    with pytest.warns(UserWarning, match="passes are launched kernel by kernel"):
        passes.run(compute, torch.ones(5), 0.5, sums)
    assert norms == [5.0]


def test_a_capture_that_fails_ends_for_the_allocator_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch leaves it, no cached memory would be freed any more; and the cause is said."""

    class Capture:
        def __enter__(self) -> None:
            pass

        def __exit__(self, *error: object) -> None:
            raise RuntimeError("the capture was invalidated")

    def fails() -> None:
        raise RuntimeError("the cause")

    ended: list[Any] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    lane: Any = SimpleNamespace(stream=SimpleNamespace(device_index=3), pool="pool")
    monkeypatch.setattr(torch.cuda, "graph", lambda *given, **named: Capture())
    told = "torch._C._cuda_endAllocateToPool"
    monkeypatch.setattr(told, lambda *given: ended.append(given))
    with pytest.raises(RuntimeError, match="the cause"):
        cuda_graphs.Graph(fails, lane)
    assert ended == [(3, "pool")]


@pytest.mark.parametrize("shared_work", [math.inf, 0.0])
def test_workers_compute_at_once_where_all_are_small(
    shared_work: float, graphs: type[Again], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noting(OneProcess):
        at_once: ClassVar[list[bool]] = []

        def map(self, *given: Any, together: bool = False, **named: Any) -> Any:
            self.at_once.append(together)
            return super().map(*given, together=together, **named)

    monkeypatch.setattr(cuda_graphs, "SHARED_WORK", shared_work)
    list(language(placement=Noting(threads=1)).rounds(1))
    assert any(Noting.at_once) == bool(shared_work)


def test_graphs_are_freed_when_passes_become_too_large(
    graphs: type[Again], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers go on as without, in both directions, and graphs are captured again."""
    run, plain = language(), language(replayable=False)
    alive: list[int] = []
    for most in (cuda_graphs.LARGEST_WORK, 0.0, cuda_graphs.LARGEST_WORK):
        monkeypatch.setattr(cuda_graphs, "LARGEST_WORK", most)
        same(next(run.rounds(1)), next(plain.rounds(1)), rel=1e-6)
        gc.collect()
        alive.append(sum(issubclass(type(each), Again) for each in gc.get_objects()))
    assert alive[0] > 0 == alive[1] < alive[2]


def test_a_model_whose_passes_are_too_large_trains_as_without_graphs(
    graphs: type[Again], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "LARGEST_WORK", 0.0)
    large, plain = language(), language(replayable=False)
    for one, other in zip(large.rounds(3), plain.rounds(3), strict=True):
        same(one, other, rel=0.0)
    assert graphs.captures == 0
    assert params_of(large).equal(params_of(plain))


@pytest.mark.parametrize("compile", [False, True])
def test_workers_that_take_turns_keep_their_activations_together(
    compile: bool, graphs: type[Again], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    captured, plain = language(compile=compile), language(replayable=False)
    for one, other in zip(captured.rounds(3), plain.rounds(3), strict=True):
        same(one, other, rel=1e-6)
    assert graphs.captures > 2 * len(captured.workers)
    assert len(set(map(id, graphs.lanes))) == (1 if compile else len(captured.workers))


class OneLane:
    """Two workers of a lane, whose passes are counted."""

    def __init__(self) -> None:
        self.lane = cuda_graphs.Lane(torch.device("cpu"))
        self.workers = [
            cuda_graphs.CapturedPasses([torch.ones(3)], self.lane, compiled=True) for _ in range(2)
        ]

    def captures(self, worker: int, samples: int) -> int:
        """How many graphs a pass makes."""
        before = Again.captures

        def compute(batch: Tensor, share: Tensor | float) -> Tensor:
            return batch.sum() * share

        loss = self.workers[worker].run(compute, torch.ones(samples), 0.5, None)
        assert loss.item() == samples / 2
        return Again.captures - before


@pytest.mark.usefixtures("graphs")
def test_a_larger_micro_batch_takes_the_memory_of_smaller_ones() -> None:
    """It would stay beside that of the larger one, in which there is room for the smaller."""
    one = OneLane()
    assert one.captures(0, 4) == one.captures(1, 4) == 1
    assert one.captures(0, 4) == one.captures(1, 4) == 0
    assert one.captures(0, 2) == 1
    assert one.captures(0, 8) == 1  # All are forgotten.
    assert one.captures(0, 4) == one.captures(1, 4) == one.captures(1, 8) == 1
    assert one.captures(0, 8) == one.captures(0, 4) == one.captures(1, 4) == 0


def test_a_capture_that_fails_leaves_no_memory_to_others_of_the_lane(
    graphs: type[Again], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = OneLane()
    one.captures(0, 4)

    def fails(function: Callable[[], Any], lane: Any) -> Again:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda_graphs, "Graph", fails)
    with pytest.warns(UserWarning, match="kernel by kernel: CUDA out of memory"):
        assert one.captures(1, 4) == 0
    monkeypatch.setattr(cuda_graphs, "Graph", Again)
    assert one.captures(0, 4) == 1
    assert one.captures(1, 4) == 0  # It does not try again.


def test_memory_that_runs_out_frees_the_graphs_of_all_that_take_turns(
    graphs: type[Again], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    run = language(compile=True, batch=ConstantBatch(), guards=BatchGuards(initial=8))
    list(run.rounds(2))
    alive: list[int] = []

    def ran_out(device: torch.device) -> None:
        gc.collect()
        alive.append(sum(issubclass(type(each), Again) for each in gc.get_objects()))

    def fails(self: Again) -> None:
        monkeypatch.setattr(Again, "replay", replay)
        ran_out(torch.device("cpu"))
        raise torch.OutOfMemoryError("CUDA out of memory")

    replay = Again.replay
    monkeypatch.setattr(micro_batch_limit, "free_memory", ran_out)
    monkeypatch.setattr(Again, "replay", fails)
    list(run.rounds(1))
    assert len(run.workers) > 1
    assert alive[0] > 2
    assert alive[1:] == [0]


def test_an_optimizer_of_another_kind_is_not_captured() -> None:
    parameters = [nn.Parameter(torch.ones(2, 2))]
    assert cuda_graphs.can_capture(ADAMW(BlockLM()))
    assert not cuda_graphs.can_capture([torch.optim.AdamW(parameters)])
    assert not cuda_graphs.can_capture([torch.optim.SGD(parameters)])


def test_memory_that_runs_out_in_a_capture_halves_the_micro_batch(
    graphs: type[Again], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = list(language(replayable=False).rounds(2))
    seen: list[int] = []

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        seen.append(len(ids))
        if len(ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return next_token(model, ids)

    with pytest.warns(UserWarning, match="kernel by kernel: CUDA out of memory"):
        halved = list(language(loss_fn=loss).rounds(2))
    for one, other in zip(halved, plain, strict=True):
        assert one.train_loss == pytest.approx(other.train_loss, rel=1e-6)
    assert max(seen) > 2


def test_only_small_passes_are_captured() -> None:
    def passes(size: int, *, compiled: bool = False) -> cuda_graphs.CapturedPasses:
        parameters = [torch.empty(size, device="meta")]
        lane = cuda_graphs.Lane(torch.device("cpu"))
        return cuda_graphs.CapturedPasses(parameters, lane, compiled=compiled)

    small, large, compiled = passes(10**6), passes(10**9), passes(10**8, compiled=True)
    assert small.fit(2**14) and not small.fit(2**14 + 1)
    assert large.fit(200, shared=True)
    assert large.fit(500) and not large.fit(500, shared=True)
    assert not large.fit(501)
    assert compiled.fit(50_000) and not compiled.fit(50_001)
    assert not compiled.fit(1, shared=True)
