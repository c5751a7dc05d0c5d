"""Random runs, and loops of one's own, compute what `oracle.py` computes: parameters, batches,
streams and merges, and so they do if they were saved and loaded on the way.
"""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from adloco import (
    AdLoCo,
    BatchGuards,
    ConstantBatch,
    DiLoCo,
    LearningRate,
    MergeFates,
    MergeLargestWithSmallest,
    MergeSmallest,
    NormTest,
    Streaming,
    SwitchMode,
    TensorSource,
)
from adloco.algorithms.method import SyncWeights
from adloco.distributed.launch.launcher import place
from adloco.distributed.testing import run_on_ranks
from adloco.distributed.wire.bf16 import Bf16
from adloco.distributed.wire.feedback import Feedback
from adloco.distributed.wire.int1 import Int1
from adloco.distributed.wire.int2 import Int2
from adloco.distributed.wire.int4 import Int4
from adloco.distributed.wire.int8 import Int8
from adloco.distributed.wire.wire_format import WireFormat
from adloco.rules.batch_rules.ramp import RampBatch
from tests.algorithms.oracle import Array, Oracle, Settings, Wire
from tests.problems import Interrupting, adamw, make_run, outer_sgd, params_of, squared_error

NIGHTLY = pytest.mark.nightly
QUICK = (3, 5, 16, 65, 77, 81, 136, 199, 211, 237, 248, 344, 476, 567)
"""Seeds that together have every choice of `drawn` where it acts: a wire format and feedback among
several workers, a fate in a merge of trainers whose requests differ.
"""
INNER: dict[str, Callable[[float], Any]] = {
    "sgd": lambda lr: lambda model: [torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)],
    "adamw": adamw,
}
POLICIES = {"smallest": MergeSmallest, "largest-with-smallest": MergeLargestWithSmallest}


WIRES: dict[str, list[WireFormat]] = {
    "bf16": [Bf16(), Bf16(), Bf16()],
    "int8": [Int8(block=8), Int8(block=8), Int8(block=8)],
    "int4": [Int4(block=8), Int4(block=8), Int8()],
    "int2": [Int2(block=16), Int4(), Int8()],
    "int1": [Int1(block=8), Int4(), Int8()],
}
"""Of pseudo-gradients, of differences and outer momentum, and of parameters in a merge."""


