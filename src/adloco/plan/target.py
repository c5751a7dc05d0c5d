"""What a plan is to reach: the tokens of the recipes' budget, or a loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from adloco.config.sections import Recipe
from adloco.errors import require
from adloco.plan.candidates import Candidate
from adloco.plan.loss_law import LossFit
from adloco.plan.short_runs import method_of, sync_every_of

Budget = Callable[[Recipe, float], float]
"""(recipe, trainer's batch in samples) -> tokens to the target; inf if it is out of reach."""
Loss = Callable[[Recipe, float, float], float]
"""(recipe, trainer's batch in samples, tokens) -> loss that is reached."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is to be reached."""

    name: str
    """In words."""
    tokens: Budget
    loss: Loss | None = None
    """The loss after so many tokens; None if no runs tell it."""
    assumptions: tuple[str, ...] = ()
    """Sentences."""


def tokens_target(found: Sequence[Candidate], fit: LossFit | None = None) -> Target:
    """The budget in tokens that all candidates share.

    Args:
        found: The candidates.
        fit: A law of the loss, by which their losses are predicted.

    Raises:
        ValueError: Recipes have different budgets, or none in tokens.
    """
    budgets = {candidate.name: candidate.recipe.run.tokens for candidate in found}
    said = ", ".join(f"{name}: {tokens:,}" for name, tokens in budgets.items())
    require(
        len({*budgets.values()}) == 1 and 0 not in budgets.values(),
        f"the recipes must have one budget in tokens to be compared, got {said}; give "
        "--run.tokens N",
    )
    tokens = float(found[0].recipe.run.tokens)
    unknown = "Nothing is known of the loss: give --runs to learn what H, batch and format cost."
    return Target(
        name=f"{tokens:,.0f} tokens",
        tokens=lambda recipe, batch: tokens,
        loss=_loss(fit) if fit else None,
        assumptions=_assumptions(fit, found) if fit else (unknown,),
    )


def loss_target(found: Sequence[Candidate], fit: LossFit, loss: float) -> Target:
    """A loss, with the tokens that each candidate needs for it by the law."""
    require(loss > 0, f"--target-loss must be > 0, got {loss}")

    def tokens(recipe: Recipe, batch: float) -> float:
        method, _ = nearest_method(recipe, fit.law.methods)
        every = sync_every_of(recipe)
        return fit.law.tokens_to(loss, method=method, batch=batch, sync_every=every)

    return Target(
        name=f"a loss of {loss:g}",
        tokens=tokens,
        loss=_loss(fit),
        assumptions=_assumptions(fit, found),
    )


def nearest_method(recipe: Recipe, measured: Mapping[str, float]) -> tuple[str, list[str]]:
    """The measured method that differs in the fewest words, and those words."""
    wanted = {*method_of(recipe).split(", ")}
    apart = {name: wanted ^ {*name.split(", ")} for name in measured}
    name = min(apart, key=lambda name: len(apart[name]))
    return name, sorted(wanted & apart[name])


def _loss(fit: LossFit) -> Loss:
    def loss(recipe: Recipe, batch: float, tokens: float) -> float:
        method, _ = nearest_method(recipe, fit.law.methods)
        every = sync_every_of(recipe)
        return fit.law.loss_at(tokens, method=method, batch=batch, sync_every=every)

    return loss


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
                f"{errors.tokens.median:.0%} (median) and {errors.tokens.worst:.0%} (worst)."
            )
    return tuple(said)
