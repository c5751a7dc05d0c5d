"""Memory of this process by phase of a round: its peak within the phase, and what is held at the
end; and PyTorch's own snapshot on a GPU.

On a GPU the numbers are those of torch's allocator. On a CPU they are the resident memory of the
process, the interpreter and all libraries included. Linux can forget a process's peak (`proc(5)`,
clear_refs); elsewhere a phase's peak is that of the process so far, and what is held is not known.
"""

import contextlib
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from adloco.errors import require

PHASES = ("inner_steps", "sync", "evaluation", "checkpoint")
SNAPSHOT_EVENTS = 100_000
"""Allocations and frees that a snapshot holds, the last ones."""
Usage = dict[str, dict[str, int | None]]
"""Phase -> peak_bytes, current_bytes."""


class Memory:
    """What each phase took, and the largest of all."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peak = 0
        self._phases: Usage = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase; one that comes twice before `take` counts as one."""
        self._peak = self.peak_bytes
        forget_peak(self._device)
        try:
            yield
        finally:
            peak, current = usage(self._device)
            before = self._phases.get(name, {}).get("peak_bytes") or 0
            self._phases[name] = {"peak_bytes": max(peak, before), "current_bytes": current}

    @property
    def peak_bytes(self) -> int:
        """The largest so far, outside of phases too."""
        return max(self._peak, usage(self._device)[0])

    def take(self) -> Usage:
        """The phases since it was last asked, in the order of `PHASES`."""
        taken = {name: self._phases[name] for name in PHASES if name in self._phases}
        self._phases = {}
        return taken


def usage(device: torch.device) -> tuple[int, int | None]:
    """Peak since it was last forgotten, and now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    kilobytes = {
        line.partition(":")[0]: int(line.split()[1])
        for line in lines
        if line.startswith(("VmHWM:", "VmRSS:"))
    }
    if len(kilobytes) < 2:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak, None
    # The system adds up its counters late: what is held can be read as more than the peak.
    return 1024 * max(kilobytes.values()), 1024 * kilobytes["VmRSS"]


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # Not Linux, or not allowed here.
        Path("/proc/self/clear_refs").write_text("5")


def snapshot_file(folder: Path, device: torch.device) -> Path:
    """Where in a run's folder the first process writes its snapshot, to be opened at
    pytorch.org/memory_viz; ValueError for a CPU.
    """
    require(
        device.type == "cuda",
        f"profile.memory needs a GPU, but the run is on {device}; leave it out (recipe section "
        "[profile])",
    )
    return folder / "profile" / "memory-rank0.pickle"


@contextlib.contextmanager
def memory_snapshot(file: Path | None) -> Iterator[None]:
    """PyTorch's history of allocations on GPUs, written at the end, however it comes. file: None
    for nothing.
    """
    if file is None:
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_EVENTS, stacks="python")
    try:
        yield
    finally:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(file))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)