class Net(nn.Module):
    """The model of the oracle: two layers that are fragments of their own, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(2))
        self.head = nn.Linear(3, 1, bias=False)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = torch.tanh(block(inputs))
        found: Tensor = self.head(inputs)
        return found


def drawn(seed: int) -> Settings:
    """Settings that fit together."""
    draws = random.Random(seed)
    one_of = draws.choice
    trainers, workers = one_of([1, 1, 2, 3, 4]), one_of([1, 1, 2, 3])
    alone = trainers == workers == 1
    everyone = range(trainers * workers)
    dropped = tuple(sorted(draws.sample(everyone, one_of([0, 0, min(1, len(everyone) - 1)]))))
    rule = one_of(["constant", "ramp", "unbiased", "unbiased", "plug-in"])
    shape = one_of(["cosine", "wsd", "constant"])
    sync_every, fragments = draws.randint(1, 7), draws.randint(1, 3)
    fragments = min(fragments, sync_every)
    tau = draws.randint(0, sync_every // fragments - 1)
    wire = one_of(["fp32", "fp32", *WIRES])
    minimum = draws.randint(1, 4)
    initial = draws.randint(minimum, 12)
    return Settings(
        num_trainers=trainers,
        workers_per_trainer=workers,
        dropped=dropped,
        sync_every=sync_every,
        sync_growth=0.0 if shape == "constant" else one_of([0.0, 0.0, 0.5, 1.0]),
        max_grad_norm=one_of([0.0, 0.3, 1.0]),
        inner=one_of(["sgd", "adamw"]),
        lr=one_of([0.01, 0.03]),
        shape=shape,
        total_samples=draws.randint(300, 1500),
        warmup=one_of([0.0, 0.1, 0.3]),
        final=one_of([0.1, 0.5]),
        coupling=one_of(["none", "sqrt", "linear"]),
        outer=one_of([None, (1.0, 0.0, False), (0.7, 0.9, True), (0.8, 0.5, False)]),
        equal_weights=one_of([False, False, True]),
        fragments=fragments,
        tau=tau,
        alpha=one_of([0.0, 0.5, 1.0]) if tau else one_of([0.0, 0.0, 0.25]),
        wire=wire,
        feedback=wire in WIRES and one_of([False, True]),
        feedback_decay=one_of([0.9, 1.0]),
        rule=rule,
        eta=one_of([0.4, 0.8, 1.5, 3.0]),
        ramp=(draws.randint(1, 8), draws.randint(8, 40), draws.randint(50, 400)),
        initial=initial,
        minimum=minimum,
        maximum=draws.randint(max(initial, 16), 60),
        max_growth=one_of([1.3, 2.0, float("inf")]),
        hysteresis=one_of([0.0, 0.2]),
        grow_only=one_of([False, True]),
        groups=draws.randint(2, 5),
        test_steps=draws.randint(1, 4),
        last_steps=alone and one_of([False, True]),
        max_micro_batch=draws.randint(2, 8),
        multiplier=one_of([1.0, 1.5, 2.0]),
        mode=one_of(["switch", "switch", "always", "never"]),
        policy="none" if alone else one_of(["none", *POLICIES]),
        merge_count=draws.randint(2, 3),
        merge_every=draws.randint(1, 3),
        first_merge=draws.randint(1, 3),
        parameters=one_of(["weighted", "uniform", "survivor"]),
        outer_momentum=one_of(["weighted", "survivor", "reset"]),
        inner_state=one_of(["keep", "mean", "reset"]),
        streams=one_of(["keep", "balance"]),
        requested_batch=one_of(["survivor", "weighted", "sum"]),
    )


def samples(num_streams: int, seed: int) -> TensorSource:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(400, 3, generator=generator, dtype=torch.float64)
    noise = torch.randn(400, generator=generator, dtype=torch.float64)
    targets = torch.sin(inputs.sum(1)) + 0.3 * noise
    return TensorSource(inputs, targets, num_streams=num_streams, seed=seed)


def syncing(told: Settings) -> dict[str, Any]:
    return {
        "outer": outer_sgd(*told.outer) if told.outer else None,
        "streaming": Streaming(fragments=told.fragments, tau=told.tau, alpha=told.alpha),
        "wire": WIRES[told.wire][0] if told.wire in WIRES else None,
        "feedback": Feedback(
            feedback="params" if told.feedback else "none", feedback_decay=told.feedback_decay
        ),
    }


def run_of(told: Settings, data: Interrupting) -> AdLoCo:
    workers = [each for each in range(data.num_streams) if each not in told.dropped]
    rules: dict[str, Any] = {
        "constant": ConstantBatch(),
        "ramp": RampBatch(first=told.ramp[0], last=told.ramp[1], over_samples=told.ramp[2]),
    }
    merges: dict[str, Any] = {}
    if told.policy != "none":
        merges["merge"] = POLICIES[told.policy](
            count=told.merge_count, every=told.merge_every, first_round=told.first_merge
        )
    return make_run(
        build_model=Net,
        loss_fn=squared_error,
        data=data,
        num_trainers=told.num_trainers,
        workers_per_trainer=told.workers_per_trainer,
        dropped=told.dropped,
        sync_every=told.sync_every,
        sync_growth=told.sync_growth,
        max_grad_norm=told.max_grad_norm,
        inner=INNER[told.inner](told.lr),
        learning_rate=LearningRate(
            shape=told.shape,
            total_tokens=told.total_samples,
            warmup_fraction=told.warmup,
            final_fraction=told.final,
            coupling=told.coupling,
        ),
        placement=place(workers, threads=1),
        weights=SyncWeights(weights="equal" if told.equal_weights else "samples"),
        **syncing(told),
        batch=rules.get(told.rule) or NormTest(eta=told.eta, estimator=told.rule),
        guards=BatchGuards(
            initial=told.initial,
            minimum=told.minimum,
            maximum=told.maximum,
            max_growth=told.max_growth,
            hysteresis=told.hysteresis,
            grow_only=told.grow_only,
        ),
        test_groups=told.groups,
        test_steps=told.test_steps,
        test_step="last" if told.last_steps else "first",
        switch=SwitchMode(
            max_micro_batch=told.max_micro_batch, multiplier=told.multiplier, mode=told.mode
        ),
        fates=MergeFates(
            parameters=told.parameters,
            outer_momentum=told.outer_momentum,
            inner_state=told.inner_state,
            streams=told.streams,
            requested_batch=told.requested_batch,
        ),
        **merges,
    )


def wire_of(given: WireFormat | None) -> Wire | None:
    if given is None:
        return None
    wire = given
    return wire.block, lambda rows: wire.decode(wire.encode(torch.from_numpy(rows))).numpy()


def flat(tensors: Any) -> Array:
    return torch.cat([each.detach().flatten() for each in tensors]).numpy()


def oracle_of(told: Settings, source: TensorSource) -> Oracle:
    def read(stream: int, position: int, count: int) -> tuple[Array, Array]:
        inputs, targets = source.read(stream, position, count)
        return inputs.numpy(), targets.numpy()

    wires = [wire_of(each) for each in WIRES.get(told.wire, [None] * 3)]
    return Oracle(told, flat(Net().parameters()), read, wires)


@pytest.mark.parametrize("seeds", [QUICK, pytest.param(range(600), marks=NIGHTLY)])
def test_random_runs(seeds: Sequence[int]) -> None:
    for seed in seeds:
        check_run(drawn(seed), random.Random(seed))


@pytest.mark.parametrize(
    ("ranks", "seeds"),
    [
        (2, QUICK[-4:]),
        pytest.param(2, range(300), marks=NIGHTLY),
        pytest.param(3, range(300), marks=NIGHTLY),
    ],
)
def test_random_runs_on_ranks(ranks: int, seeds: Sequence[int]) -> None:
    run_on_ranks(check_runs_on_ranks, ranks, seeds, timeout_seconds=600)


def check_runs_on_ranks(seeds: Sequence[int]) -> None:
    for seed in seeds:
        told = drawn(seed)
        if (
            told.num_trainers * told.workers_per_trainer - len(told.dropped)
            >= dist.get_world_size()
        ):
            check_run(told, random.Random(seed))


def whole_state(run: AdLoCo) -> dict[str, Any]:
    """That of all ranks."""
    parts = [run.state_parts()]
    if dist.is_initialized():
        parts *= dist.get_world_size()
        dist.all_gather_object(parts, parts[0])
    return {name: part for each in parts for name, part in each.items()}


def check_run(told: Settings, draws: random.Random) -> None:
    """Six rounds, of which one is stopped within and one ends with a step of other samples."""
    source = samples(told.num_trainers * told.workers_per_trainer, draws.randrange(100))
    data, oracle = Interrupting(source), oracle_of(told, source)
    # AdamW counts its steps in float32, whose weighted mean is rounded.
    within = 1e-7 if told.inner_state == "mean" and told.policy != "none" else 1e-12
    run = run_of(told, data)
    stopped, shorter = draws.randrange(6), draws.randrange(6)
    for number in range(6):
        final = 0
        if number == shorter:
            fewest = run.fewest_samples
            final = draws.randrange(fewest, run.samples_per_inner_step + fewest)
        if number == stopped:
            data.before(draws.randint(1, 20), run.stop)
        report = run.round(final_samples=final)
        if number == stopped:
            state, run = whole_state(run), run_of(told, data)
            run.load_state_dict(state)
        if report is None:
            run.round()
        oracle.round(final)
        where = f"round {number} of {told}"
        trainers = {
            id: (each.worker_ids, each.requested_batch) for id, each in run.trainers.items()
        }
        assert trainers == {
            id: (each.workers, each.requested_batch) for id, each in oracle.trainers.items()
        }, where
        for id, worker in run.workers.items():
            same, params = oracle.workers[id], flat(worker.replica.params)
            assert (worker.stream, worker.position) == (same.stream, same.position), where
            assert np.abs(params - same.params).max() < within, where
        for id, trainer in oracle.trainers.items():
            if run.workers.keys() & {*trainer.workers}:
                assert np.abs(params_of(run, id).numpy() - trainer.global_params).max() < within, (
                    where
                )


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(600), marks=NIGHTLY)])
def test_random_loops_of_ones_own(seeds: Sequence[int]) -> None:
    for seed in seeds:
        told = replace(
            drawn(seed),
            num_trainers=1,
            dropped=(),
            rule="constant",
            mode="always",
            shape="constant",
            warmup=0.0,
            coupling="none",
            sync_growth=0.0,
            max_grad_norm=0.0,
            policy="none",
        )
        check_loop(told, random.Random(seed))


def check_loop(told: Settings, draws: random.Random) -> None:
    """Four rounds of `DiLoCo`, saved and loaded after one of the steps. Replicas are averaged after
    some rounds.
    """
    count = told.workers_per_trainer
    source = samples(count, draws.randrange(100))
    oracle = oracle_of(told, source)
    own, extra = divmod(max(told.initial, count), count)
    batches = [own + (worker < extra) for worker in range(count)]

    def made() -> tuple[list[nn.Module], list[torch.optim.Optimizer], DiLoCo]:
        models: list[nn.Module] = [Net() for _ in batches]
        inner = [INNER[told.inner](told.lr)(model)[0] for model in models]
        return models, inner, DiLoCo(models, sync_every=told.sync_every, **syncing(told))

    models, inner, loop = made()
    saved_after = draws.randint(1, 4 * told.sync_every)
    if draws.random() < 0.5:  # At the end of a round.
        saved_after = -(-saved_after // told.sync_every) * told.sync_every
    for step in range(1, 4 * told.sync_every + 1):
        for stream, batch in enumerate(batches):
            inner[stream].zero_grad()
            read = source.read(stream, (step - 1) * batch, batch)
            squared_error(models[stream], read).backward()
            inner[stream].step()
        ended = loop.step(None if told.equal_weights else batches)
        if step == saved_after:
            saved = copy.deepcopy([each.state_dict() for each in (*models, *inner, loop)])
            models, inner, loop = made()
            for each, state in zip((*models, *inner, loop), saved, strict=True):
                each.load_state_dict(state)
        if ended:
            oracle.round()
        if ended and draws.random() < 0.5:
            loop.load_global()
            oracle.load_global()
        for worker in oracle.workers.values() if ended else ():
            difference = flat(models[worker.id].parameters()) - worker.params
            assert np.abs(difference).max() < 1e-12, f"step {step} of {told}"
