"""One rank of a training run on its island: writes after each round what the run counted and what
the kernel counted. Started by `links.py`.

The kernel's counters begin when the run has been prepared: start-up, with the checkpoint that every
run begins with, is not in them. Nor are later checkpoints: rounds are taken from a run with a much
larger budget of tokens, so that its last round, which always writes one, is never reached; the
learning rate follows the budget asked for. After the last round taken, the counters are read once
all has left the sockets' buffers; after the others, what still waits there is missing until the
next one.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from links_network import Counters, die_with_parent, wait_until_sent

from adloco.config.recipe import build_recipe, override, read_values
from adloco.distributed.launch.launcher import num_ranks, process_group, this_rank
from adloco.run.records import Record
from adloco.run.training_run import TrainingRun

ENOUGH = 1_000
"""The run's own budget, in those asked for."""


def main() -> None:
    die_with_parent(int(sys.argv[2]))
    order: dict[str, Any] = json.loads(sys.argv[1])
    budget = [
        ("run.tokens", str(ENOUGH * order["tokens"])),
        ("learning_rate.total_tokens", str(order["tokens"])),
    ]
    recipe = build_recipe(
        override(read_values(order["recipe"]), [*map(tuple, order["flags"]), *budget])
    )
    with process_group():
        run = TrainingRun.create(recipe)
        with Path(order["lines"]).open("w") as lines:
            train(run, order, lines)


def train(run: TrainingRun, order: dict[str, Any], lines: Any) -> None:
    settle()
    before, began = Counters.read(), time.monotonic()
    for record in run.rounds():
        seconds = time.monotonic() - began
        late = bool(order["max_seconds"]) and run.placement.agree(seconds > order["max_seconds"])
        last = record["tokens"] >= order["tokens"] or late
        if last:
            settle()
        line = measure(record, Counters.read() - before, seconds)
        lines.write(json.dumps(line) + "\n")
        lines.flush()
        if this_rank() == 0:
            show(order["arm"], line)
        if last:
            return


def settle() -> None:
    """All ranks are here, and all that they have sent has arrived."""
    dist.barrier()
    wait_until_sent()
    dist.barrier()


def measure(record: Record, kernel: Counters, seconds: float) -> dict[str, Any]:
    """A line of the results; bytes and packets since the first round began."""
    return {
        "round": record["round"],
        "tokens": record["tokens"],
        "inner_steps": record["inner_steps"],
        "syncs": record["syncs"],
        "train_loss": record["train_loss"],
        "val_loss": record["val_loss"],
        "seconds": seconds,
        "busy_seconds": sum(worker["busy_seconds"] for worker in record["workers"])
        / len(record["workers"]),
        "bytes_communicated": record["bytes_communicated"],
        "bytes_inside": record["bytes_inside"],
        "counted_bytes": counted(record),
        "kernel": vars(kernel),
    }


def counted(record: Record) -> float:
    """What the run says that a rank has sent: mean over ranks, payload.

    `bytes_sent` is that, between workers. Without it, what was handed to reductions is taken times
    2 (N - 1) / N, a ring's share (1 for two ranks), which is exact while all ranks reduce together.
    What `ddp` counts as inside its one island goes round in a ring too.
    """
    ring = 2 * (num_ranks() - 1) / num_ranks()
    between = (
        record["bytes_sent"] if "bytes_sent" in record else ring * record["bytes_communicated"]
    )
    return float(between + ring * record["bytes_inside"])


def show(arm: str, line: dict[str, Any]) -> None:
    loss = "        -" if line["val_loss"] is None else f"{line['val_loss']:9.4f}"
    print(
        f"{arm:<22} round {line['round']:>4}  {line['tokens']:>10,} tokens  val loss {loss}"
        f"  {line['seconds']:8.1f} s  counted {line['counted_bytes'] / 1e6:9.3f} MB"
        f"  kernel {line['kernel']['tx_bytes'] / 1e6:9.3f} MB",
        flush=True,
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
