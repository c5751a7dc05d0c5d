"""Errors that say that memory ran out, and the device of a run that was trained elsewhere."""

import pytest
import torch

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
