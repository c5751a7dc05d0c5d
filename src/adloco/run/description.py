"""Writes what describes a run into its folder, before the first checkpoint."""

from pathlib import Path

from adloco.config.finding import code_named
from adloco.config.recipe_text import to_toml, to_values
from adloco.errors import require
from adloco.run.environment import describe_environment
from adloco.run.folder import ENVIRONMENT, MODEL, RECIPE, TOKENIZER
from adloco.run.json_files import write_json
from adloco.run.machine_folders import check_machine, in_turn
from adloco.run.start import RunParts
from adloco.whole_file import write_text


def write_description(parts: RunParts, folder: Path) -> None:
    """Write environment, recipe, tokenizer and model, on each machine that does not see what rank 0
    wrote. Called on all ranks.

    Args:
        parts: What the run is built from.
        folder: Its folder.

    Raises:
        ValueError: A machine has another run in its folder.
    """
    recipe, placement = parts.recipe, parts.placement
    written = placement.agree(to_toml(recipe))
    problem = ""

    def write() -> None:
        nonlocal problem
        if not placement.is_rank_zero:
            problem = check_machine(folder, written)
            described = (ENVIRONMENT, RECIPE, TOKENIZER, MODEL)
            if problem or all((folder / name).exists() for name in described):
                return
        folder.mkdir(parents=True, exist_ok=True)
        write_json(
            folder / ENVIRONMENT,
            describe_environment(placement.device, parts.precision, recipe.run.seed)
            | ({"from_run": parts.start.origin} if parts.start else {})
            | {"notices": parts.notices, "code": code_named(to_values(recipe))},
        )
        write_text(folder / RECIPE, to_toml(recipe))
        (folder / TOKENIZER).mkdir(exist_ok=True)
        parts.task.tokenizer.save(folder / TOKENIZER)
        parts.builder.save_config(folder / MODEL)

    in_turn(placement, write)
    problems = list(filter(None, placement.all_values(problem)))
    require(not problems, "; ".join(problems))
