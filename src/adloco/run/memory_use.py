"""Measures this process's memory in each phase of a round: its peak, and its size at the phase's
end.

On a GPU the numbers are those of torch's allocator. On a CPU they are the resident memory of the
process, the interpreter and all libraries included. Linux can reset a process's peak (`proc(5)`,
clear_refs). On other systems a phase's peak is the peak of the process so far, and its current size
is not known (None).
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from adloco.late import torch

PHASES = ("inner_steps", "sync", "evaluation", "checkpoint")
Usage = dict[str, dict[str, int | None]]
"""Phase -> peak_bytes, current_bytes."""


class Memory:
    """Measures the memory of each phase, and the peak of this process since it began or resumed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peak = 0
        self._phases: Usage = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase. If it runs twice before `take`, the larger peak counts."""
        self._peak = self.peak_bytes
        forget_peak(self._device)
        try:
            yield
        finally:
            peak, current = usage(self._device)
            self._peak = max(self._peak, peak)  # Linux may say less later; see `usage`.
            before = self._phases.get(name, {}).get("peak_bytes") or 0
            self._phases[name] = {"peak_bytes": max(peak, before), "current_bytes": current}

    @property
    def peak_bytes(self) -> int:
        """The peak so far, inside and outside of phases."""
        return max(self._peak, usage(self._device)[0])

    def take(self) -> Usage:
        """The phases measured since the last call, in the order of `PHASES`."""
        taken = {name: self._phases[name] for name in PHASES if name in self._phases}
        self._phases = {}
        return taken


def usage(device: torch.device) -> tuple[int, int | None]:
    """(peak bytes since `forget_peak`, bytes now); None for now where the system does not say."""
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
    # Linux updates its counters late, so the current size can be larger than the peak.
    return 1024 * max(kilobytes.values()), 1024 * kilobytes["VmRSS"]


def machine_bytes() -> int:
    """Memory of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def held_bytes(device: torch.device) -> int:
    """Bytes that this process has now, or its peak where the system does not say."""
    peak, now = usage(device)
    return peak if now is None else now


def forget_peak(device: torch.device) -> None:
    """Reset the peak that `usage` returns, where the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # Not Linux, or not allowed here.
        Path("/proc/self/clear_refs").write_text("5")
