"""Runs of a problem from Python: what replaces the task, the model and the data of their recipe,
and how they are resumed.
"""

from dataclasses import replace
from pathlib import Path

from adloco.algorithms.method import Problem
from adloco.config.sections import Recipe
from adloco.errors import require
from adloco.models.fixed_values import changed_fixed
from adloco.models.problem_model import ProblemBuilder, ProblemModel
from adloco.run.folder import MODEL, resume_line
from adloco.tasks.problem_task import ProblemTaskSettings


def recipe_of(problem: Problem, recipe: Recipe) -> Recipe:
    """The recipe, with the problem's task, model, tokens of a sample and kind of data in it."""
    source = type(problem.data)
    return replace(
        recipe,
        task=ProblemTaskSettings(),
        model=ProblemModel(),
        data=replace(
            recipe.data,
            path="",
            dataset="",
            split="train",
            factory=f"{source.__module__}:{source.__qualname__}",
            context_tokens=problem.tokens_per_sample,
        ),
    )


def resume_call(recipe: Recipe, folder: Path) -> str:
    """The command that resumes a run, or the call in the script that has its problem."""
    if isinstance(recipe.task, ProblemTaskSettings):
        return f"adloco.train(resume={str(folder)!r}, problem=problem)"
    return resume_line(folder)


def builder_of(problem: Problem, recipe: Recipe, stored: Path | None) -> ProblemBuilder:
    """The builder of the problem's model.

    stored: Folder of the run to resume or to load; None for a new run.

    Raises:
        ValueError: The run is not one of a problem, or its model has other parameters.
    """
    require(
        isinstance(recipe.task, ProblemTaskSettings),
        f"the run in {stored} has its model and data from its recipe; leave out problem",
    )
    builder = ProblemBuilder(problem=problem, options=recipe.model_options, seed=recipe.run.seed)
    require(
        stored is None or builder.load_config(stored / MODEL) == builder.config,
        f"problem.build_model gives another model than that of the run in {stored}; give the "
        "problem that it began with",
    )
    changed = changed_fixed(builder.whole, stored / MODEL) if stored else ""
    require(not changed, changed)
    return builder
