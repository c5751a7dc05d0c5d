"""Errors that say that memory ran out, batches on a device, and the device of a run that was
trained elsewhere.
"""

from collections import namedtuple
from contextlib import nullcontext

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from adloco.distributed.device import require_samples, to_device
from adloco.distributed.device_memory import ran_out_of_memory
from adloco.run.environment import device_here


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_which_errors_say_that_memory_ran_out(error: RuntimeError, memory: bool) -> None:
    assert ran_out_of_memory(error) == memory


def test_a_batch_keeps_its_types_on_a_device() -> None:
    batch = namedtuple("Batch", "texts parts")(["a"], {"packed": pack_sequence([torch.ones(2)])})
    moved = to_device((batch, [torch.zeros(1)]), torch.device("cpu"))
    assert [type(each).__name__ for each in (*moved, moved[0].parts["packed"])] == [
        *("Batch", "list", "PackedSequence")
    ]
    assert moved[0].texts == ["a"]


@pytest.mark.parametrize(
    ("batch", "fits"),
    [
        ({"tokens": torch.zeros(37), "ends": torch.zeros(5)}, True),
        (torch.zeros(8, 3, 2, 2), True),
        (torch.zeros(3, 2, 4), True),
        ([torch.zeros(2)] * 4, True),
        (torch.zeros(()), True),
        ("text", True),
        ((torch.zeros(3, 8), torch.zeros(3)), False),
    ],
)
def test_fewer_samples_than_asked_for_are_refused(batch: object, fits: bool) -> None:
    """Of four samples: of any lengths, two views of each, in another dimension, in a list."""
    with nullcontext() if fits else pytest.raises(ValueError, match="must give 4 samples"):
        require_samples(batch, 0, 0, 4)


def test_a_run_of_another_machine_is_read_on_a_device_of_this_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert {device_here(name).type for name in ("cuda", "cuda:1", "cpu", "auto")} == {"cpu"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names = ("cuda", "cuda:0", "cuda:1", "auto", "cpu")
    assert [str(device_here(name)) for name in names] == ["cuda", "cuda:0", "cuda", "cuda", "cpu"]
