"""Streaming: its limits, a second implementation in a few lines, bytes, merges, resuming, and what
a wire format does to a run.
"""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from adloco import (
    AdLoCo,
    BatchGuards,
    DiLoCo,
    MergeFates,
    MergeSmallest,
    NonFiniteLossError,
    NormTest,
    OneProcess,
    OuterMemory,
    SwitchMode,
    TensorSource,
)
from adloco.distributed.comm import block_sums as compression
from adloco.distributed.comm.comm import Comm
from adloco.distributed.comm.sum_islands import Islands
from adloco.distributed.parallel.layers import layers
from adloco.distributed.traffic import Traffic
from adloco.distributed.wire.bf16 import Bf16
from adloco.distributed.wire.feedback import Feedback
from adloco.distributed.wire.int1 import Int1
from adloco.distributed.wire.int2 import Int2
from adloco.distributed.wire.int4 import Int4
from adloco.distributed.wire.int8 import Int8
from adloco.rules.sync_schedule import Streaming
from tests.problems import (
    BlockLM,
    Interrupting,
    adamw,
    linear,
    make_run,
    next_token,
    outer_sgd,
    outer_sync,
    params_of,
    round_with_ends,
    sync_all,
    tokens,
)


def language_run(**changes: Any) -> AdLoCo:
    settings: dict[str, Any] = {
        "build_model": BlockLM,
        "loss_fn": next_token,
        "data": tokens(2000, 4),
        "inner": adamw(0.01),
        "outer": outer_sgd(0.7, 0.6, True),
        "sync_every": 6,
        "workers_per_trainer": 2,
        "guards": BatchGuards(initial=9),
        "switch": SwitchMode(max_micro_batch=3, mode="always"),
    }
    return make_run(**settings | changes)


def test_layers_of_a_model() -> None:
    """Layers are the repeated blocks and the modules outside them; tied weights belong to the layer
    where they come first.
    """
    assert layers(BlockLM()) == [[0], [1, 2], [3, 4]]
    assert layers(linear()) == [[0, 1]]
    assert layers(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))) == [[0, 1], [2, 3]]
    frozen = BlockLM()
    frozen.embedding.weight.requires_grad_(False)
    assert layers(frozen) == [[0, 1], [2, 3]]


def test_one_fragment_without_overlap_is_the_plain_outer_step() -> None:
    """The results are equal bit for bit."""
    run = language_run(streaming=Streaming(fragments=1, tau=0))
    list(run.rounds(3))
    data, models = tokens(2000, 4), [BlockLM(), BlockLM()]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    params = [list(model.parameters()) for model in models]
    outer, comm = (
        outer_sync(params[0], outer_sgd(0.7, 0.6, True)),
        Comm(Islands(workers=[2], traffic=Traffic())),
    )
    for step in range(18):
        for worker, sizes in enumerate(((3, 2), (2, 2))):
            position = step * sum(sizes)
            optimizers[worker].zero_grad()
            for size in sizes:
                (
                    next_token(models[worker], data.read(worker, position, size))
                    * (size / sum(sizes))
                ).backward()
                position += size
            optimizers[worker].step()
        if step % 6 == 5:
            sync_all(outer, params, [5 / 9, 4 / 9], comm)
    assert torch.cat([tensor.detach().flatten() for tensor in outer.global_params]).equal(
        params_of(run)
    )


def there_and_back(values: Tensor, wire: Int1) -> Tensor:
    """Encode and decode a tensor; its last block is filled with its values, again and again."""
    blocks = values.flatten().float().split(wire.block)
    padded = torch.cat([block.repeat(wire.block)[: wire.block] for block in blocks])
    return (
        wire.decode(wire.encode(padded.view(-1, wire.block)))
        .flatten()[: values.numel()]
        .view(values.shape)
        .double()
    )


