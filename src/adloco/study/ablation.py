"""The ablations of AdLoCo (figure 2 of arXiv 2508.18182): a recipe without one of its mechanisms.

What a recipe is without a mechanism is defined here, so that nothing else changes with it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from adloco.config.sections import Recipe
from adloco.errors import require
from adloco.rules.batch_rules.constant import ConstantBatch
from adloco.rules.merge_policies.no_merge import NoMerge
from adloco.study.arms import Flags


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """A part of the method that can be left out."""

    present: Callable[[Recipe], bool]
    without: Flags
    """Settings that leave it out."""


MECHANISMS = {
    "adaptive-batch": Mechanism(
        present=lambda recipe: not isinstance(recipe.batch, ConstantBatch),
        without=(("batch.rule", "constant"),),
    ),
    "merging": Mechanism(
        present=lambda recipe: not isinstance(recipe.merge, NoMerge),
        without=(("merge.policy", "none"),),
    ),
    "switch-mode": Mechanism(
        present=lambda recipe: recipe.switch.mode == "switch",
        # A request above what fits is accumulated at once, and not only above n times that. The
        # batch is always the requested one; mode never would also cap it.
        without=(("switch.mode", "always"),),
    ),
    "accumulation": Mechanism(
        present=lambda recipe: recipe.switch.mode != "never",
        without=(("switch.mode", "never"),),
    ),
}


PAPER = ("adaptive-batch", "merging", "switch-mode")
"""The mechanisms of the paper's ablation."""


def own_mechanisms(recipe: Recipe) -> list[str]:
    """The mechanisms of the paper's ablation that a recipe has; ValueError if it has none."""
    found = [name for name in PAPER if MECHANISMS[name].present(recipe)]
    require(
        bool(found),
        f"recipe {recipe.run.name!r} has none of {', '.join(PAPER)} to leave out; take another "
        "recipe, or name what to leave out by --without",
    )
    return found


def ablated_arms(recipe: Recipe, names: Sequence[str]) -> dict[str, Flags]:
    """The arms of an ablation: the recipe, the recipe without each mechanism, and without all.

    names: Mechanisms to leave out, of `MECHANISMS`.

    Returns:
        Arm -> settings that make it from the recipe.

    Raises:
        ValueError: A mechanism is unknown, stands twice, or is not part of the recipe.
    """
    known = ", ".join(MECHANISMS)
    for name in names:
        require(name in MECHANISMS, f"--without must name some of {known}, got {name!r}")
        require(
            MECHANISMS[name].present(recipe),
            f"recipe {recipe.run.name!r} has no {name} to leave out; drop it from --without",
        )
    require(bool(names), f"--without must name some of {known}")
    require(len({*names}) == len(names), f"--without names a mechanism twice: {', '.join(names)}")
    require(
        not {"switch-mode", "accumulation"} <= {*names},
        "--without takes one of switch-mode and accumulation, which set switch.mode both",
    )
    arms: dict[str, Flags] = {recipe.run.name: ()}
    arms |= {f"without {name}": MECHANISMS[name].without for name in names}
    if len(names) > 1:
        arms["without all"] = tuple(flag for name in names for flag in MECHANISMS[name].without)
    return arms
