"""How often a process's first passes, made by two threads at once, differ from those of others.

    python reproduce/first_calls.py 500           # for so many seconds, as adloco does
    python reproduce/first_calls.py 500 --bare    # without `set_up_arithmetic`

Each process is forked from one that has computed nothing. Prints the number of processes, and how
many of them had each result.
"""

import json
import os
import sys
import time
from collections import Counter

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from adloco.distributed.placement.threads import map_in_threads, set_up_arithmetic

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 259}


def first_passes(seed: int) -> tuple[str, str]:
    """Loss and sum of all gradients of a small Llama's first pass in bf16, to the last bit."""
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    for parameter in model.parameters():
        parameter.data.normal_(std=0.02, generator=generator)
    tokens = torch.randint(256, (4, 32), generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    total = sum(parameter.grad.double().sum().item() for parameter in model.parameters())
    return loss.item().hex(), total.hex()


def in_a_process(*, bare: bool) -> str:
    """What both threads of a new process find, as JSON."""
    read, write = os.pipe()
    if (process := os.fork()) == 0:
        if not bare:
            set_up_arithmetic()
        found = map_in_threads(first_passes, [0, 1], lambda: None, 2, torch.device("cpu"))
        os.write(write, json.dumps(found).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as result:
        text = result.read()
    os.waitpid(process, 0)
    return text


def main() -> None:
    end = time.monotonic() + float(sys.argv[1])
    found = Counter[str]()
    while time.monotonic() < end:
        found[in_a_process(bare="--bare" in sys.argv)] += 1
    print(f"{found.total()} processes: {sorted(found.values(), reverse=True)} had the same result")


if __name__ == "__main__":
    main()
