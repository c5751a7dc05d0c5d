"""What is unusual in the recipe of a run that begins, as sentences that are said before its first
round; and in one that is resumed with another budget.
"""

import math

from adloco.config.sections import Recipe
from adloco.rules.batch_rules.ramp import RampBatch
from adloco.rules.batch_rules.seesaw import Seesaw
from adloco.rules.batch_rules.warmup import BatchWarmup


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