def by_hand(
    rounds: int,
    streaming: Streaming,
    shares: tuple[int, int],
    wire: Int1 | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Streaming DiLoCo with two workers, written as in the paper.

    Returns the global parameters and each worker's. With `wire`, workers keep residuals.
    """
    data, models = tokens(2000, 4), [BlockLM(), BlockLM()]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    params = [list(model.parameters()) for model in models]
    state = [tensor.detach().clone() for tensor in params[0]]
    velocity: list[Tensor | None] = [None] * len(state)
    position, travelling = [0, 0], {}
    weights = [share / sum(shares) for share in shares]
    residuals = [[torch.zeros_like(tensor) for tensor in state] for _ in shares]
    fragments = streaming.cut([[0], [1, 2], [3, 4]], 6)
    for _ in range(rounds):
        for step in range(7):
            for event in streaming.events(6):
                if event.step != step:
                    continue
                for place in fragments[event.fragment]:
                    if event.kind != "receive":
                        travelling[place] = torch.zeros_like(state[place])
                        for weight, own, residual in zip(weights, params, residuals, strict=True):
                            wanted = state[place] - own[place].detach()
                            sent = (
                                there_and_back(weight * wanted, wire) / weight if wire else wanted
                            )
                            travelling[place] += weight * sent
                            residual[place] = 0.9 * (wanted - sent) if wire else residual[place]
                    if event.kind == "send":
                        continue
                    gradient = travelling.pop(place)
                    before = velocity[place]
                    velocity[place] = (
                        gradient.clone() if before is None else 0.6 * before + gradient
                    )
                    state[place] = state[place] - 0.7 * (gradient + 0.6 * velocity[place])
                    for own, residual in zip(params, residuals, strict=True):
                        kept = float(streaming.alpha)
                        begins_at = state[place] - residual[place]
                        own[place].data.copy_(kept * own[place].data + (1 - kept) * begins_at)
            if step == 6:
                break
            for worker, share in enumerate(shares):
                optimizers[worker].zero_grad()
                next_token(models[worker], data.read(worker, position[worker], share)).backward()
                optimizers[worker].step()
                position[worker] += share
    return torch.cat([tensor.flatten() for tensor in state]), [
        torch.cat([tensor.detach().flatten() for tensor in own]) for own in params
    ]


@pytest.mark.parametrize(
    "streaming",
    [
        Streaming(alpha=0.0),
        Streaming(fragments=3, alpha=0.0),
        Streaming(fragments=2, alpha=0.5),
        Streaming(fragments=2, tau=2, alpha=0.5),
        Streaming(fragments=3, tau=1, alpha=0.0),
        Streaming(fragments=1, tau=5, alpha=0.25),
        Streaming(fragments=2, tau=1, alpha=1.0),
    ],
    ids=str,
)
def test_equals_the_paper_by_hand(streaming: Streaming) -> None:
    """The batches are unequal: nine samples for two workers."""
    run = language_run(streaming=streaming)
    list(run.rounds(3))
    state, workers = by_hand(3, streaming, (5, 4))
    torch.testing.assert_close(params_of(run), state, rtol=1e-10, atol=1e-12)
    for worker, expected in enumerate(workers):
        own = torch.cat(
            [tensor.detach().flatten() for tensor in run.workers[worker].replica.params]
        )
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-12)


def test_a_state_within_a_round_needs_the_same_schedule() -> None:
    """Its fragments that were sent already would be taken for others."""
    streaming = Streaming(fragments=3)
    source = Interrupting(tokens(2000, 4))
    run = language_run(data=source, streaming=streaming)
    between = run.state_dict()
    source.before(7, run.stop)
    assert run.round() is None
    for other in (Streaming(), Streaming(fragments=2), Streaming(fragments=3, tau=1)):
        with pytest.raises(ValueError, match=r"within a round, with Streaming\(fragments=3"):
            language_run(streaming=other).load_state_dict(run.state_dict())
        language_run(streaming=other).load_state_dict(between)
    language_run(streaming=streaming).load_state_dict(run.state_dict())


@pytest.mark.parametrize(
    "streaming",
    [Streaming(alpha=0.0), Streaming(fragments=2, tau=2, alpha=0.5)],
    ids=["plain", "streaming"],
)
def test_feedback_equals_its_definition(streaming: Streaming) -> None:
    """Residuals are float32, and everything else is float64."""
    wire = Int1(block=16)
    run = language_run(streaming=streaming, wire=wire)
    list(run.rounds(3))
    state, workers = by_hand(3, streaming, (5, 4), wire)
    torch.testing.assert_close(params_of(run), state, rtol=1e-5, atol=1e-6)
    for worker, expected in enumerate(workers):
        own = torch.cat(
            [tensor.detach().flatten() for tensor in run.workers[worker].replica.params]
        )
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


def test_a_residual_in_params_loses_nothing() -> None:
    """Whatever the wire format drops, the mean of the workers equals their plain, uncompressed
    mean.
    """
    wire, feedback = Int1(block=16), Feedback(feedback_decay=1.0)
    run = language_run(wire=wire, feedback=feedback, outer=None)
    for _ in range(3):
        _, ends = round_with_ends(run)
        own = [
            torch.cat([tensor.detach().flatten() for tensor in worker.replica.params])
            for worker in run.workers.values()
        ]
        assert not own[0].equal(own[1])
        torch.testing.assert_close(
            (5 * own[0] + 4 * own[1]) / 9, (5 * ends[0] + 4 * ends[1]) / 9, rtol=0, atol=1e-7
        )  # Residuals are float32.


def test_workers_take_the_global_parameters() -> None:
    """Nothing is sent, and the parameters of all, and of the model, are the global ones."""
    run = language_run(streaming=Streaming(fragments=3, tau=1), wire=Int1(block=16))
    list(run.rounds(2))
    with pytest.raises(ValueError, match=r"call load_global\(\) first"):
        run.model(0)
    before, sent = params_of(run), run.placement.total_bytes()
    run.load_global()
    assert run.placement.total_bytes() == sent
    assert params_of(run).equal(before)
    for worker in run.workers.values():
        assert torch.cat([each.detach().flatten() for each in worker.replica.params]).equal(before)
    run.model(0)


def test_a_lone_worker_stands_where_its_trainer_does() -> None:
    """Nothing is compressed for a lone worker, so it has no residual."""
    run = language_run(workers_per_trainer=1, wire=Int1(block=16))
    list(run.rounds(2))
    run.model(0)


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"wire": Int1(block=16), "feedback": Feedback(feedback="none")},
    ],
    ids=["fp32", "none"],
)
def test_a_state_is_for_the_same_feedback(other: dict[str, Any]) -> None:
    first, second = language_run(wire=Int1(block=16)), language_run(**other)
    first.round()
    with pytest.raises(
        ValueError,
        match=r"error feedback was 'params' .* give the same wire format and feedback",
    ):
        second.load_state_dict(first.state_dict())
    loops = [
        DiLoCo([linear(), linear()], outer=None, sync_every=1, **chain)
        for chain in ({"wire": Int1(block=16)}, other)
    ]
    with pytest.raises(
        ValueError,
        match=r"error feedback was 'params' .* give the same wire format and feedback",
    ):
        loops[1].load_state_dict(loops[0].state_dict())


def test_a_state_that_is_refused_leaves_a_fragment_in_flight() -> None:
    def trained(*, refuses: bool) -> torch.Tensor:
        torch.manual_seed(0)
        models = [linear(), linear()]
        loop = DiLoCo(models, sync_every=4, streaming=Streaming(fragments=1, tau=2))
        other = DiLoCo([linear(), linear()], sync_every=4, wire=Int1(block=16))
        for step in range(8):
            with torch.no_grad():
                for number, model in enumerate(models):
                    model.weight.add_(0.1 + number)
            loop.step()
            if refuses and step == 2:  # It is sent after two steps and arrives after four.
                with pytest.raises(ValueError, match="error feedback was 'params'"):
                    loop.load_state_dict(other.state_dict())
        return torch.cat([model.weight.detach().flatten() for model in models])

    assert trained(refuses=True).equal(trained(refuses=False))


def test_evaluation_is_at_the_global_parameters() -> None:
    run = language_run(streaming=Streaming(fragments=3, tau=1))
    list(run.rounds(2))
    own = copy.deepcopy([worker.replica.params for worker in run.workers.values()])

    def share(model: nn.Module, part: int, parts: int) -> list[float]:
        return [float(sum(parameter.double().sum() for parameter in model.parameters())), 1.0]

    assert run.evaluate(share)[0][0] == pytest.approx(float(params_of(run).sum()))
    for before, worker in zip(own, run.workers.values(), strict=True):
        assert all(a.equal(b) for a, b in zip(before, worker.replica.params, strict=True)), (
            "workers continue from where they stood"
        )


@pytest.mark.parametrize(
    "diverging",
    [{"streaming": Streaming(fragments=3, tau=1)}, {"wire": Int1(block=16)}],
    ids=["streaming", "int1"],
)
@pytest.mark.parametrize("inner_state", ["keep", "mean", "reset"])
def test_a_merge_finds_all_at_their_trainers_parameters(
    diverging: dict[str, Any], inner_state: Any
) -> None:
    run = language_run(
        num_trainers=2,
        workers_per_trainer=2,
        **diverging,
        batch=NormTest(eta=0.9),
        fates=MergeFates(inner_state=inner_state),
        guards=BatchGuards(initial=9, minimum=8, maximum=40),
        merge=MergeSmallest(count=2, every=2, first_round=2),
    )
    first, second = run.rounds(2)
    assert second.merges and not first.merges
    assert list(run.trainers) == [second.merges[0].survivor]
    (trainer,) = run.trainers.values()
    for worker in run.workers.values():
        assert all(
            a.equal(b)
            for a, b in zip(worker.replica.params, trainer.outer.global_params, strict=True)
        )
    list(run.rounds(2))


@pytest.mark.parametrize(
    "wire",
    [None, Int4(block=8), Int2(block=8), Int1(block=16)],
    ids=["fp32", "int4", "int2", "int1"],
)
@pytest.mark.parametrize(
    "step", [4, 9, *(pytest.param(step, marks=pytest.mark.nightly) for step in (1, 6, 7, 15))]
)
def test_stopped_anywhere_it_resumes_bit_for_bit(step: int, wire: Any) -> None:
    """Residuals, mixed parameters and diverged workers survive, also if a fragment is in flight."""
    settings = {
        "streaming": Streaming(fragments=2, tau=2),
        "wire": wire,
    }
    data = Interrupting(tokens(2000, 4))
    whole, first, second = (
        language_run(**settings),
        language_run(**settings, data=data),
        language_run(**settings),
    )
    expected = list(whole.rounds(4))
    data.before(2 * step, first.stop, streams=[0])  # Two micro-batches a step.
    reports = list(first.rounds(4))
    assert len(reports) < 4
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    reports += list(second.rounds(4 - len(reports)))
    assert [report.trainers for report in reports] == [report.trainers for report in expected]
    assert [report.sync for report in reports] == [report.sync for report in expected]
    assert params_of(second).equal(params_of(whole))
    for worker, other in zip(second.workers.values(), whole.workers.values(), strict=True):
        assert all(
            a.equal(b)
            for a, b in zip(
                [*worker.replica.params, *worker.replica.residuals],
                [*other.replica.params, *other.replica.residuals],
                strict=True,
            )
        )


def test_bytes_and_compression_of_a_round() -> None:
    # Five tensors of 35, 25, 5, 25, 5 float64: 760 bytes. In int8 blocks of 16: 3 + 2 + 1 + 2 + 1
    # blocks of 16 + 4 bytes: 180.
    plain = next(language_run().rounds(1)).sync
    assert (plain.bytes, plain.compression_ratio) == (760, 1.0)
    for streaming in (None, Streaming(fragments=3, tau=1)):
        sync = next(language_run(wire=Int8(block=16), streaming=streaming).rounds(1)).sync
        assert (sync.bytes, sync.compression_ratio) == (180, 760 / 180)
    alone = next(language_run(wire=Int8(block=16), workers_per_trainer=1).rounds(1))
    assert (alone.sync.bytes, alone.sync.compression_ratio) == (0, None)
    assert alone.trainers[0].cosine_similarity is None and alone.trainers[0].wire_error is None


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operator allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        given = {
            argument.untyped_storage().data_ptr()
            for argument in (*args, *kwargs.values())
            if isinstance(argument, Tensor)
        }
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            self.bytes = max(self.bytes, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize(
    "wire",
    [None, Int8(block=16), Int4(block=16), Int2(block=16), Int1(block=16)],
    ids=["fp32", "int8", "int4", "int2", "int1"],
)
def test_a_sync_stages_a_fragment_at_a_time(wire: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No operator of a sync makes anything larger than the largest fragment in the parameters' own
    type, padding included.
    """
    monkeypatch.setattr(
        compression, "PIECE", 1024
    )  # What a format makes beside it has a fixed size, here smaller than a fragment.
    run = language_run(
        build_model=lambda: BlockLM(width=100), streaming=Streaming(fragments=3), wire=wire
    )
    list(run.rounds(1))  # Momentum is made in the first.
    fragments = [
        sum(run.workers[0].replica.params[place].numel() for place in places)
        for places in run.trainers[0].outer.fragments
    ]
    seen = Largest()
    run.round(phase=lambda name: seen if name == "sync" else nullcontext())
    assert max(fragments) < 0.6 * sum(fragments)
    assert 0 < seen.bytes <= 8 * (max(fragments) + 2 * 16)


def test_cosine_and_error_of_a_round() -> None:
    """Both equal the values computed from the workers' differences just before the sync."""
    for wire, bound in ((None, 0.0), (Int4(block=8), 0.35)):
        run = language_run(
            wire=wire, workers_per_trainer=3, guards=BatchGuards(initial=10), data=tokens(2000, 4)
        )
        start = params_of(run)
        done, ends = round_with_ends(run)
        report = done.trainers[0]
        weights = [0.4, 0.3, 0.3]
        moves = [weight * (start - end) for weight, end in zip(weights, ends, strict=True)]
        pairs = [(0, 1), (0, 2), (1, 2)]
        norms = [float(moves[a].norm() * moves[b].norm()) for a, b in pairs]
        cosines = [
            float(nn.functional.cosine_similarity(moves[a], moves[b], dim=0)) for a, b in pairs
        ]
        expected = sum(norm * cosine for norm, cosine in zip(norms, cosines, strict=True)) / sum(
            norms
        )
        assert report.cosine_similarity == pytest.approx(
            expected, rel=1e-6 if wire is None else 0.1
        )
        assert report.wire_error == 0 if wire is None else 0.01 < report.wire_error < bound  # type: ignore[operator]


@pytest.mark.nightly
def test_lossy_formats_train_nearly_as_fp32_does() -> None:
    formats = (None, Int4(), Int2(block=16))
    losses = [list(language_run(wire=wire).rounds(30))[-1].train_loss for wire in formats]
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=0.02)


