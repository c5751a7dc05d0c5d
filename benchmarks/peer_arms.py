"""The training loops of bench_peers.py, each as its library's documentation shows it.

    python peer_arms.py ARM FOLDER

is one rank. It runs in the environment of the arm's library, with the data in the folder, and
leaves `readings.json` and `result.json` there. Libraries are imported where they are used.
"""

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import peer_job as job
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_


def adloco(recipe: str, folder: Path) -> None:
    """adloco, with the settings of one of its recipes."""

    import adloco as library

    class Rows:
        """This rank's batches; it has one worker, or one replica, which reads once in a step."""

        num_streams = job.WORKERS

        def __init__(self) -> None:
            self._feed = job.Feed(folder, int(os.environ["RANK"]))

        def read(self, stream: int, position: int, count: int) -> Any:
            return self._feed.next()

    workers = 1 if recipe == "ddp" else job.WORKERS
    nesterov = {"momentum": job.MOMENTUM, "nesterov": True}
    outer = (
        library.OuterOptimizer(lr=job.OUTER_LR, options=nesterov) if recipe == "diloco" else None
    )
    with library.process_group():
        run = library.AdLoCo(
            library.Problem(
                build_model=job.TinyGPT, loss_fn=lambda model, rows: model(rows), data=Rows()
            ),
            library.Method(
                workers_per_trainer=workers, sync_every=job.SYNC_EVERY, max_grad_norm=job.MAX_NORM
            ),
            inner=library.InnerAdamW(lr=job.INNER_LR),
            syncing=library.Syncing(outer=outer),
            batching=library.Batching(
                guards=library.BatchGuards(initial=job.BATCH * job.WORKERS),
                switch=library.SwitchMode(max_micro_batch=job.BATCH, mode="always"),
            ),
            placement=library.place(workers, replica_size=0 if recipe == "ddp" else 1),
        )
        for _ in run.rounds(job.ROUNDS):
            pass
        if os.environ["RANK"] == "0":
            job.finish(folder, run.model(0), library.__version__)


def plain_ddp(folder: Path) -> None:
    """DistributedDataParallel of torch."""

    dist.init_process_group("gloo")
    model, feed = job.TinyGPT(), job.Feed(folder, dist.get_rank())
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    train(ddp, adamw(model), feed, job.STEPS)
    job.finish(folder, model, torch.__version__)
    dist.destroy_process_group()


def accelerate_local_sgd(folder: Path) -> None:
    """LocalSGD of accelerate."""
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    feed = job.Feed(folder, accelerator.process_index)
    plain = job.TinyGPT()
    model, optimizer = accelerator.prepare(plain, adamw(plain))
    with LocalSGD(
        accelerator=accelerator, model=model, local_sgd_steps=job.SYNC_EVERY, enabled=True
    ) as local:
        train(model, optimizer, feed, job.STEPS, after=local.step, backward=accelerator.backward)
    job.finish(folder, accelerator.unwrap_model(model), metadata.version("accelerate"))
    accelerator.end_training()


def torchft(method: str, folder: Path) -> None:
    """DiLoCo or LocalSGD of torchft, with a replica group of one process on each rank."""

    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo, LocalSGD

    rank = int(os.environ["RANK"])
    model, feed = job.TinyGPT(), job.Feed(folder, rank)
    inner = adamw(model)
    # Its lighthouse listens beside rank 0, at a port that both ranks know.
    port = int(os.environ["MASTER_PORT"])
    server = (
        LighthouseServer(bind=f"127.0.0.1:{port}", min_replicas=job.WORKERS) if rank == 0 else None
    )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=job.WORKERS,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://127.0.0.1:{port}",
        replica_id=f"replica-{rank}",
        hostname="127.0.0.1",
        init_sync=False,
    )
    if method == "diloco":
        outer = torch.optim.SGD(
            model.parameters(), lr=job.OUTER_LR, momentum=job.MOMENTUM, nesterov=True
        )
        syncing: Any = DiLoCo(manager, [model], inner, outer, sync_every=job.SYNC_EVERY)
    else:
        syncing = LocalSGD(manager, model, inner, sync_every=job.SYNC_EVERY)
    with syncing:
        train(model, inner, feed, job.STEPS)
    job.finish(folder, model, metadata.version("torchft"))
    time.sleep(1)  # The other rank may still ask the lighthouse.
    manager.shutdown(wait=False)
    if server:
        server.shutdown()
    os._exit(0)


def adamw(model: Any) -> Any:
    """AdamW as adloco's: fused, matrices decay and vectors do not."""

    parameters = list(model.parameters())
    groups = [
        {"params": [one for one in parameters if one.ndim >= 2], "weight_decay": 0.1},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=job.INNER_LR, betas=(0.9, 0.95), fused=True)


def train(
    model: Any,
    optimizer: Any,
    feed: Any,
    steps: int,
    *,
    after: Callable[[], Any] = lambda: None,
    backward: Callable[[Any], Any] = lambda loss: loss.backward(),
) -> None:
    """The inner loop, the same for all libraries that leave it to their user."""

    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(feed.next())
        backward(loss)
        clip_grad_norm_(model.parameters(), job.MAX_NORM)
        optimizer.step()
        after()
        float(loss.detach())


ARMS: dict[str, Callable[[Path], None]] = {
    "adloco-ddp": partial(adloco, "ddp"),
    "adloco-diloco": partial(adloco, "diloco"),
    "adloco-local-sgd": partial(adloco, "local-sgd"),
    "torch-ddp": plain_ddp,
    "accelerate-local-sgd": accelerate_local_sgd,
    "torchft-diloco": partial(torchft, "diloco"),
    "torchft-local-sgd": partial(torchft, "local-sgd"),
}


if __name__ == "__main__":
    ARMS[sys.argv[1]](Path(sys.argv[2]))
    # Threads that a library leaves running end some processes with an error, after their work.
    sys.stdout.flush()
    os._exit(0)
