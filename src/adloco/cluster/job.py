"""A training job over the nodes of a cluster, and how its ranks divide into islands."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from adloco.config.recipe import build_recipe, override, read_values
from adloco.config.sections import Recipe
from adloco.config.shipped import shipped_recipes
from adloco.distributed.placement.islands import island_shape
from adloco.dotted_path import load_object
from adloco.errors import require

GRACE_SECONDS = 110
"""`run.grace_seconds` of a job, unless the line or the recipe has another value."""
MARGIN_SECONDS = 20
"""From the end of the grace to the end that the scheduler puts to the job."""
PORT = 29400
"""Port where torchrun's agents meet; torchrun's default."""
LONGEST_NAME = 40
"""Kubernetes adds to a job's name, and allows 63 characters."""
END = "END_OF_RECIPE"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A recipe on a number of nodes. It begins a run, or resumes it if it is started again."""

    name: str
    """Lower-case letters, digits and dashes, as Kubernetes demands."""
    recipe: str
    """A file, or the name of a shipped recipe."""
    settings: tuple[tuple[str, str], ...]
    """(section.key, value), those that the job needs among them."""
    folder: str
    islands: int
    nodes: int
    gpus_per_node: int
    grace_seconds: int
    can_wait: bool
    """True if torchrun has an option for the time until it kills its ranks."""

    @property
    def summary(self) -> str:
        """A line on the job's shape."""

        def count(number: int, what: str) -> str:
            return f"{number} {what}{'s' if number > 1 else ''}"

        gpus = self.nodes * self.gpus_per_node // self.islands
        return (
            f"{self.name}: {count(self.islands, 'island')} of {count(gpus, 'GPU')} on "
            f"{count(self.nodes, 'node')}, written by `adloco launch`."
        )

    def carried_recipe(self) -> tuple[str, str]:
        """For a scheduler whose nodes do not see the files here: lines of a shell that write the
        recipe's file there, and its name there. Nothing is written for a shipped recipe.
        """
        if self.recipe in shipped_recipes():
            return "", self.recipe
        there = f"/tmp/{Path(self.recipe).name}"
        text = Path(self.recipe).read_text(encoding="utf-8").strip("\n")
        require(END not in text, f"the recipe {self.recipe!r} must not contain {END}; remove it")
        return f"cat > {shlex.quote(there)} <<'{END}'\n{text}\n{END}\n", there


def plan_job(
    recipe: str,
    settings: Sequence[tuple[str, str]],
    *,
    islands: int,
    gpus_per_island: int,
    gpus_per_node: int | None,
    started: str,
) -> Job:
    """Plan a job, and check that its recipe can be trained by it.

    Args:
        settings: (section.key, value) of settings that replace the recipe's.
        islands, gpus_per_island: Groups of GPUs that share a worker, and the size of each.
        gpus_per_node: GPUs of a node; None: an island is a node.
        started: The time, for the name of the run's folder if `run.folder` is not set.

    Raises:
        ValueError: A number or a setting is wrong, or they do not fit together.
    """
    per_node = gpus_per_island if gpus_per_node is None else gpus_per_node
    named = {"islands": islands, "gpus-per-island": gpus_per_island, "gpus-per-node": per_node}
    for name, number in named.items():
        require(number >= 1, f"--{name} must be >= 1, got {number}")
    ranks = islands * gpus_per_island
    require(
        ranks % per_node == 0
        and max(per_node, gpus_per_island) % min(per_node, gpus_per_island) == 0,
        f"--gpus-per-node {per_node} must divide, or be a multiple of, --gpus-per-island "
        f"{gpus_per_island}, and fill whole nodes with {ranks} GPUs; choose another number",
    )
    values = read_values(recipe)
    asked = build_recipe(override(values, settings))
    name = _name(asked.run.name)
    defaults: dict[str, str] = {}
    if not asked.run.folder:
        defaults["run.folder"] = f"runs/{name}-{started}"
    own_grace = "run.grace_seconds" in dict(settings) or "grace_seconds" in values["run"]
    can_wait = torchrun_can_wait()
    if can_wait and not own_grace:
        defaults["run.grace_seconds"] = str(GRACE_SECONDS)
    shape = asked.placement
    if (shape.shard_size, shape.replica_size) == (1, 1) and gpus_per_island > 1:
        defaults[f"placement.{_spread(asked)}"] = str(gpus_per_island)
    given = (*settings, *defaults.items())
    whole = build_recipe(override(values, given))
    _check_islands(whole, islands, gpus_per_island)
    return Job(
        name=name,
        recipe=recipe,
        settings=given,
        folder=whole.run.folder,
        islands=islands,
        nodes=ranks // per_node,
        gpus_per_node=per_node,
        grace_seconds=round(whole.run.grace_seconds),
        can_wait=can_wait,
    )


def torchrun_can_wait() -> bool:
    """True if the torchrun that is installed here has --shutdown-timeout. Older ones (torch 2.11)
    always kill their ranks 30 seconds after a signal, which is the default of `run.grace_seconds`.
    """
    torch = find_spec("torch")
    assert torch is not None and torch.origin is not None
    # Read and not imported, which takes seconds.
    launcher = Path(torch.origin).parent / "distributed" / "run.py"
    return "--shutdown-timeout" in launcher.read_text(encoding="utf-8")


def _check_islands(recipe: Recipe, islands: int, gpus_per_island: int) -> None:
    """Raise ValueError if the recipe's workers cannot be spread over these islands."""
    shape, workers = recipe.placement, recipe.method.num_workers
    if not recipe.data_parallel:
        each, rest = divmod(islands, recipe.method.num_trainers)
        advice = f", or add --method.workers_per_trainer {each}" if not rest else ""
        require(
            islands <= workers,
            f"--islands {islands} are more than the {workers} workers of the recipe, and an island "
            f"without a worker has nothing to do; take at most {workers}{advice}",
        )
    fixed = shape.shard_size * shape.replica_size  # 0: as many as there are for each worker.
    require(
        recipe.data_parallel or fixed in (0, gpus_per_island),
        f"placement.shard_size x placement.replica_size makes islands of {fixed} GPUs, not of "
        f"--gpus-per-island {gpus_per_island}; make them equal, or set neither",
    )
    island_shape(islands * gpus_per_island, workers, shape.shard_size, shape.replica_size)


def _spread(recipe: Recipe) -> str:
    """Option by which GPUs of an island share a worker: shards, unless gradients must be whole."""
    path = recipe.batch.measurement
    return "replica_size" if path and load_object(path).whole_gradients else "shard_size"


def _name(text: str) -> str:
    """The name of a job from that of a recipe."""
    letters = re.sub(r"[^a-z0-9]+", "-", text.lower())[:LONGEST_NAME].strip("-")
    return letters if letters[:1].isalpha() else f"adloco-{letters}".strip("-")
