"""What a plan is to reach: the tokens of the recipes' budget, or a loss."""

from collections.abc import Sequence

from adloco.errors import require
from adloco.plan.candidates import Candidate
from adloco.plan.prediction import Budget


def tokens_target(found: Sequence[Candidate]) -> tuple[Budget, str]:
    """The budget in tokens that all candidates share, and its name.

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
    return lambda candidate, batch: tokens, f"{tokens:,.0f} tokens"
