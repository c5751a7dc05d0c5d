"""Trains one rank of a run on its island, and writes after each round what the run counted and what
the kernel counted. `links.py` starts it.

The kernel's counters are read first when the run has been prepared, so they do not include the
start-up with the run's first checkpoint. They do not include later checkpoints either: the run has
a much larger token budget than the one asked for, so it never reaches its last round, which would
write one. The learning rate follows the budget asked for. After the last measured round the
counters are read when all data has left the sockets' buffers. After the other rounds, data that is
still in the buffers counts in the next round.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from links_network import die_with_parent, read_counters, wait_until_sent

from adloco.config.recipe import build_recipe, override, read_values
from adloco.distributed.launch.launcher import num_ranks, process_group, this_rank
from adloco.metrics import Record
from adloco.run.training_run import TrainingRun

ENOUGH = 1_000
"""The run's own token budget, as a multiple of the one asked for."""


def main() -> None:
    die_with_parent()
    order: dict[str, Any] = json.loads(sys.argv[1])
    budget = {"run.tokens": ENOUGH * order["tokens"], "learning_rate.total_tokens": order["tokens"]}
    flags = [*map(tuple, order["flags"]), *((name, str(count)) for name, count in budget.items())]
    recipe = build_recipe(override(read_values(order["recipe"]), flags))
    with process_group():
        run = TrainingRun.create(recipe)
        with Path(order["folder"], f"{this_rank()}.jsonl").open("w") as lines:
            train(run, order, lines)


def train(run: TrainingRun, order: dict[str, Any], lines: Any) -> None:
    drain()
    before, began = read_counters(), time.monotonic()
    for record in run.rounds():
        seconds = time.monotonic() - began
        late = bool(order["max_seconds"]) and run.placement.agree(seconds > order["max_seconds"])
        last = record["tokens"] >= order["tokens"] or late
        if last:
            drain()
        kernel = {name: value - before[name] for name, value in read_counters().items()}
        line = measure(record, kernel, seconds)
        lines.write(json.dumps(line) + "\n")
        lines.flush()
        if this_rank() == 0:
            show(order["arm"], line)
        if last:
            return


def drain() -> None:
    """Wait until all ranks are here and all data that they sent has arrived."""
    dist.barrier()
    wait_until_sent()
    dist.barrier()


def measure(record: Record, kernel: dict[str, int], seconds: float) -> dict[str, Any]:
    """A line of the results; bytes, packets and seconds are those since the first round began."""
    names = "round tokens inner_steps syncs train_loss val_loss bytes_communicated bytes_inside"
    busy = [worker["busy_seconds"] for worker in record["workers"]]
    return {name: record[name] for name in names.split()} | {
        "seconds": seconds,
        "busy_seconds": sum(busy) / len(busy),
        "counted_bytes": counted(record),
        "kernel": kernel,
    }


def counted(record: Record) -> float:
    """The payload that a rank has sent by the run's count, as a mean over ranks.

    `bytes_sent` is the part between workers. ddp's reductions inside its one island use a ring of N
    ranks, which sends 2 (N - 1) / N of their payload (1 for two ranks).
    """
    return float(
        record["bytes_sent"] + 2 * (num_ranks() - 1) / num_ranks() * record["bytes_inside"]
    )


def show(arm: str, line: dict[str, Any]) -> None:
    loss = "        -" if line["val_loss"] is None else f"{line['val_loss']:9.4f}"
    print(
        f"{arm:<22} round {line['round']:>4}  {line['tokens']:>10,} tokens  val loss {loss}"
        f"  {line['seconds']:8.1f} s  counted {line['counted_bytes'] / 1e6:9.3f} MB"
        f"  kernel {line['kernel']['tx_bytes'] / 1e6:9.3f} MB",
        flush=True,
    )


if __name__ == "__main__":
    main()
