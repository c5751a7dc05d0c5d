"""The points of a sweep: a grid over lists of settings, or random points of it."""

import itertools
import random
from collections.abc import Mapping, Sequence

from adloco.errors import require
from adloco.study.arms import Flags


def sweep_axes(settings: Sequence[tuple[str, str]]) -> tuple[dict[str, list[str]], Flags]:
    """Separate lists from single values.

    settings: (section.key, value); a key with several values is an axis.

    Returns:
        Axis -> values, and the settings with one value.

    Raises:
        ValueError: No setting has several values, or one on which no number depends, or an axis
            has a value twice.
    """
    given: dict[str, list[str]] = {}
    for name, value in settings:
        given.setdefault(name, []).append(value)
    axes = {name: values for name, values in given.items() if len(values) > 1}
    require(
        bool(axes), "a sweep needs a setting with several values, as in --batch.eta 0.5 0.8 1.0"
    )
    for name, values in axes.items():
        require(
            name not in ("run.folder", "run.name"),
            f"--{name} takes one value, got {' '.join(values)}; put a name with spaces in quotes",
        )
        require(len({*values}) == len(values), f"--{name} has a value twice: {' '.join(values)}")
    return axes, tuple((name, values[0]) for name, values in given.items() if len(values) == 1)


def sweep_points(axes: Mapping[str, Sequence[str]], samples: int) -> list[Flags]:
    """The points of the grid, in order.

    samples: Points to draw from the grid without repetition, always the same ones; 0: all.
    """
    require(samples >= 0, f"--samples must be >= 0, got {samples}")
    grid = [tuple(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    if not samples or samples >= len(grid):
        return grid
    chosen = sorted(random.Random(0).sample(range(len(grid)), samples))
    return [grid[index] for index in chosen]


def point_name(point: Flags) -> str:
    """The name of a point's arm: keys without their sections, if none stands twice."""
    keys = [name.rpartition(".")[2] for name, _ in point]
    names = keys if len({*keys}) == len(keys) else [name for name, _ in point]
    return ", ".join(f"{name} {value}" for name, (_, value) in zip(names, point, strict=True))
