"""Measures on a CUDA device: Muon's step beside torch.optim.Muon's and AdamW's, and wire formats.

    .venv/bin/python benchmarks/gpu.py

1. Each optimizer steps the hidden matrices of a Llama with 24 layers of width 1024: 168 matrices
   with 271M values in float32. Memory is what a step has at its peak, beyond what was there before.
2. Each wire format encodes and decodes 305M values, in pieces as a sync does it.

The sides of a comparison take turns; seconds are the medians of ten turns.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from bench_pairs import in_turns
from sync import wire_formats
from torch import Tensor

from adloco.algorithms.muon_step import Muon

WIDTH, LAYERS, VALUES, TURNS = 1024, 24, 291 << 20, 10


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args(words)
    if not torch.cuda.is_available():
        print("gpu: this script needs a CUDA device, and torch finds none", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}", flush=True)
    steps = optimizers(hidden_matrices(WIDTH, LAYERS, device))
    for name, milliseconds in times(steps).items():
        mebibytes = peak_bytes(steps[name]) / 2**20
        print(f"{name}: a step takes {milliseconds:.3g} ms, at its peak {mebibytes:.0f} MiB more")
    del steps
    formats = wire_formats(torch.randn(VALUES, device=device))
    for name, milliseconds in times(formats).items():
        print(f"{name}: {VALUES / 1e6:.0f}M values there and back in {milliseconds:.3g} ms")
    return 0


def hidden_matrices(width: int, layers: int, device: torch.device) -> list[Tensor]:
    """The hidden matrices of a Llama with grouped queries, as parameters with gradients."""
    keys, inner = width // 4, width * 11 // 4
    layer = [(width, width), (keys, width), (keys, width), (width, width)]
    layer += [(inner, width), (inner, width), (width, inner)]
    matrices = [torch.randn(shape, device=device) / width**0.5 for shape in layer * layers]
    for matrix in matrices:
        matrix.requires_grad_()
        matrix.grad = torch.randn_like(matrix)
    return matrices


def optimizers(matrices: Sequence[Tensor]) -> dict[str, Callable[[], Any]]:
    """The step of each optimizer on these matrices."""
    settings: Any = {"lr": 1e-3, "weight_decay": 0.1}
    muon: Any = settings | {"momentum": 0.9}
    return {
        "Muon": Muon(matrices, **muon).step,
        "torch.optim.Muon": torch.optim.Muon(matrices, **muon, adjust_lr_fn="match_rms_adamw").step,
        "AdamW, fused": torch.optim.AdamW(matrices, **settings, fused=True).step,
    }


def times(sides: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of each side: the median of its turns."""
    seconds = in_turns(sides, TURNS, meet=torch.cuda.synchronize)
    return {name: 1e3 * statistics.median(turns) for name, turns in seconds.items()}


def peak_bytes(step: Callable[[], Any]) -> int:
    """How much more memory a step has at its peak than there was before it."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    sys.exit(main())