@pytest.mark.parametrize(
    "streaming", [None, Streaming(fragments=2, tau=2)], ids=["plain", "streaming"]
)
def test_what_is_not_finite_is_named_and_reaches_nobody(streaming: Streaming | None) -> None:
    run = language_run(wire=Int4(), streaming=streaming)
    list(run.rounds(1))
    before = params_of(run)

    def poison(*of_the_hook: Any) -> None:
        run.workers[1].replica.params[3].data[0, 1] = float("inf")
        for parameter in run.workers[1].replica.params:
            parameter.grad = None

    run.workers[1].optimizers[0].register_step_post_hook(poison)
    with pytest.raises(NonFiniteLossError, match=r"trainer 0, worker 1, inner step \d"):
        run.round(1 if streaming is None else None)
    assert params_of(run).equal(before)
    assert all(bool(tensor.isfinite().all()) for tensor in run.workers[0].replica.params)


def test_huge_parameters_count_as_infinite() -> None:
    """The difference of such parameters would overflow."""
    zeros = TensorSource(torch.zeros(12, 3), torch.zeros(12), num_streams=2)
    run = make_run(sync_every=1, data=zeros)
    run.workers[0].replica.params[0].data.fill_(2e37)
    with pytest.raises(
        NonFiniteLossError,
        match="parameter weight is not finite in trainer 0, worker 0, inner step 1",
    ):
        run.round()


