"""Target of a plan: the progress of the recipes' budget in tokens, or a loss."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adloco.config.sections import Recipe
from adloco.errors import require
from adloco.plan.candidates import Candidate
from adloco.plan.gap_law import NORMAL_90, RUNS, gap
from adloco.plan.loss_law import LossFit
from adloco.plan.short_runs import method_of, sync_every_of

Budget = Callable[[Recipe, float], float]
"""(recipe, trainer's batch in samples) -> tokens to the target; inf if it is out of reach."""
Loss = Callable[[Recipe, float, float], float]
"""(recipe, trainer's batch in samples, tokens) -> loss that is reached."""
Interval = Callable[[Recipe, float], tuple[float, float] | None]
"""(recipe, trainer's batch in samples) -> least and most tokens."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Progress or loss that a plan must reach."""

    name: str
    """In words."""
    tokens: Budget
    loss: Loss | None = None
    """The loss after so many tokens; None if no runs tell it."""
    interval: Interval | None = None
    """The tokens to the target, between which 90% of the laws have them that fit what was measured;
    None without."""
    assumptions: tuple[str, ...] = ()
    """Sentences."""
    prices_batches: bool = True
    """False if the noise scale, which tells what larger batches cost in tokens, is missing."""


def tokens_target(
    found: Sequence[Candidate], *, parameters: float, noise_scale: float | None
) -> Target:
    """The progress that the candidates' common budget in tokens makes in data-parallel training
    with the smallest batch of its candidates, or of all if none is data-parallel.

    Larger batches and fewer syncs make less progress with each token (docs/plan.md).

    noise_scale: B in samples: a batch b needs 1 + b / B times the tokens of a tiny one. None:
        batches cost nothing.

    Raises:
        ValueError: Recipes have different budgets, or none in tokens.
    """
    given = dict.fromkeys((candidate.name, candidate.recipe.run.tokens) for candidate in found)
    said = ", ".join(f"{name}: {tokens:,}" for name, tokens in given)
    budgets = {tokens for _, tokens in given}
    require(
        len(budgets) == 1 and 0 not in budgets,
        f"the recipes must have one budget in tokens to be compared, got {said}; give "
        "--run.tokens N",
    )
    tokens = float(found[0].recipe.run.tokens)
    parallel = [candidate for candidate in found if candidate.recipe.data_parallel]
    smallest = min(candidate.recipe.guards.initial for candidate in parallel or found)

    def needed(recipe: Recipe, batch: float, deviations: float = 0.0) -> float:
        """Tokens after which local training is where data-parallel training is after the budget."""
        price = (1 + batch / noise_scale) / (1 + smallest / noise_scale) if noise_scale else 1.0
        own = tokens * max(price, 1.0)
        workers, trainers = recipe.after_merges  # Each makes the progress by itself.
        syncs = own / (batch * recipe.data.context_tokens * sync_every_of(recipe))
        return (
            trainers
            * own
            * _times(lambda times: gap(parameters, workers, times * syncs).times_tokens(deviations))
        )

    def between(recipe: Recipe, batch: float) -> tuple[float, float] | None:
        if recipe.after_merges[0] < 2:
            return None
        return needed(recipe, batch, -NORMAL_90), needed(recipe, batch, NORMAL_90)

    batches = (
        f"A batch of b samples needs 1 + b / {noise_scale:g} times the tokens of a tiny one."
        if noise_scale
        else "The noise scale is not known, so larger batches cost no tokens: give --noise-scale."
    )
    several = any(candidate.recipe.after_merges[1] > 1 for candidate in found)
    apart = ("Trainers that never merge make the progress each by itself.",) if several else ()
    return Target(
        name=f"the progress that {tokens:,.0f} tokens make in data-parallel training"
        + (f" with {smallest} samples a step" if noise_scale else ""),
        tokens=needed,
        interval=between,
        prices_batches=noise_scale is not None,
        assumptions=(
            batches,
            *apart,
            f"Fewer syncs cost tokens by a law of runs with {RUNS}. Far from these it is a guess. "
            "Wire format and overlap cost none. Give --runs of your own to replace it.",
        ),
    )


def _times(needed: Callable[[float], float]) -> float:
    """Times the tokens that local training needs because of its gap at the end of them: more tokens
    have more syncs, and a smaller gap.

    needed: Takes times the tokens; returns times the tokens that the gap after so many needs.
    """
    fewest, most = 1.0, needed(1.0)
    for _ in range(40):
        middle = math.sqrt(fewest * most)
        if needed(middle) > middle:
            fewest = middle
        else:
            most = middle
    return most


def loss_target(
    found: Sequence[Candidate], fit: LossFit, loss: float | None, budget_batch: float
) -> Target:
    """A loss, with the tokens that each candidate needs for it by the law.

    Args:
        loss: The loss; None for the one that the first candidate has after its budget in tokens.
        budget_batch: Samples of a step of the first candidate, for that loss.
    """

    def known(recipe: Recipe, batch: float) -> dict[str, Any]:
        """Values that the law takes from a recipe."""
        method, _ = nearest_method(recipe, fit.law.methods)
        return {"method": method, "batch": batch, "sync_every": sync_every_of(recipe)}

    def loss_at(recipe: Recipe, batch: float, tokens: float) -> float:
        return fit.law.loss_at(tokens, **known(recipe, batch))

    for candidate in found:
        trainers = candidate.recipe.after_merges[1]
        unmeasured = nearest_method(candidate.recipe, fit.law.methods)[1]
        require(
            trainers == 1 or not any("trainers" in word for word in unmeasured),
            f"{candidate.label} has {trainers} trainers that never merge, and no run of --runs has "
            "as many; give one that has, or method.num_trainers 1",
        )
    if loss is None:
        first = found[0].recipe
        require(
            first.run.tokens > 0,
            f"{found[0].name} has no budget in tokens; give --run.tokens or --target-loss",
        )
        loss = loss_at(first, budget_batch, first.run.tokens)
    require(0 < loss < math.inf, f"--target-loss must be a number > 0, got {loss}")
    goal = loss
    return Target(
        name=f"a loss of {goal:.4g}",
        tokens=lambda recipe, batch: fit.law.tokens_to(goal, **known(recipe, batch)),
        interval=lambda recipe, batch: fit.tokens_interval(goal, **known(recipe, batch)),
        loss=loss_at,
        assumptions=_assumptions(fit, found),
    )


def nearest_method(recipe: Recipe, measured: Mapping[str, float]) -> tuple[str, list[str]]:
    """The measured method that differs in the fewest words, and what its runs lack. A lone worker
    never syncs, so it is nearest to several workers only if no others were measured.
    """
    wanted = {*_words(method_of(recipe))}
    apart = {name: wanted ^ {*_words(name)} for name in measured}
    name = min(apart, key=lambda name: ("1 worker" in apart[name], len(apart[name])))
    named = {word.split()[0] for word in wanted}
    # Settings that the recipe leaves at their defaults are no words of it.
    lacking = [word for word in apart[name] - wanted if word.split()[0] not in named]
    defaults = [f"without {word}" for word in lacking if "worker" not in word]
    return name, [*sorted(wanted & apart[name]), *sorted(defaults)]


def _words(method: str) -> list[str]:
    return re.split(r", (?=\w)", method)  # Not within outer.options.


def _assumptions(fit: LossFit, found: Sequence[Candidate]) -> tuple[str, ...]:
    unmeasured = dict.fromkeys(
        word for candidate in found for word in nearest_method(candidate.recipe, fit.law.methods)[1]
    )
    said = [f"{text[0].upper()}{text[1:]}." for text in fit.assumptions]
    if unmeasured:
        said.append(
            "No run measured what these cost in loss, so they cost as much as the nearest that "
            f"was measured: {', '.join(unmeasured)}."
        )
    for what, errors in (("each run", fit.runs), ("the longest runs", fit.longest)):
        if errors:
            said.append(
                f"The law misses the tokens of {what}, left out of its fit, by "
                f"{errors.median:.0%} (median) and {errors.worst:.0%} (worst)."
            )
    return tuple(said)
