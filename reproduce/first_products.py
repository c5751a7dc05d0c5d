"""Counts how often rounding differs if two threads compute a process's first matrix products at the
same time.

    # For 40 seconds; with `warm` each process computes three products before its threads start.
    .venv/bin/python reproduce/first_products.py cold 40

Each forked process trains one step in two threads and reports its gradient norms; the script prints
the different results with their counts.
"""

import copy
import os
import sys
import threading
import time
from collections import Counter

import torch

from adloco.distributed.parallel.gradient_norms import squared_norm
from adloco.models.sources.llama import LlamaShape, build_llama
from adloco.tasks.language_model import next_token_loss

warm, seconds = sys.argv[1] == "warm", float(sys.argv[2])
model = build_llama(LlamaShape(), 256, 0)
models = [model, copy.deepcopy(model)]
generator = torch.Generator().manual_seed(1)
ids = [torch.randint(0, 256, (1, 129), generator=generator) for _ in models]


def child() -> str:
    torch.set_num_threads(1)  # A forked process cannot use the OpenMP threads of its parent.
    if warm:
        square = torch.ones(256, 256)
        for left, right in ((square, square), (square.T, square), (square, square.T)):
            torch.mm(left, right)
    norms, together = [0.0, 0.0], threading.Barrier(2)

    def run(index: int) -> None:
        torch.set_num_threads(1)
        together.wait()
        next_token_loss(models[index], ids[index]).backward()
        norms[index] = squared_norm(parameter.grad for parameter in models[index].parameters())

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return repr(norms)


seen: Counter[str] = Counter()
end = time.monotonic() + seconds
while time.monotonic() < end:
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.write(writer, child().encode())
        os._exit(0)
    os.close(writer)
    seen[os.read(reader, 1000).decode()] += 1
    os.close(reader)
    os.waitpid(process, 0)
print(sum(seen.values()), dict(seen))