@pytest.mark.parametrize(
    "wire",
    [None, Bf16(), Int8(), Int4(), Int2(), Int1()],
    ids=["fp32", "bf16", "int8", "int4", "int2", "int1"],
)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_drop_in_names_what_is_not_finite_before_it_reaches_anyone(wire: Any, value: float) -> None:
    models = [linear(), linear()]
    diloco = DiLoCo(models, outer=outer_sgd(0.7), sync_every=1, wire=wire)
    models[1].bias.data.fill_(value)  # type: ignore[operator]
    with pytest.raises(
        NonFiniteLossError, match="parameter bias is not finite in worker 1, inner step 1"
    ):
        diloco.step()
    assert all(bool(parameter.isfinite().all()) for parameter in models[0].parameters())


def test_drop_in_streams_as_the_run_does() -> None:
    streaming, wire = Streaming(fragments=2, tau=1, alpha=0.5), Int1(block=16)
    settings: dict[str, Any] = {
        "outer": outer_sgd(0.7, 0.6, True),
        "sync_every": 6,
        "streaming": streaming,
        "wire": wire,
    }
    run = language_run(**settings, guards=BatchGuards(initial=8))
    list(run.rounds(3))

    def loop(
        diloco: DiLoCo,
        models: list[nn.Module],
        optimizers: list[torch.optim.Optimizer],
        first: int,
        last: int,
    ) -> None:
        data = tokens(2000, 4)
        for step in range(first, last):
            for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                optimizer.zero_grad()
                batch = data.read(worker, 4 * step, 4)
                loss = sum(next_token(model, batch[part : part + 2]) * 0.5 for part in (0, 2))
                loss.backward()  # type: ignore[union-attr]
                optimizer.step()
            diloco.step()

    for stop in (18, 5, 6, 8, 12, 15):
        models: list[nn.Module] = [BlockLM(), BlockLM()]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
        diloco = DiLoCo(models, **settings)
        loop(diloco, models, optimizers, 0, stop)
        state = copy.deepcopy(diloco.state_dict())
        diloco = DiLoCo(copies := copy.deepcopy(models), **settings)
        for mine, saved in zip(copies, models, strict=True):
            mine.load_state_dict(saved.state_dict())
        others = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in copies]
        for optimizer, saved in zip(others, optimizers, strict=True):
            optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
        diloco.load_state_dict(state)
        loop(diloco, copies, others, stop, 18)
        for worker, model in enumerate(copies):
            for got, wanted in zip(
                model.parameters(), run.workers[worker].replica.params, strict=True
            ):
                torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("resumes", [False, True])
