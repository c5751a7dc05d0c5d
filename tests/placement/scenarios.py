"""Runs whose results must not depend on the placement; each returns plain values and tensors of the first process."""

import copy
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from adloco import AdLoCo, AugmentedInnerProductTest, BatchGuards, MergeFates, MergeLargestWithSmallest, MergeSmallest, NormTest
from adloco.placement.launch import place
from tests.problems import adamw, make_run, outer_sgd, regression

SETTINGS: dict[str, Any] = {
    "num_trainers": 3,
    "workers_per_trainer": 2,
    "inner": adamw(0.01),
    "outer": outer_sgd(0.7, 0.9, True),
    "batch": NormTest(eta=0.9),
    "guards": BatchGuards(initial=8, maximum=60, smoothing=0.5),
    "merge": MergeSmallest(every=2, first_round=2),
    "max_grad_norm": 1.0,
}
FATES = {
    "default": MergeFates(),
    "survivor": MergeFates(parameters="survivor", outer_momentum="survivor", inner_state="mean", streams="balance", requested_batch="sum"),
    "reset": MergeFates(parameters="uniform", outer_momentum="reset", inner_state="reset", requested_batch="weighted"),
}


def run_here(**changes: Any) -> AdLoCo:
    """A run on whatever placement this process is part of."""
    settings = SETTINGS | changes
    settings.setdefault("data", regression(settings["num_trainers"] * settings["workers_per_trainer"], samples=3000))
    workers = settings["num_trainers"] * settings["workers_per_trainer"]
    return make_run(**settings, placement=place(workers, torch.device("cpu"), threads=1))


def result(run: AdLoCo, rounds: int) -> dict[str, Any]:
    """Reports, and the whole state as a checkpoint would hold it."""
    reports = [asdict(report) for report in run.rounds(rounds)]
    return copy.deepcopy({"reports": reports, "state": run.state_dict()})


def merging(fate: str) -> dict[str, Any]:
    return result(run_here(fates=FATES[fate]), 5)


def moving() -> dict[str, Any]:
    """Four trainers of one worker; freed workers join trainers that did not merge."""
    run = run_here(num_trainers=4, workers_per_trainer=1, merge=MergeLargestWithSmallest(count=2, every=1, first_round=1))
    for trainer, request in enumerate((10, 60, 20, 50)):
        run.trainers[trainer].controller.requested_batch = request
    return result(run, 4)


def inner_products() -> dict[str, Any]:
    return result(run_here(batch=AugmentedInnerProductTest(), num_trainers=1, workers_per_trainer=5, guards=BatchGuards(initial=17, maximum=90)), 3)


def local_sgd() -> dict[str, Any]:
    return result(run_here(outer=None, num_trainers=2, workers_per_trainer=4), 4)


def stopped() -> dict[str, Any]:
    """Stopped in the third round at different steps of different workers."""
    run = run_here()
    list(run.rounds(2))
    read = run.workers[min(run.workers)]._settings.data.read

    def stop_at_once(stream: int, position: int, count: int) -> Any:
        run.stop()
        return read(stream, position, count)

    run.workers[min(run.workers)]._settings.data.read = stop_at_once  # type: ignore[method-assign]
    assert list(run.rounds(3)) == []
    assert run.in_round
    return copy.deepcopy({"state": run.state_dict()})


def go_on(state: dict[str, Any], rounds: int) -> dict[str, Any]:
    run = run_here()
    run.load_state_dict(state)
    return result(run, rounds)


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "fates: default": lambda: merging("default"),
    "fates: survivor": lambda: merging("survivor"),
    "fates: reset": lambda: merging("reset"),
    "workers that move to a third trainer": moving,
    "inner-product test, one trainer of five workers": inner_products,
    "plain mean": local_sgd,
}


def all_scenarios(names: list[str]) -> dict[str, dict[str, Any]]:
    return {name: SCENARIOS[name]() for name in names}
