"""Processes that are killed at a named point, for tests of what remains after a failure."""

import importlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Point = tuple[str, int]
"""Where a process is killed: a function, as `module:Name`, and at which call of it."""


def die_at(point: Point) -> None:
    """Let this process be killed as the function is called for this time."""
    (place, call), calls = point, [0]
    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    function = getattr(owner, name)

    def killed(*given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*given, **named)

    setattr(owner, name, killed)


def ranks_that_die(folder: Path, deaths: Mapping[int, Point]) -> str:
    """Write what kills ranks of later processes; return what PYTHONPATH must begin with.

    Args:
        folder: Where it is written. Python imports `sitecustomize` in every new process.
        deaths: Where each rank is killed.
    """
    (folder / "sitecustomize.py").write_text(
        "import os\n"
        f"point = {dict(deaths)!r}.get(int(os.environ.get('RANK', '-1')))\n"
        "if point:\n"
        "    from tests.dying import die_at\n"
        "    die_at(point)\n"
    )
    return os.pathsep.join([str(folder), str(Path(__file__).parents[1])])