def test_drop_in_weights_of_a_fragment_are_the_samples_since_it_was_sent(resumes: bool) -> None:
    """By hand: three steps of 1, 3 and 5 against 1 sample each; a step without samples is no error
    if others had some.
    """

    def begin() -> DiLoCo:
        streaming = Streaming(tau=1, alpha=0.0)
        return DiLoCo(models, outer=None, sync_every=3, streaming=streaming)

    models = [linear(), linear()]
    diloco = begin()
    start = models[0].weight.detach().clone()
    moved, shares = [0.0, 0.0], []
    counts = [(0, 0), (3, 1), (5, 1), (1, 1), (1, 1), (2, 6)]
    expected = start.clone()
    for step, samples in enumerate(counts):
        for model, move in zip(models, (1.0, 2.0), strict=True):
            model.weight.data += move  # type: ignore[operator]
        diloco.step(samples=samples)
        if resumes:
            state, diloco = copy.deepcopy(diloco.state_dict()), begin()
            diloco.load_state_dict(state)
        moved = [moved[0] + 1, moved[1] + 2]
        shares.append(samples)
        if step in (1, 4):
            total = [sum(share[worker] for share in shares) for worker in (0, 1)]
            expected += (total[0] * moved[0] + total[1] * moved[1]) / sum(total)
            shares = []
        if step in (2, 5):
            torch.testing.assert_close(models[0].weight.detach(), expected)
            moved = [0.0, 0.0]


