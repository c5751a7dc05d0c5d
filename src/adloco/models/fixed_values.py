"""What a model of one's own has beside what a run trains and saves: frozen parameters, and buffers
outside of its state. A run that resumes, or whose model is loaded, builds them again.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from adloco.distributed.parallel.layers import plain_parts

FIXED = "fixed.json"
SHOWN = 16
"""About as many values are compared, from all over a tensor: tables and masks begin alike."""
TOLERANCE = 1e-3
"""Difference of values that another machine computes, as a share of the largest; 1e-6 for tensors
near zero. Far into a table there are sines of large numbers, whose rounding is that of the largest.
"""
Values = Mapping[str, Sequence[float]]
"""Some values of each such tensor, by name."""


def fixed_values(model: nn.Module) -> Values:
    """Some values of each such tensor of a model that is not sparse."""
    state = model.state_dict().keys()
    frozen = [(name, each) for name, each in model.named_parameters() if not each.requires_grad]
    unsaved = [(name, each) for name, each in model.named_buffers() if name not in state]
    parts = (part for each in (*frozen, *unsaved) for part in plain_parts(*each))
    return {
        name: _shown(each.detach().flatten())
        for name, each in parts
        if each.layout == torch.strided
    }


def _shown(values: Tensor) -> list[float]:
    shown = values[:: len(values) // SHOWN | 1]  # An odd step sees more than one column.
    parts = [shown.real, shown.imag] if shown.is_complex() else [shown]
    return [value for part in parts for value in part.double().tolist()]


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
        if name not in now or not _alike(values, now[name]):
            return (
                f"the frozen parameter or buffer {name} of the model is another one than when the "
                f"run in {folder.parent} began; draw it from torch, which has the run's seed then, "
                "or make it a part of the model's state"
            )
    return ""


def _alike(saved: Sequence[float], now: Sequence[float]) -> bool:
    largest = max(map(abs, filter(math.isfinite, saved)), default=0.0)
    most = max(1e-6, TOLERANCE * largest)
    return len(saved) == len(now) and all(
        math.isclose(one, other, abs_tol=most) or (math.isnan(one) and math.isnan(other))
        for one, other in zip(saved, now, strict=True)
    )
