"""What is unusual in the recipe of a run that begins, as sentences that are said before its first
round; and in one that is resumed with another budget.
"""

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from adloco.algorithms.optimizers import OuterMean
from adloco.config.sections import Recipe
from adloco.distributed.wire.plain import PlainWire
from adloco.rules.batch_rules.constant import ConstantBatch
from adloco.rules.batch_rules.ramp import RampBatch
from adloco.rules.batch_rules.seesaw import Seesaw
from adloco.rules.batch_rules.warmup import BatchWarmup
from adloco.rules.merge_policies.no_merge import NoMerge
from adloco.rules.shares import EqualShares


def cut_batches(recipe: Recipe) -> str:
    """A sentence if `batch.maximum` is below the plan of the batch rule; empty if it is not, or if
    the rule follows no plan of the recipe.
    """
    rule, end, largest = recipe.batch, recipe.learning_rate.final_fraction, 0.0
    if isinstance(rule, RampBatch):
        largest = max(rule.first, rule.last)
    elif isinstance(rule, BatchWarmup):
        largest = max(rule.batches)
    elif isinstance(rule, Seesaw):
        largest = recipe.guards.initial / end if end else math.inf
    maximum = recipe.guards.maximum
    return (
        f"batch.maximum is {maximum}, which is less than the largest batch that the plan of "
        "batch.rule has; batches end there"
        if largest > maximum
        else ""
    )


def without_effect(recipe: Recipe) -> str:
    """A sentence that names settings that differ from their defaults and have no effect beside
    others, with the reasons; empty if there are none.
    """
    found = [
        f"{' and '.join(names)} change{'s' * (len(names) == 1)} nothing: {reason}"
        for names, reason in _idle(recipe)
        if names
    ]
    largest, _ = recipe.after_merges
    return "; ".join(
        filter(None, [*found, *(own.unused(largest) for own in recipe.options.values())])
    )


def _idle(recipe: Recipe) -> Iterator[tuple[list[str], str]]:
    """(names of settings, maybe none; why they have no effect) for each possible reason."""
    rate, rule, policy = recipe.learning_rate, recipe.batch, recipe.merge
    lone, merges = recipe.method.num_trainers == 1, not isinstance(policy, NoMerge)
    if merges and lone:
        yield ["merge.policy"], "there is one trainer (method.num_trainers)"
    if lone or not merges:
        yield _changed("merge", recipe.fates), "trainers never merge"
    elif isinstance(recipe.outer, OuterMean):
        yield _changed("merge", recipe.fates, "outer_momentum"), "outer.update is mean"
    if rule.fewest_groups == 1:
        yield _changed("test", recipe.test), "this batch.rule measures no gradients"
    if isinstance(rule, ConstantBatch):
        changes = ("max_growth", "hysteresis", "grow_only")
        yield _changed("batch", recipe.guards, *changes), "batch.rule constant keeps the batch"
    if rate.coupling == "none":
        own = _changed("learning_rate", rate, "reference_batch")
        yield own, "learning_rate.coupling is none"
    if rate.shape != "wsd":
        ends = ("final_fraction",) if rate.shape == "constant" else ()
        own = _changed("learning_rate", rate, "decay_fraction", *ends)
        yield own, f"learning_rate.shape is {rate.shape}"
    if recipe.switch.mode != "switch":
        own = _changed("switch", recipe.switch, "multiplier")
        yield own, f"switch.mode is {recipe.switch.mode}"
    if not recipe.syncs:
        own = ["wire.format"] * (not isinstance(recipe.wire, PlainWire))
        own += ["placement.balance"] * (recipe.shares != EqualShares())
        own += _changed("outer", recipe.sync_weights)
        yield own, "no trainer ever has two workers"
    if not recipe.keeps_residuals and recipe.feedback.feedback != "none":
        yield (
            _changed("wire", recipe.feedback),
            "no residual is kept; give a lossy wire.format, and wire.feedback params",
        )
    if not recipe.task.packed:
        own = _changed("evaluation", recipe.evaluation, "windows")
        own += _changed("data", recipe.data, "cache")
        yield own, "they are for language models"


def _changed(section: str, owner: Any, *names: str) -> list[str]:
    """The settings of an object that differ from their defaults, of these names; none: of all."""
    keys = names or tuple(field.name for field in fields(owner))
    default = type(owner)()
    return [f"{section}.{key}" for key in keys if getattr(owner, key) != getattr(default, key)]


def other_schedule(recipe: Recipe, *, resumed: bool = False) -> str:
    """A sentence if the learning rate falls over other tokens than the run has, as it does where a
    recipe from a run's folder gets another budget, or has no warm-up for want of tokens; empty if
    neither is so.

    resumed: True if the run has begun, so that only its budget can change.
    """
    rate, tokens = recipe.learning_rate, recipe.run.tokens
    if rate.warmup_fraction and not rate.total_tokens:
        return (
            "learning_rate.warmup_fraction is a part of learning_rate.total_tokens, which is 0 "
            "without run.tokens, so there is no warm-up"
        )
    advice = f"with run.tokens {rate.total_tokens:,} it does"
    return (
        f"learning_rate.total_tokens is {rate.total_tokens:,} and run.tokens {tokens:,}, so the "
        "learning rate does not end its fall with the run; "
        f"{advice if resumed else 'total_tokens 0 is run.tokens'}"
        if rate.shape != "constant" and 0 < tokens != rate.total_tokens
        else ""
    )


def unread_streams(streams: int, recipe: Recipe) -> str:
    """A sentence if a problem's data has streams that no worker reads; empty if it has none."""
    workers = recipe.method.num_workers
    return (
        f"the problem's data has {streams} streams and the run has {workers} workers, so "
        f"{streams - workers} of them are never read; give num_streams={workers}"
        if streams > workers
        else ""
    )
