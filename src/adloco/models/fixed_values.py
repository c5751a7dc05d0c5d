"""What a model of one's own has beside what a run trains and saves: frozen parameters, and buffers
outside of its state. A run that resumes, or whose model is loaded, builds them again.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from adloco.errors import require

FIXED = "fixed.json"
SHOWN = 4
"""First values of each tensor that are compared."""
TOLERANCE = 1e-3
"""Relative difference of values that another machine computes."""


def save_fixed(model: nn.Module, folder: Path) -> None:
    """Write the first values of each such tensor into a folder; nothing if there are none."""
    if found := _fixed(model):
        (folder / FIXED).write_text(json.dumps(found, indent=2) + "\n")


def check_fixed(build: Callable[[], nn.Module], folder: Path) -> None:
    """Raise ValueError if a model that is built now has other such tensors than `save_fixed` saw.

    Args:
        build: Builds it; called if there is something to compare.
        folder: The folder in which they were written.
    """
    if not (folder / FIXED).exists():
        return
    saved, now = json.loads((folder / FIXED).read_text()), _fixed(build())
    for name, values in saved.items():
        require(
            all(map(_alike, values, now.get(name, [math.nan] * SHOWN))),
            f"the frozen parameter or buffer {name} of the model is another one than when the run "
            f"in {folder.parent} began; draw it from torch, which has the run's seed then, or make "
            "it a part of the model's state",
        )


def _fixed(model: nn.Module) -> dict[str, list[float]]:
    state = model.state_dict().keys()
    found: dict[str, Tensor] = {
        **{name: each for name, each in model.named_parameters() if not each.requires_grad},
        **{name: each for name, each in model.named_buffers() if name not in state},
    }
    return {name: each.flatten()[:SHOWN].double().tolist() for name, each in found.items()}


def _alike(one: float, other: float) -> bool:
    both_nan = math.isnan(one) and math.isnan(other)
    return both_nan or math.isclose(one, other, rel_tol=TOLERANCE)
