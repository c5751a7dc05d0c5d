"""What all libraries of bench_peers.py train: the model, the data and the settings. It needs torch
alone, because each library runs in an environment of its own.
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

WORKERS, BATCH, CONTEXT, VOCABULARY = 2, 8, 128, 257
SYNC_EVERY, ROUNDS = 20, 6
INNER_LR, OUTER_LR, MOMENTUM, MAX_NORM = 2e-3, 0.7, 0.9, 1.0
STEPS = SYNC_EVERY * ROUNDS
WIDTH, LAYERS, HEADS = 128, 4, 4


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each after a norm and added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.to_heads, self.from_heads = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        heads = self.to_heads(self.attention_norm(hidden)).view(batch, length, 3, HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.from_heads(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        added: Tensor = self.mlp(self.mlp_norm(hidden))
        return hidden + added


class TinyGPT(nn.Module):
    """A decoder with learned positions: rows of CONTEXT + 1 ids in, their mean loss out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, rows: Tensor) -> Tensor:
        ids, following = rows[:, :-1], rows[:, 1:]
        hidden = self.tokens(ids) + self.positions.weight
        logits = self.head(self.norm(self.blocks(hidden)))
        return cross_entropy(logits.flatten(0, 1), following.flatten())


@dataclass(frozen=True)
class Reading:
    """When a batch was asked for, and what this machine's loopback had sent by then."""

    time: float
    loopback_bytes: int


class Feed:
    """The batches of one worker, in order. Worker 0 notes when each was asked for, and writes the
    list to `readings.json` with the last one; so all libraries are timed at the same place.
    """

    def __init__(self, folder: Path, worker: int) -> None:
        self._rows: Tensor = torch.load(folder / "train.pt")[worker]
        self._folder, self._worker = folder, worker
        self._readings: list[Reading] = []

    def note(self) -> None:
        """Note that a batch was asked for."""
        self._readings.append(Reading(time.time(), loopback_bytes()))
        if len(self._readings) == STEPS and self._worker == 0:
            lines = [vars(reading) for reading in self._readings]
            (self._folder / "readings.json").write_text(json.dumps(lines))

    def next(self) -> Tensor:
        """The next batch, [BATCH, CONTEXT + 1]."""
        at = BATCH * len(self._readings)
        self.note()
        return self._rows[at : at + BATCH].long()


def loopback_bytes() -> int:
    """Bytes that the kernel has sent over the loopback of this network namespace; 0 if it does not
    tell.
    """
    file = Path("/proc/self/net/dev")
    if not file.exists():
        return 0
    (line,) = [line for line in file.read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split()[9])


def finish(folder: Path, model: Any, version: str) -> None:
    """Evaluate the final model on rank 0, and write the loss and the library's version."""
    if int(os.environ["RANK"]) > 0:
        return
    model.eval()
    with torch.no_grad():
        rows = torch.load(folder / "validation.pt").long()
        loss = sum(float(model(part)) for part in rows.split(BATCH)) / len(rows.split(BATCH))
    (folder / "result.json").write_text(json.dumps({"loss": loss, "version": version}))