def test_drop_in_counts_samples_for_each_fragment_and_for_the_round() -> None:
    """By hand: one worker has 0 and the other 3, so a mean is 3 times the share of the other. The
    first fragment is sent after one step of two, the other and the buffers after both.
    """
    models = [nn.Sequential(nn.BatchNorm1d(1), nn.BatchNorm1d(1)) for _ in range(2)]
    streaming = Streaming(fragments=2, alpha=0.0)
    diloco = DiLoCo(models, outer=None, sync_every=2, streaming=streaming)
    found = []
    for samples in [(3, 1), (1, 1), (1, 3), (3, 1)]:
        for model, value in zip(models, (0.0, 3.0), strict=True):
            for layer in model:
                nn.init.constant_(layer.weight, value)  # type: ignore[arg-type]
                layer.running_mean.fill_(value)  # type: ignore[operator, union-attr]
        diloco.step(samples=samples)
        first, last = models[0]
        seen = first.weight, last.weight, first.running_mean
        found.append([each.item() for each in seen])  # type: ignore[union-attr, operator]
    assert found == [[0.75, 0, 0], [0, 1, 1], [2, 0, 0], [0, 1.5, 1.5]]


@pytest.mark.parametrize(
    ("tau", "alpha", "expected"),
    [
        (0, 0.0, [(-6.0, -4.0), (-6.0, -6.0), (-6.0, -10.0)]),
        (0, 0.5, [(-6.5, -4.0), (-6.25, -6.0), (-11.25, -14.0)]),
        (0, 1.0, [(-7.0, -4.0), (-6.0, -6.0), (-18.0, -18.0)]),
        (1, 0.0, [(-4.0, -3.0), (-4.0, -5.0), (-4.0, -9.0)]),
        (1, 0.5, [(-4.75, -3.0), (-5.125, -5.5), (-10.125, -13.5)]),
        (1, 1.0, [(-5.5, -3.0), (-6.0, -6.0), (-18.0, -18.0)]),
    ],
)
def test_a_trajectory_of_two_fragments_by_hand(
    tau: int, alpha: float, expected: list[tuple[float, float]]
) -> None:
    """The cases of torchft's fixtures: fragments of a weight each, H = 4, outer SGD with lr 0.5.

    Both weights of the first worker fall by 1 in each of six steps, those of the second by 3.
    For tau = 1 and alpha = 0.5 the first fragment leaves after step 1 at -1 and -3, so its
    pseudo-gradient is 2; after step 2 its global weight is -1, and the workers', at -2 and -6,
    become -1.5 and -3.5. It leaves again after step 5 at -4.5 and -12.5: -1 + 8.5 = 7.5, so its
    global weight is -4.75 after step 6, where -5.5 and -15.5 become -5.125 and -10.125. The second
    fragment leaves after step 3 at -3 and -9: global -3, and after step 4 -4 and -12 become -3.5
    and -7.5.
    """
    models = [nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(2))) for _ in range(2)]
    for weight in models[0].parameters():
        weight.data.zero_()
    diloco = DiLoCo(
        models,
        outer=outer_sgd(0.5, 0.0, False),
        sync_every=4,
        streaming=Streaming(fragments=2, tau=tau, alpha=alpha),
    )
    for _ in range(6):
        for model, fall in zip(models, (1.0, 3.0), strict=True):
            for weight in model.parameters():
                weight.data -= fall
        diloco.step()
    held = [diloco.state_dict()["outer"]["params"], *(list(model.parameters()) for model in models)]
    assert [tuple(float(weight.detach()) for weight in params) for params in held] == expected


