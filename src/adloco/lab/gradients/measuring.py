"""Measures the gradients of a run's model at a checkpoint."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from adloco.errors import NonFiniteLossError, require
from adloco.lab.gradients.deviations import Deviations, Spread
from adloco.lab.gradients.full_gradient import FullGradient, cut_into_batches
from adloco.lab.gradients.parameter_parts import parameter_parts
from adloco.run.environment import choose_precision
from adloco.run.json_files import finite
from adloco.run.trained import Trained, own_task

DEFAULT_SAMPLES = 512
Advance = Callable[[int, int], None]
"""(samples done in this step, samples of both passes) -> None."""


def measure_gradients(
    trained: Trained,
    samples: int | None = None,
    batch: int | None = None,
    advance: Advance = lambda done, total: None,
) -> dict[str, Any]:
    """Compute the full gradient of a run's model, and how batch gradients deviate from it.

    The samples are the first ones of the run's data streams, equally many of each. So they are the
    same at every checkpoint.

    Args:
        trained: The model of a run.
        samples: Samples of the training data to take; 0: all; None: DEFAULT_SAMPLES, or all if
            there are fewer.
        batch: Samples of a batch; None: what the run takes in one pass. Larger batches accumulate.
        advance: Called while it computes.

    Returns:
        The content of a file in the run's folder `gradients`; docs/run-folder.md lists it.

    Raises:
        ValueError: There are not so many samples, or only one batch.
        NonFiniteLossError: The loss is nan or infinite.
    """
    stored, recipe = trained.stored, trained.stored.recipe
    at_once = recipe.switch.at_most(stored.algorithm["pass_limit"]).at_once
    size = at_once if batch is None else batch
    require((samples or 0) >= 0, f"--samples must be >= 0 (0: all), got {samples}")
    require(size > 0, f"--batch must be > 0, got {size}")
    require(
        samples != 0 or not recipe.data.streaming,
        "--samples 0 (all) needs data that has an end known beforehand, but the run in "
        f"{stored.folder} streams its data; give a number",
    )
    task = own_task(trained, recipe.evaluation)
    streams = recipe.method.num_workers
    there = task.num_train_samples(DEFAULT_SAMPLES if samples is None else samples)
    chosen = min(DEFAULT_SAMPLES, there) if samples is None else samples or there
    require(
        chosen <= there,
        f"--samples must be <= {there}, the samples of the training data, got {chosen}; 0 takes "
        "all",
    )
    batches = cut_into_batches(chosen, size, streams)
    require(
        len(batches) > 1,
        f"{chosen} samples are one batch of {size}, but at least two batches are compared; raise "
        "--samples or lower --batch",
    )
    full = FullGradient(
        model=trained.model,
        loss_fn=task.loss,
        source=task.train_source(streams, recipe.run.seed, least=streams),
        at_once=at_once,
        precision=choose_precision(recipe.run.precision, next(trained.model.parameters()).device),
    )
    found = full.deviations(batches, lambda done: advance(done, 2 * chosen))
    if not math.isfinite(found.loss + found.full_norm_sq):
        raise NonFiniteLossError(
            f"the loss or its gradient is not finite at {stored.checkpoint} (loss {found.loss}); "
            "take an earlier --checkpoint"
        )
    content: dict[str, Any] = finite(_content(found, trained, size))
    return content


def _content(found: Deviations, trained: Trained, batch: int) -> dict[str, Any]:
    stored = trained.stored
    parts = parameter_parts(trained.model)

    def grouped(names: Iterable[str]) -> list[dict[str, Any]]:
        members: dict[str, list[int]] = defaultdict(list)
        for index, name in enumerate(names):
            members[name].append(index)
        return [{"name": name, **numbers(indices)} for name, indices in members.items()]

    def numbers(indices: Iterable[int]) -> dict[str, Any]:
        chosen = list(indices)
        seen = found.estimate(chosen)
        return {
            "parameters": sum(parts[index].elements for index in chosen),
            "grad_variance": seen.grad_variance,
            "grad_norm_sq": seen.grad_norm_sq,
            "noise_scale": seen.noise_scale,
            "full_norm_sq": seen.plugin_norm_sq,
        }

    distances, cosines = found.distances(), found.cosines()
    others = found.cosines_with_others()
    return {
        "checkpoint": stored.checkpoint.name,
        "round": stored.algorithm["rounds_done"],
        "tokens": stored.algorithm["samples"] * stored.recipe.data.context_tokens,
        "trainer": trained.trainer,
        "samples": found.samples,
        "batch": batch,
        "num_batches": len(found.batches),
        "loss": found.loss,
        "total": numbers(range(len(parts))),
        "layers": grouped(part.layer for part in parts),
        "kinds": grouped(part.kind for part in parts),
        "deviation": asdict(Spread.of(distances)),
        "cosine": asdict(Spread.of(cosines)),
        "cosine_with_others": asdict(Spread.of(others)),
        "batches": [
            {
                "samples": each.samples,
                "norm": math.sqrt(each.norm_sq),
                "deviation": distance,
                "cosine": cosine,
                "cosine_with_others": other,
            }
            for each, distance, cosine, other in zip(
                found.batches, distances, cosines, others, strict=True
            )
        ],
    }
