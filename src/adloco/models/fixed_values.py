"""What a model of one's own has beside what a run trains and saves: frozen parameters, and buffers
outside of its state. A run that resumes, or whose model is loaded, builds them again.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

FIXED = "fixed.json"
SHOWN = 4
"""First values of each tensor that are compared."""
TOLERANCE = 1e-3
"""Relative difference of values that another machine computes; 1e-6 for those near zero."""
Values = Mapping[str, Sequence[float]]
"""The first values of each such tensor, by name."""


def fixed_values(model: nn.Module) -> Values:
    """The first values of each such tensor of a model that is not sparse."""
    state = model.state_dict().keys()
    frozen = [(name, each) for name, each in model.named_parameters() if not each.requires_grad]
    unsaved = [(name, each) for name, each in model.named_buffers() if name not in state]
    return {
        name: each.flatten()[:SHOWN].double().tolist()
        for name, each in (*frozen, *unsaved)
        if each.layout == torch.strided
    }


def save_fixed(values: Values, folder: Path) -> None:
    """Write these values into a folder; nothing if there are none."""
    if values:
        (folder / FIXED).write_text(json.dumps(values, indent=2) + "\n")


def changed_fixed(build: Callable[[], nn.Module], folder: Path) -> str:
    """A sentence if a model that is built now has other values than were saved, empty if not.

    build: Builds it; called if there is something to compare.
    """
    if not (folder / FIXED).exists():
        return ""
    saved, now = json.loads((folder / FIXED).read_text()), fixed_values(build())
    for name, values in saved.items():
        if not all(map(_alike, values, now.get(name, [math.nan] * SHOWN))):
            return (
                f"the frozen parameter or buffer {name} of the model is another one than when the "
                f"run in {folder.parent} began; draw it from torch, which has the run's seed then, "
                "or make it a part of the model's state"
            )
    return ""


def _alike(one: float, other: float) -> bool:
    both_nan = math.isnan(one) and math.isnan(other)
    return both_nan or math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=1e-6)
