"""How often what two threads of a new process compute first, at once, differs between processes.

    python reproduce/first_calls.py passes 500           # for so many seconds, as adloco does
    python reproduce/first_calls.py passes 500 --bare    # without `set_up_arithmetic`

Each process is forked from one that has computed nothing. Prints the number of processes, and how
many of them had each result. Run two at once: on idle cores it is rarer.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from threading import Barrier

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from adloco.distributed.placement.threads import map_in_threads, set_up_arithmetic

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 259}


def passes() -> Callable[[], list[Tensor]]:
    """A small Llama's first loss and gradients in bf16."""
    torch.manual_seed(0)
    model, tokens = LlamaForCausalLM(LlamaConfig(**SIZES)), torch.randint(256, (4, 32))

    def compute() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters())]

    return compute


def cosine() -> Callable[[], list[Tensor]]:
    """Cosines of 512 numbers."""
    torch.manual_seed(0)
    numbers = (torch.arange(32.0)[:, None] * torch.rand(1, 8)).repeat(1, 2)
    return lambda: [numbers.cos()]


def product() -> Callable[[], list[Tensor]]:
    """A product of matrices."""
    torch.manual_seed(0)
    matrix = torch.randn(64, 64)
    return lambda: [matrix @ matrix]


def in_a_process(make: Callable[[], Callable[[], list[Tensor]]], *, bare: bool) -> str:
    """What both threads of a new process find, as JSON."""
    read, write = os.pipe()
    if (process := os.fork()) == 0:
        given, together = [make(), make()], Barrier(2)
        if not bare:
            set_up_arithmetic()

        def found(compute: Callable[[], list[Tensor]]) -> str:
            together.wait()
            tensors = compute()
            return sha256(b"".join(each.numpy().tobytes() for each in tensors)).hexdigest()

        device = torch.device("cpu")
        results = map_in_threads(found, given, together.abort, 2, device)
        os.write(write, json.dumps(results).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as result:
        text = result.read()
    os.waitpid(process, 0)
    return text


def main() -> None:
    make = {each.__name__: each for each in (passes, cosine, product)}[sys.argv[1]]
    end = time.monotonic() + float(sys.argv[2])
    found = Counter[str]()
    while time.monotonic() < end:
        found[in_a_process(make, bare="--bare" in sys.argv)] += 1
    print(f"{found.total()} processes: {sorted(found.values(), reverse=True)} had the same result")


if __name__ == "__main__":
    main()
