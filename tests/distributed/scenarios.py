"""Runs whose results must not depend on the placement; each returns plain values and tensors of the
first process.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adloco import (
    AdLoCo,
    BatchGuards,
    MergeFates,
    MergeLargestWithSmallest,
    MergeSmallest,
    NormTest,
    OuterMemory,
    SwitchMode,
    TensorSource,
)
from adloco.distributed.dtensor import local
from adloco.distributed.launch.launcher import place
from adloco.distributed.wire.bf16 import Bf16
from adloco.distributed.wire.feedback import Feedback
from adloco.distributed.wire.int1 import Int1
from adloco.distributed.wire.int2 import Int2
from adloco.distributed.wire.int4 import Int4
from adloco.rules.sync_schedule import Streaming
from tests.problems import (
    BlockLM,
    Interrupting,
    adamw,
    linear,
    make_run,
    next_token,
    outer_sgd,
    regression,
    tokens,
)


class SlowedSGD(torch.optim.Optimizer):
    """SGD whose rate falls as gradients add up. It has no state but a number in its group."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__(parameters, {"lr": 0.7, "seen": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        gradients = [each.grad for each in group["params"]]
        group["seen"] += sum(float(gradient.norm()) for gradient in gradients)
        for parameter, gradient in zip(group["params"], gradients, strict=True):
            parameter.sub_(gradient, alpha=group["lr"] / group["seen"])


