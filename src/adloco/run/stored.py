"""Reads a run folder back: its recipe, a checkpoint and its tokenizer; and checks that
they belong together.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from adloco.algorithms.state_parts import RUN
from adloco.config.finding import code_named, setting_facts
from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.recipe_text import idle_settings, named_settings
from adloco.config.sections import Recipe
from adloco.data.tokenizers import Tokenizer, load_tokenizer
from adloco.discovery import lab_modules
from adloco.distributed.placement.placement import Placement
from adloco.errors import require
from adloco.models.fixed_values import FIXED
from adloco.run import checkpoint
from adloco.run.budget import part_used
from adloco.run.changes import (
    Changed,
    changed_settings,
    check_budgets,
    is_recorded,
    read_changes,
    with_longer_schedule,
)
from adloco.run.folder import (
    CHECKPOINTS,
    ENVIRONMENT,
    MODEL,
    RECIPE,
    SUMMARY,
    TOKENIZER,
    run_folder,
)
from adloco.run.json_files import read_json
from adloco.run.machine_folders import fetch_records
from adloco.run.part_file import DamagedCheckpointError, read_part
from adloco.run.records import Records
from adloco.run.recovery import Recovered, load_newest_good
from adloco.run.starts import read_starts
from adloco.setting import Facts
from adloco.tasks.island_texts import IslandTexts
from adloco.tasks.task import Task
from adloco.whole_file import checksums


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """A run folder that was read back."""

    folder: Path
    recipe: Recipe
    tokenizer: Tokenizer
    checkpoint: Path
    about: dict[str, Any]
    """State of the run at the checkpoint: random generators, seconds, fingerprint of the text,
    settings.
    """
    samples: int
    """Samples trained on at the checkpoint, those of its round by all workers that it has."""
    algorithm: dict[str, Any]
    """The part `run` of `AdLoCo.state_dict()` at the checkpoint: counters and plain numbers."""
    changes: Sequence[Changed]
    """Settings that decide the numbers and are others than at the checkpoint."""

    def require_unchanged(self, spent: str) -> None:
        """Raise ValueError if settings change although the run has spent its budget."""
        names = ", ".join(change.setting for change in self.changes)
        require(
            not names,
            f"the run in {self.folder} has spent its budget ({spent}), so a change of {names} has "
            "no effect; leave it out, or give a longer budget too (--run.tokens 2x)",
        )


def read_run(
    folder: Path, round: int | Literal["best"] | None = None, *, trust_recipe: bool = False
) -> StoredRun:
    """Read the run in a folder at one of its checkpoints.

    Args:
        round: The checkpoint's round; None for the newest checkpoint; "best" for the one with the
            lowest validation loss.
        trust_recipe: As in `resumed_recipe`.

    Raises:
        ValueError: A part is missing or damaged, comes from another program or version, or was
            changed since the run began.
    """
    recipe = resumed_recipe(folder, (), trust_recipe=trust_recipe)
    kept = folder / CHECKPOINTS
    records = Records(folder)
    if round == "best":
        chosen = checkpoint.best(kept, records.read_whole())
    else:
        chosen = checkpoint.newest(kept) if round is None else checkpoint.of_round(kept, round)
    stored = stored_run(folder, recipe, chosen, checkpoint.need(chosen, RUN))
    records.check_unchanged(stored.about["records"], stored.algorithm["rounds_done"])
    return stored


def recovered_run(
    folder: Path, recipe: Recipe, placement: Placement, copies: Mapping[str, Mapping[str, Any]]
) -> tuple[StoredRun, Recovered]:
    """The run in a folder at its newest good checkpoint, with its parts. Called on all ranks.

    Args:
        recipe: From `resumed_recipe`.
        copies: As in `load_newest_good`.

    Raises:
        ValueError: A file of the run was changed or is damaged, or no checkpoint is good.
    """
    if placement.is_rank_zero:
        check_records(folder)  # Before training, and before a file is changed.
    living = recipe.method.living_workers
    found = load_newest_good(folder / CHECKPOINTS, placement, living, copies)
    taken_back = placement.agree(_taken_back(folder) if placement.is_rank_zero else None)
    newest = checkpoint.round_of(found.checkpoint)
    require(
        taken_back is None or newest <= taken_back,
        f"the run in {folder} was taken back to round {taken_back} on one machine, and another "
        f"has round {newest}; give adloco rewind {folder} {taken_back} there too",
    )
    stored = stored_run(folder, recipe, found.checkpoint, found.parts[RUN])
    records = Records(folder)
    digests, rounds = stored.about["records"], stored.algorithm["rounds_done"]
    fetch_records(records, digests, rounds, placement)
    if placement.is_rank_zero:
        records.check_unchanged(digests, rounds)
    return stored, found


def _taken_back(folder: Path) -> int | None:
    """The round to which the run was taken back in this folder; None if it has trained here since,
    or was not.
    """
    newest = checkpoint.newest_round(folder / CHECKPOINTS)
    last = read_starts(folder)[-1:]
    return next((one.round for one in last if one.kind == "rewind" and newest <= one.round), None)


def stored_run(folder: Path, recipe: Recipe, chosen: Path, state: dict[str, Any]) -> StoredRun:
    """The run in a folder at a checkpoint.

    Args:
        recipe: From `resumed_recipe`.
        state: The checkpoint's part `run`.

    Raises:
        ValueError: The recipe was changed, or a file of the run.
    """
    algorithm = state["algorithm"]
    samples = algorithm["samples"]
    if algorithm["round_steps"]:
        samples += sum(sum(each["round"]["batches"]) for each in algorithm["workers"].values())
    recipe, begun = with_longer_schedule(folder, recipe, state["run"], samples)
    decided = deciding_settings(recipe)
    fixed = {key: value for key, value in decided.items() if not is_recorded(key)}
    differing = [key for key, value in fixed.items() if begun.get(key, value) != value]
    # Another choice, for instance another batch.rule, has other settings; only it is named. An
    # option may have been added since; with its defaults it changes no number.
    changed = differing or sorted(fixed.keys() - begun.keys() - idle_settings(recipe))
    require(
        not changed,
        f"{', '.join(changed)} in {folder / RECIPE} is not what the run began with; restore it, or "
        "start another run",
    )
    files = file_checksums(folder).items() ^ state["run"]["files"].items()
    require(
        not files,
        f"{', '.join(sorted({name for name, _ in files}))} in {folder} is not what the run began "
        "with; restore it, or start another run",
    )
    return StoredRun(
        folder=folder,
        recipe=recipe,
        tokenizer=load_tokenizer(folder / TOKENIZER),
        checkpoint=chosen,
        about=state["run"],
        samples=samples,
        algorithm=algorithm,
        changes=changed_settings(folder, recipe, begun, algorithm["rounds_done"]),
    )


def folder_facts(folder: Path) -> dict[str, Any]:
    """Facts about the other files of a run that a checkpoint keeps, to compare them on resume."""
    code = code_named(read_values(str(folder / RECIPE)))
    return {"files": file_checksums(folder), "code": code}


def file_checksums(folder: Path) -> dict[str, str]:
    """Checksums of the files in a run folder that its numbers depend on, by their path in it.

    The recipe is not among them: its settings are compared one by one, because some may change.
    """
    return {
        f"{part}/{name}": found
        for part in (MODEL, TOKENIZER)
        for name, found in checksums(folder / part).items()
        if name != FIXED  # It is compared as numbers, which machines round differently.
    }


def resumed_recipe(
    folder: Path, flags: Sequence[tuple[str, Any]], *, trust_recipe: bool = False
) -> Recipe:
    """The recipe in a run folder, with these settings changed for its resume.

    Args:
        flags: (section.key, value) of settings to change.
        trust_recipe: True if the recipe may name code that the run did not begin with.

    Raises:
        ValueError: One of them may not change, the recipe does not fit this version, or it names
            such code.
    """
    for name, _ in flags:
        require(
            name in changeable(),
            f"--{name} cannot change when a run is resumed; leave it out (settings that can: "
            f"{', '.join(changeable())})",
        )
    path = run_folder(folder) / RECIPE
    values = read_values(str(path))
    if not trust_recipe:
        # To build the recipe imports it.
        check_code(
            folder, "read that code and give --trust-recipe (from Python, trust_recipe=True)"
        )
    try:
        own = build_recipe(values)
    except ValueError as error:
        raise ValueError(
            f"{path} does not fit this version of adloco: {error}; restore it, resume with the "
            "version that began the run, or start another run"
        ) from error
    recipe = build_recipe(override(values, flags))
    islands, given = [*own.data.islands], [*recipe.data.islands]
    require(
        given == islands,
        f"data.islands must name {', '.join(islands)} in this order, as the run in {folder} began, "
        f"because workers read by number; got {', '.join(given) or 'none'}"
        if islands
        else f"the run in {folder} began without data.islands; leave them out",
    )
    check_budgets(folder, own.run.limits, recipe.run.limits)
    return recipe


def check_code(folder: Path, advice: str = "leave this run out") -> None:
    """Raise ValueError if the recipe names code that the run in this folder did not begin with.

    advice: What to do if that code is wanted.
    """
    named = code_named(read_values(str(folder / RECIPE)))
    begun = _code_as_begun(folder) if named else {}
    other = [f"{name} = {text!r}" for name, text in named.items() if begun.get(name) != text]
    require(
        not other,
        f"{folder / RECIPE} names code that the run did not begin with ({', '.join(other)}); "
        f"restore it, or {advice}",
    )


def _code_as_begun(folder: Path) -> dict[str, str]:
    """The code that a run began with, by section.key, as its newest good checkpoint knows it; on a
    machine without the part `run`, and before the first checkpoint, as environment.json has it.
    """
    about: dict[str, Any] = {}
    for saved in reversed(checkpoint.list_checkpoints(folder / CHECKPOINTS)):
        with suppress(DamagedCheckpointError):
            about = read_part(saved, RUN, with_tensors=False)["run"]
            break
    else:
        if (folder / ENVIRONMENT).is_file():
            about = read_json(folder / ENVIRONMENT)
    code = about.get("code")
    return code if isinstance(code, dict) else {}


def check_records(folder: Path) -> None:
    """Raise ValueError if a file is damaged that a resumed run appends to or reports from."""
    Records(folder).check()
    read_changes(folder)
    read_starts(folder)
    for option in lab_modules("records"):
        option.check(folder)
    if (folder / ENVIRONMENT).exists():
        read_json(folder / ENVIRONMENT)


def check_written_records(folder: Path) -> list[str]:
    """Raise ValueError if the records are not those that the newest checkpoint knows; return a
    sentence for each file that has no line of some round.

    A report needs no checkpoint, so one that cannot be read does not count.
    """
    try:
        saved = checkpoint.list_checkpoints(folder / CHECKPOINTS)
        state = read_part(saved[-1], RUN, with_tensors=False) if saved else None
    except ValueError:
        return []
    if not state:
        return []
    records, rounds = Records(folder), state["algorithm"]["rounds_done"]
    records.check_unchanged(state["run"]["records"], rounds)
    return records.lost(rounds)


def is_complete(folder: Path, recipe: Recipe) -> bool:
    """True if the run in a folder has ended, as far as the folder shows: on several machines only
    the one with rank 0 has its summary, unless they share the folder.

    recipe: From `resumed_recipe`; a longer budget in it makes the run incomplete.
    """
    ended = (folder / SUMMARY).is_file()
    return ended and part_used(recipe.run.limits, Records(folder).newest()) >= 1


def deciding_settings(recipe: Recipe) -> dict[str, str]:
    """The settings that decide the run's numbers, by section.key."""
    return _named(recipe, lambda facts: facts.resume != "free")


def shared_settings(recipe: Recipe) -> dict[str, str]:
    """The settings that must be equal on all ranks, by section.key."""
    return _named(recipe, lambda facts: not facts.of_rank)


def changeable() -> list[str]:
    """The settings that may change on resume, by section.key, in alphabetical order."""
    named = (name for name, facts in setting_facts().items() if facts.resume != "never")
    return sorted({*named} - {"run.folder", "run.name"})


def _named(recipe: Recipe, counts: Callable[[Facts], bool]) -> dict[str, str]:
    """The settings whose facts count, as text, by section.key."""
    known = setting_facts()
    return {
        key: str(value)
        for key, value in named_settings(recipe).items()
        if counts(known.get(key, Facts()))
    }


def check_corpus(stored: StoredRun, task: Task) -> None:
    """Raise ValueError if the task's text is not the text that the run began with."""
    data = stored.recipe.data
    where = data.source if not data.path else f"the text of {data.source}"
    if isinstance(task, IslandTexts):
        where = f"the text of island {' and '.join(task.changed(stored.about['corpus']))}"
    require(
        task.matches_fingerprint(stored.about["corpus"]),
        f"{where} is not what the run in {stored.folder} began with; restore it, or start another "
        "run",
    )