def test_drop_in_loaded_while_a_fragment_travels_forgets_it() -> None:
    def begin() -> tuple[nn.Module, DiLoCo]:
        model = linear()
        return model, DiLoCo(
            model, outer=outer_sgd(0.7, 0.6, True), sync_every=6, streaming=Streaming(tau=4)
        )

    def train(model: nn.Module, diloco: DiLoCo, first: int, last: int) -> None:
        for step in range(first, last):
            model.weight.data += step  # type: ignore[operator]
            diloco.step()

    model, diloco = begin()
    train(model, diloco, 0, 4)
    saved = copy.deepcopy((model.state_dict(), diloco.state_dict()))
    train(model, diloco, 4, 9)
    other, fresh = begin()
    for target, loader in ((model, diloco), (other, fresh)):
        target.load_state_dict(saved[0])
        loader.load_state_dict(copy.deepcopy(saved[1]))
        train(target, loader, 4, 8)
    assert model.weight.equal(other.weight)  # type: ignore[operator]


@pytest.mark.parametrize(
    "diverging",
    [{"streaming": Streaming(tau=1, alpha=0.5)}, {"wire": Int1(block=8)}],
    ids=["streaming", "int1"],
)
def test_drop_in_loads_the_global_parameters(diverging: dict[str, Any]) -> None:
    models = [linear(), linear()]
    diloco = DiLoCo(models, outer=outer_sgd(0.7), sync_every=2, **diverging)
    start = models[0].weight.detach().clone()
    diloco.load_global()
    assert models[0].weight.equal(start) and models[1].weight.equal(start)  # type: ignore[operator]
    for _ in range(2):
        for model, move in zip(models, (1.0, 2.0), strict=True):
            model.weight.data += move * torch.tensor([1.0, 0.5, 0.25])  # type: ignore[operator]
        diloco.step(samples=[3, 1])
    weight, bias = diloco.state_dict()["outer"]["params"]
    assert not models[0].weight.equal(models[1].weight)  # type: ignore[operator]
    diloco.load_global()
    for model in models:
        assert model.weight.equal(weight) and model.bias.equal(bias)  # type: ignore[operator]
    diloco.step(samples=[3, 1])
    with pytest.raises(ValueError, match="load global parameters after a step that returned True"):
        diloco.load_global()


def test_outer_state_in_host_memory_is_the_same() -> None:
    plain, host = language_run(), language_run(memory=OuterMemory(on_host=True))
    assert list(plain.rounds(3)) == list(host.rounds(3))
    assert params_of(plain).equal(params_of(host))


def test_small_problem_with_threads() -> None:
    """A thread exchanges fragments while workers train on other threads."""
    one = make_run(
        workers_per_trainer=4, streaming=Streaming(tau=2), placement=OneProcess(threads=1)
    )
    many = make_run(
        workers_per_trainer=4, streaming=Streaming(tau=2), placement=OneProcess(threads=4)
    )
    list(one.rounds(5))
    list(many.rounds(5))
    assert params_of(one).equal(params_of(many))