class CountingSGD(SlowedSGD):
    """It counts the steps of each parameter too, in whole numbers, and has a list of means."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("steps", torch.tensor(0)).add_(1)
            (mean,) = state.setdefault("means", [torch.zeros_like(parameter)])
            parameter.sub_(mean.lerp_(parameter.grad, 0.5), alpha=0.1)


SETTINGS: dict[str, Any] = {
    "build_model": lambda: linear().double(),
    "num_trainers": 3,
    "workers_per_trainer": 2,
    "inner": adamw(0.01),
    "outer": outer_sgd(0.7, 0.9, True),
    "batch": NormTest(eta=0.9),
    # Four samples for each of six workers, wherever they go: four ranks of an island have work
    # without rounding.
    "guards": BatchGuards(initial=24, minimum=24, maximum=60),
    "merge": MergeSmallest(every=2, first_round=2),
    "switch": SwitchMode(max_micro_batch=8, mode="always"),
    "max_grad_norm": 1.0,
}
FATES = {
    "default": MergeFates(),
    "survivor": MergeFates(
        parameters="survivor",
        outer_momentum="survivor",
        inner_state="mean",
        streams="balance",
        requested_batch="sum",
    ),
    "reset": MergeFates(
        parameters="uniform",
        outer_momentum="reset",
        inner_state="reset",
        requested_batch="weighted",
    ),
}


ISLAND = [1, 1]
"""Shards and replicas of each island, set for all scenarios of this process."""


def run_here(**changes: Any) -> AdLoCo:
    """A run on whatever placement this process is part of."""
    settings = SETTINGS | changes
    workers = settings["num_trainers"] * settings["workers_per_trainer"]
    settings.setdefault("data", regression(workers, samples=3000, dtype=torch.float64))
    return make_run(**settings, placement=place(workers, torch.device("cpu"), 1, *ISLAND))


def result(run: AdLoCo, rounds: int, final_samples: int = 0) -> dict[str, Any]:
    """Reports, and the whole state as a checkpoint would hold it.

    final_samples: Samples of the last inner step of a round more; 0: no such round.
    """
    reports = [asdict(report) for report in run.rounds(rounds)]
    if final_samples:
        before = run.state.samples + (run.sync_every - 1) * run.samples_per_inner_step
        last = run.round(final_samples=final_samples)
        assert last is not None and last.samples == before + final_samples
        reports.append(asdict(last))
    here = {
        trainer.id: trainer
        for trainer in run.trainers.values()
        if run.placement.local(trainer.worker_ids)
    }
    bits = {
        trainer: [local(tensor).detach() for tensor in here[trainer].outer.parameters()]
        for trainer in here
    }
    return copy.deepcopy({"reports": reports, "state": run.state_dict(), "bits": bits})


def merging(fate: str) -> dict[str, Any]:
    return result(run_here(fates=FATES[fate]), 5)


def moving(**changes: Any) -> dict[str, Any]:
    """Four trainers of one worker; freed workers join trainers that did not merge."""
    guards = BatchGuards(initial=16, minimum=16, maximum=60)
    run = run_here(
        num_trainers=4,
        workers_per_trainer=1,
        guards=guards,
        merge=MergeLargestWithSmallest(count=2, every=1, first_round=1),
        **changes,
    )
    for trainer, request in enumerate((16, 60, 20, 50)):
        run.trainers[trainer].controller.requested_batch = request
    return result(run, 4)


def local_sgd() -> dict[str, Any]:
    return result(
        run_here(
            outer=None,
            num_trainers=2,
            workers_per_trainer=4,
            guards=BatchGuards(initial=37, minimum=32),
        ),
        4,
    )


def language_model(**changes: Any) -> AdLoCo:
    """Accumulation, unequal batches and micro-batches, clipping, and two norm tests a round."""
    settings = {
        "build_model": BlockLM,
        "loss_fn": next_token,
        "num_trainers": 2,
        "workers_per_trainer": 2,
        "sync_every": 4,
        "test_steps": 2,
        "guards": BatchGuards(initial=27, minimum=16, maximum=61),
        "switch": SwitchMode(max_micro_batch=3, mode="always"),
        "max_grad_norm": 0.1,
    } | changes
    workers = settings["num_trainers"] * settings["workers_per_trainer"]
    settings.setdefault("data", tokens(4000, workers))
    return run_here(**settings)


def one_island(shards: int, replicas: int) -> dict[str, dict[str, Any]]:
    ISLAND[:] = shards, replicas
    return one_worker()


ALONE = {"num_trainers": 1, "workers_per_trainer": 1, "outer": None, "inner": adamw(0.003)}
FEW = ALONE | {"guards": BatchGuards(initial=5, minimum=5, maximum=11), "test_groups": 12}
"""Five groups of one sample: with 2 or 4 ranks, some have no group in the last pass."""


def one_worker() -> dict[str, dict[str, Any]]:
    """DDP-Norm and FSDP-Norm, where all ranks are one island."""
    few = FEW | {"batch": NormTest(eta=0.2)}
    runs = {"many samples": language_model(**ALONE), "few samples": language_model(**few)}
    # The last step has three samples, so one of four ranks has none.
    return {name: result(run, 4, final_samples=3) for name, run in runs.items()}


def streaming(**changes: Any) -> AdLoCo:
    """Three fragments, each in flight for one step; the last has also the modules outside the
    blocks.
    """
    settings: dict[str, Any] = {
        "streaming": Streaming(fragments=3, tau=1, alpha=0.3),
        "sync_every": 7,
        "outer": outer_sgd(0.7, 0.6, True),
    }
    return language_model(**settings | changes)


def padded(**changes: Any) -> dict[str, Any]:
    """A last block is padded, in shards at another place than in whole tensors.

    Micro-batches have 8 samples, because the collectives of shards take most of the time.
    """
    settings: dict[str, Any] = {
        "wire": Bf16(),
        "feedback": Feedback(feedback="params", feedback_decay=1.0),
        "switch": SwitchMode(max_micro_batch=8, mode="always"),
    }
    return result(streaming(**settings | changes), 3)


RUNS: dict[str, Callable[..., AdLoCo]] = {
    "plain": run_here,
    # In bf16 blocks say nothing: shards may end anywhere.
    "streaming": partial(streaming, wire=Bf16(), feedback=Feedback(feedback="params")),
}
DATA: dict[str, Callable[[], TensorSource]] = {
    "plain": lambda: regression(6, samples=3000, dtype=torch.float64),
    "streaming": lambda: tokens(4000, 4),
}
"""What these runs read."""


def stopped(shards: int = 1, replicas: int = 1, kind: str = "plain") -> dict[str, Any]:
    """Stopped in the third round at different steps of different workers."""
    ISLAND[:] = shards, replicas
    data = Interrupting(DATA[kind]())
    run = RUNS[kind](data=data)
    list(run.rounds(2))
    data.before(1, run.stop)
    assert list(run.rounds(3)) == []
    assert run.state.in_round
    return copy.deepcopy({"state": run.state_dict()})


def go_on(
    state: dict[str, Any], rounds: int, shards: int = 1, replicas: int = 1, kind: str = "plain"
) -> dict[str, Any]:
    ISLAND[:] = shards, replicas
    run = RUNS[kind]()
    run.load_state_dict(state)
    return result(run, rounds)


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "fates: default": lambda: merging("default"),
    "fates: survivor": lambda: merging("survivor"),
    "fates: reset": lambda: merging("reset"),
    "workers that move to a third trainer": moving,
    "own: workers that move to an outer optimizer with numbers": lambda: moving(outer=CountingSGD),
    "plain mean": local_sgd,
    "language model": lambda: result(language_model(), 4, final_samples=11),
    "streaming": lambda: result(streaming(), 4),
    "padded: bf16, residual in parameters": lambda: padded(),
    "padded: outer state in host memory": lambda: padded(memory=OuterMemory(on_host=True)),
    "lossy: int2": lambda: result(language_model(wire=Int2(block=8)), 4),
    "lossy: int4": lambda: result(language_model(wire=Int4(block=8)), 4),
    "lossy: int2, a merge of diverged replicas": lambda: result(
        language_model(wire=Int2(block=8), merge=MergeSmallest(count=2, every=1, first_round=2)), 4
    ),
    "lossy: int4, workers that move": lambda: moving(
        wire=Int4(block=8), feedback=Feedback(feedback="params", feedback_decay=1.0)
    ),
    "lossy: int1, streaming": lambda: result(streaming(wire=Int1(block=16)), 4),
}


def all_scenarios(
    names: list[str], shards: int = 1, replicas: int = 1
) -> dict[str, dict[str, Any]]:
    """Results of these scenarios, on islands of that shape."""
    ISLAND[:] = shards, replicas
    return {name: SCENARIOS[name]() for name in names}
