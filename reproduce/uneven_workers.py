"""Compares equal shares of the batch with shares by speed (`SpeedShares`) if one of two workers is
slow, and from half-way the other one: seconds and waiting time of each round.

    .venv/bin/python reproduce/uneven_workers.py

It starts two ranks on this machine with one worker each. The slow worker sleeps when it reads data,
to imitate a slower device. The times are wall clock and vary by a few percent.
"""

import time
from typing import Any

import torch
from torch import nn

import adloco
from adloco.distributed.testing import run_on_ranks
from adloco.rules.shares import EqualShares

ROUNDS, BATCH, SLEEP_SECONDS = 16, 32, 0.004


class Throttled:
    """A source whose reads take SLEEP_SECONDS for each sample of one stream."""

    num_streams = 2

    def __init__(self, source: adloco.TensorSource) -> None:
        self.source, self.slow = source, 0

    def read(self, stream: int, position: int, count: int) -> Any:
        time.sleep(count * SLEEP_SECONDS * (stream == self.slow))
        return self.source.read(stream, position, count)


def train(by_speed: bool) -> list[list[tuple[int, float, float]]]:
    """(samples per inner step, busy, wait) of each worker in each round."""
    inputs = torch.randn(4096, 256, generator=torch.Generator().manual_seed(0))
    source = Throttled(adloco.TensorSource(inputs, num_streams=2))

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        # One forward pass per sample, so that the time grows with the number of samples.
        return torch.stack(
            [(model(row[None].expand(128, -1)) - row).square().mean() for row in batch]
        ).mean()

    run = adloco.AdLoCo(
        adloco.Problem(build_model=build, loss_fn=loss, data=source),
        adloco.Method(workers_per_trainer=2, sync_every=5, max_grad_norm=0),
        inner=adloco.InnerAdamW(),
        syncing=adloco.Syncing(outer=adloco.OuterOptimizer()),
        batching=adloco.Batching(
            guards=adloco.BatchGuards(initial=BATCH),
            switch=adloco.SwitchMode(max_micro_batch=BATCH, mode="always"),
            shares=adloco.SpeedShares() if by_speed else EqualShares(),
        ),
        placement=adloco.place(2),
    )
    rows = []
    for index in range(ROUNDS):
        source.slow = 0 if index < ROUNDS // 2 else 1
        report = run.round()
        assert report is not None
        rows.append(
            [
                (worker.worker_batch, worker.busy_seconds, worker.wait_seconds)
                for worker in report.workers
            ]
        )
    return rows


def main() -> None:
    results = {name: run_on_ranks(train, 2, name == "speed")[0] for name in ("equal", "speed")}
    print(
        "round  slow  " + "  ".join(f"{name:>5}: samples  round s  waiting s" for name in results)
    )
    for index in range(ROUNDS):
        cells = []
        for rows in results.values():
            first, second = rows[index]
            length, waiting = max(first[1], second[1]), max(first[2], second[2])
            cells.append(f"     {first[0]:>4} + {second[0]:<4} {length:7.2f}  {waiting:9.2f}")
        print(
            f"{index + 1:>5}  {'first' if index < ROUNDS // 2 else 'second':<6}" + "  ".join(cells)
        )
    for name, rows in results.items():
        total = sum(max(busy for _, busy, _ in row) for row in rows)
        print(
            f"{name}: {total:.1f} s for all rounds; in "
            f"{sum(max(wait for *_, wait in row) for row in rows):.1f} s of them a worker waited"
        )


if __name__ == "__main__":
    main()
