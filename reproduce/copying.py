"""How much models of bytes take from their context: the loss by place in a window of 128 bytes, and
that of random letters which come four times in the same order.

    .venv/bin/python reproduce/copying.py TEXTS RUN ...

TEXTS is a folder of text files, of which every fourth window is read.
"""

import argparse
import itertools
from pathlib import Path

import torch
from torch import Tensor, nn

import adloco

WINDOW, LETTERS = 128, 32
PLACES = (1, 8, 16, 32, 64, WINDOW)


@torch.no_grad()
def losses(model: nn.Module, windows: Tensor) -> Tensor:
    """The mean loss at places 1, 2, ... of windows [windows, places], in nats."""
    total = torch.zeros(windows.shape[1] - 1)
    for some in windows.split(256):
        logits = model(input_ids=some).logits[:, :-1].float().transpose(1, 2)
        total += nn.functional.cross_entropy(logits, some[:, 1:], reduction="none").sum(0)
    return total / len(windows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", type=Path)
    parser.add_argument("runs", nargs="+")
    options = parser.parse_args()
    text = b"".join(file.read_bytes() for file in sorted(options.texts.iterdir()))
    read = torch.tensor(list(text[: len(text) // WINDOW * WINDOW])).view(-1, WINDOW)[::4]
    draws = torch.Generator().manual_seed(1)
    letters = torch.randint(ord("a"), ord("z") + 1, (256, LETTERS), generator=draws).repeat(1, 4)
    for run in options.runs:
        model = adloco.load(run).model.eval()
        by_place, drawn = losses(model, read), losses(model, letters)
        places = [
            f"{begin} to {end - 1}: {by_place[begin - 1 : end - 1].mean():.3f}"
            for begin, end in itertools.pairwise(PLACES)
        ]
        # Without the first letter of each time, which nothing foretells.
        times = [f"{part[: LETTERS - 1].mean():.2f}" for part in drawn.split(LETTERS)]
        print(f"{run}  places {', '.join(places)}  letters, each time: {', '.join(times)}")


if __name__ == "__main__":
    main()
