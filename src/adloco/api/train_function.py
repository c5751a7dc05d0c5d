"""`adloco.train`: a recipe trained in this process, as `adloco train` trains it."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, overload

from adloco.algorithms.method import Problem
from adloco.api.trained_run import TrainedRun
from adloco.cli.terminal import open_console, working
from adloco.cli.train_log import train_log
from adloco.cli.training_loop import Training
from adloco.config.finding import settings_meant, settings_near
from adloco.config.recipe import build_recipe, override, read_values
from adloco.distributed.device import own_random_numbers
from adloco.distributed.launch.launcher import num_ranks
from adloco.distributed.launch.local_ranks import INTERRUPTED
from adloco.errors import require
from adloco.run.training_run import TrainingRun

TRAINING = Lock()
"""Held while a run trains: runs at once would draw from the same random numbers of torch."""


@overload
def train(
    recipe: str | Path | None = None,
    *,
    tokens: int | str | None = None,
    data: str | Path | None = None,
    folder: str | Path | None = None,
    seed: int | None = None,
    resume: str | Path | None = None,
    problem: Problem | None = None,
    trust_recipe: bool = False,
) -> TrainedRun: ...


# A checker holds a dictionary after ** against the types of all arguments: `train(**{"inner.lr":
# 1e-3})` would give `data` a float.
@overload
def train(recipe: str | Path | None = None, **settings: Any) -> TrainedRun: ...


def train(
    recipe: str | Path | None = None,
    *,
    tokens: int | str | None = None,
    data: str | Path | Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    seed: int | None = None,
    resume: str | Path | None = None,
    problem: Problem | None = None,
    trust_recipe: bool = False,
    **settings: Any,
) -> TrainedRun:
    """Train a recipe in this process, with the same checks, files and numbers as `adloco train`.

    Args:
        recipe: The name of a shipped recipe, or the path of a TOML file; None: adloco.
        tokens: Tokens to train on (`run.tokens`).
        data: A text, jsonl or parquet file, or a folder of such files (`data.path`); where there is
            no folder `owner`, a dataset of the Hugging Face hub as owner/name (`data.dataset`); or
            settings of the section [data] together.
        folder: The run's folder (`run.folder`); None: a new one in runs/.
        seed: Seed of the parameters, the order of the data and dropout (`run.seed`).
        resume: The folder of a run to resume, by its own recipe.
        problem: A model, data and loss of your own, with batches in `validation`; None: those that
            the recipe names. Its recipe decides everything else.
        trust_recipe: True to resume although the recipe in the run's folder names code that the run
            did not begin with.
        settings: Any other setting: by its name, as in `**{"method.sync_every": 50}`, or those of a
            section together, as in `method={"sync_every": 50}`.

    Returns:
        The run in its folder, with its records, summary, model and tokenizer.

    Raises:
        ValueError: A setting cannot work; the message is that of `adloco train`. Or another thread
            trains a run.
        KeyboardInterrupt: Ctrl+C; the run has saved, and can be resumed.
    """
    require(
        num_ranks() == 1,
        f"adloco.train trains in one process, and this is one of {num_ranks()} ranks; "
        + (
            "train a problem over ranks with adloco.AdLoCo and adloco.place"
            if problem
            else "start them with `adloco train --ranks N`, or with torchrun -m adloco train"
        ),
    )
    require(
        not (resume and recipe), f"resume takes the recipe of the run; leave out {str(recipe)!r}"
    )
    require(isinstance(problem, Problem | None), f"problem must be a Problem, got {type(problem)}")
    require(
        problem is None or data is None,
        "a problem has its own data; leave out data, or the problem",
    )
    if isinstance(data, Mapping):
        data, settings = None, {**settings, "data": data}
    arguments = {
        "run.tokens": tokens,
        _data_setting(data): data,
        "run.folder": folder,
        "run.seed": seed,
    }
    given = {name: value for name, value in arguments.items() if value is not None}
    named = list(_by_name(given, settings).items())
    console = open_console(trains=True)
    with _alone(), own_random_numbers():  # The run seeds torch, whose numbers its caller draws.
        with working(console, "reading and tokenising text, building models ..."):
            if resume:
                run = TrainingRun.resume(
                    Path(resume), named, problem=problem, trust_recipe=trust_recipe
                )
            else:
                values = override(read_values(str(recipe or "adloco")), named)
                run = TrainingRun.create(build_recipe(values), problem)
        shown = [(name, str(value)) for name, value in named]
        own = ", problem=problem" if problem else ""
        again = f"adloco.train(resume={str(run.folder)!r}{own})"
        with train_log(run) as log:
            code = Training(run=run, console=console, log=log, resume=again).train(shown)
    if code == INTERRUPTED:
        raise KeyboardInterrupt(f"saved; resume with {again}")
    return TrainedRun(run.folder, problem=problem, trust_recipe=trust_recipe)


@contextmanager
def _alone() -> Iterator[None]:
    """A context of one run at a time; ValueError if there is one already."""
    require(
        TRAINING.acquire(blocking=False),
        "another adloco.train trains in this process, and both would seed the same random numbers; "
        "call it after the other has ended, or in a process of its own",
    )
    try:
        yield
    finally:
        TRAINING.release()


def _data_setting(data: str | Path | None) -> str:
    """The setting that says where the text is; a name that is no file can be a dataset's."""
    is_name = isinstance(data, str) and re.fullmatch(r"\w[\w.-]*/[\w.-]+", data)
    # In a folder that is there, a file's name was meant.
    return "data.dataset" if is_name and not Path(str(data)).parent.is_dir() else "data.path"


def _by_name(given: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that arguments give and all others, by section.key, those included that are
    given as a section's mapping.

    Raises:
        ValueError: A setting is given twice, or a name is not that of a setting.
    """
    named = dict(given)
    for name, value in settings.items():
        together = "." not in name and isinstance(value, Mapping)
        parts = {f"{name}.{key}": one for key, one in value.items()} if together else {name: value}
        for full, one in parts.items():
            if "." not in full:
                own = ["problem"] * callable(one)  # A model or loss; or some setting's value.
                meant = own + (settings_meant(full) or settings_near(full))
                advice = f" (did you mean {' or '.join(map(repr, meant))}?)" if meant else ""
                raise ValueError(
                    f"train() has no argument {full!r}{advice}; settings are named with their "
                    'section, as in train(**{"method.sync_every": 50}) or '
                    'train(method={"sync_every": 50})'
                )
            require(full not in named, f"{full} is given twice; leave one of them out")
            named[full] = one
    return {name: str(one) if isinstance(one, Path) else one for name, one in named.items()}
