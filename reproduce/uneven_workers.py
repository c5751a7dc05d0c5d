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
        workers = report.workers
        rows.append([(each.worker_batch, each.busy_seconds, each.wait_seconds) for each in workers])
    return rows


def main() -> None:
    results = {name: run_on_ranks(train, 2, name == "speed")[0] for name in ("equal", "speed")}
    heads = (f"{name:>5}: samples  round s  waiting s" for name in results)
    print(f"round  slow  {'  '.join(heads)}")
    for index in range(ROUNDS):
        cells = []
        for rows in results.values():
            (first, *_), (second, *_) = rows[index]
            _, length, waiting = map(max, *rows[index])
            cells.append(f"     {first:>4} + {second:<4} {length:7.2f}  {waiting:9.2f}")
        slow = "first" if index < ROUNDS // 2 else "second"
        print(f"{index + 1:>5}  {slow:<6}" + "  ".join(cells))
    for name, rows in results.items():
        busy, waits = (sum(max(each[at] for each in row) for row in rows) for at in (1, 2))
        print(f"{name}: {busy:.1f} s for all rounds; in {waits:.1f} s of them a worker waited")


if __name__ == "__main__":
    main()
