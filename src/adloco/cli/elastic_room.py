"""Access of commands to elastic/, which only several ranks import and which may be missing."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from adloco.config.sections import Recipe
from adloco.config.settings import RunSettings
from adloco.distributed.launch.failures import Watch
from adloco.distributed.launch.launcher import num_ranks
from adloco.distributed.launch.rank_store import MEETING_POINT
from adloco.errors import OtherRankError, require

if TYPE_CHECKING:
    from adloco.elastic.machine_launcher import Recovery


def is_there() -> bool:
    """True unless elastic/ was removed."""
    found = find_spec("adloco.elastic")
    return found is not None and found.origin is not None  # Else a folder without modules.


def check_settings(settings: RunSettings) -> None:
    """Raise ValueError if a run with these settings needs elastic/, which was removed, or has a
    secret for ranks that something else has started.
    """
    if num_ranks() > 1 and MEETING_POINT not in os.environ:
        check_torchrun(settings)
    require(
        is_there() or settings.on_rank_failure == "stop",
        f"run.on_rank_failure = {settings.on_rank_failure} needs the folder elastic/ of adloco, "
        "which was removed here; use stop, with run.copy_every 0",
    )


def check_torchrun(settings: RunSettings) -> None:
    """Raise ValueError if a run with these settings cannot be started by torchrun."""
    require(
        not settings.secret_file,
        f"run.secret_file {settings.secret_file!r} keeps strangers from the meeting point of "
        "--meet, and cannot keep them from that of torchrun; start the ranks with adloco train "
        "--machines and --meet, or leave it out",
    )


def check_job(settings: RunSettings) -> None:
    """Raise ValueError if a job that starts ranks by torchrun again cannot have these settings."""
    check_torchrun(settings)
    require(
        settings.on_rank_failure == "stop",
        f"run.on_rank_failure {settings.on_rank_failure} cannot work in such a job, where all "
        "ranks start again after a failure; leave it out, or start the ranks with adloco train "
        "--machines and --meet",
    )


def watch(
    end: Callable[[OtherRankError], None],
    settings: RunSettings,
    recover: Callable[[], None] | None = None,
) -> Watch | None:
    """A `RankWatch` for `process_group`; None if this process is alone or elastic/ was removed."""
    if num_ranks() == 1 or not is_there():
        return None
    from adloco.elastic.watch import RankWatch

    return RankWatch(
        end=end,
        silent_seconds=settings.silent_seconds,
        timeout_seconds=settings.timeout_seconds,
        recover=recover,
    )


def recovery(recipe: Recipe, replaces: Callable[[], bool] | None) -> "Recovery | None":
    """Settings that a launcher needs if the ranks of a run recover; None if they do not.

    replaces: As in `Recovery`.
    """
    settings = recipe.run
    if settings.on_rank_failure == "stop":
        return None
    from adloco.elastic.machine_launcher import Recovery

    return Recovery(
        silent_seconds=settings.silent_seconds,
        timeout_seconds=settings.timeout_seconds,
        replaces=replaces,
    )
