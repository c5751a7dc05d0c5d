"""Measures the gradients of a run's model at a checkpoint."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

from adloco.distributed.parallel.gradient_norms import trainable
from adloco.errors import NonFiniteLossError, require
from adloco.lab.gradients.full_gradient import FullGradient, cut_into_batches, full_gradient
from adloco.run.environment import choose_precision
from adloco.run.json_files import finite
from adloco.run.trained import Trained, own_task
from adloco.tasks.island_texts import open_streams

DEFAULT_SAMPLES = 512
Advance = Callable[[int, int], None]
"""(samples done in this step, all samples) -> None."""


def measure_gradients(
    trained: Trained,
    samples: int | None = None,
    batch: int | None = None,
    advance: Advance = lambda done, total: None,
) -> dict[str, Any]:
    """Compute the full gradient of a run's model, and the noise of batches around it.

    The samples are the first ones of the run's data streams, equally many of each. So they are the
    same at every checkpoint.

    Args:
        samples: Samples of the training data to take; 0: all; None: DEFAULT_SAMPLES, or all if
            there are fewer.
        batch: Samples of a batch; None: what the run takes in one pass. Larger batches accumulate.

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
    batches = cut_into_batches(chosen, size, open_streams(task, streams))
    require(
        len(batches) > 1,
        f"{chosen} samples are one batch of {size}, but at least two batches are compared; raise "
        "--samples or lower --batch",
    )
    found = full_gradient(
        trained.model,
        task.loss,
        task.train_source(streams, recipe.run.seed, least=streams),
        batches,
        at_once=at_once,
        precision=choose_precision(recipe.run.precision, next(trained.model.parameters()).device),
        advance=lambda done: advance(done, chosen),
    )
    if not math.isfinite(found.loss + float(found.norms_sq.sum() + found.full_norms_sq.sum())):
        raise NonFiniteLossError(
            f"the loss or its gradient is not finite at {stored.checkpoint} (loss {found.loss}); "
            "take an earlier --checkpoint"
        )
    return _content(found, trained, size)


def _content(found: FullGradient, trained: Trained, batch: int) -> dict[str, Any]:
    stored = trained.stored
    elements = [parameter.numel() for parameter in trainable(trained.model)]
    names = [name for name, each in trained.model.named_parameters() if each.requires_grad]
    members: dict[str, list[int]] = defaultdict(list)
    for index, layer in enumerate(layers(names)):
        members[layer].append(index)

    def numbers(chosen: list[int]) -> dict[str, Any]:
        seen = found.estimate(chosen)
        return {
            "parameters": sum(elements[index] for index in chosen),
            "grad_variance": seen.grad_variance,
            "grad_norm_sq": seen.grad_norm_sq,
            "noise_scale": finite(seen.noise_scale),
        }

    return {
        "checkpoint": stored.checkpoint.name,
        "round": stored.algorithm["rounds_done"],
        "tokens": stored.algorithm["samples"] * stored.recipe.data.context_tokens,
        "trainer": trained.trainer,
        "samples": sum(found.sizes),
        "batch": batch,
        "num_batches": len(found.sizes),
        "loss": found.loss,
        "total": numbers([*range(len(elements))]),
        "layers": [{"name": name, **numbers(chosen)} for name, chosen in members.items()],
    }


def layers(names: Sequence[str]) -> list[str]:
    """The layer of each parameter: the repeated block that it is in, such as layers.0, or else its
    module. Without the words that all but the last of each begin with.

    names: Of the parameters.
    """
    paths = []
    for words in (name.split(".") for name in names):
        before = list(takewhile(lambda word: not word.isdecimal(), words))
        numbered = len(before) < len(words)
        paths.append(words[: len(before) + 1] if numbered else words[:-1] or words)
    columns = zip(*(path[:-1] for path in paths), strict=False)  # As many as the shortest path has.
    shared = len([*takewhile(lambda words: len({*words}) == 1, columns)])
    return [".".join(path[shared:]) for path in paths]
