"""The environment of a run: device, precision, versions, git commit, random generators."""

import hashlib
import platform
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from adloco.distributed.device import native_bf16
from adloco.distributed.placement.threads import num_cores
from adloco.errors import require

PACKAGES = ("adloco", "torch", "transformers", "tokenizers", "safetensors", "numpy")


def code_checksum() -> str:
    """A checksum of all modules of this package, to compare the code of several ranks."""
    package = Path(__file__).parents[1]
    return hashlib.sha256(
        b"".join(file.read_bytes() for file in sorted(package.rglob("*.py")))
    ).hexdigest()


def choose_device(name: str) -> torch.device:
    """The device that `run.device` names; auto takes a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = None
    with suppress(RuntimeError):  # No device has this name.
        device = torch.device(name)
    if device is None or not (device.type == "cuda" or name == "cpu"):
        raise ValueError(
            f"run.device must be auto, cpu or cuda, got {name!r} (recipe section [run])"
        )
    require(
        device.type == "cpu" or torch.cuda.is_available(),
        f"run.device {name!r} is not available on this machine; use auto or cpu (recipe section "
        "[run])",
    )
    return device


def device_here(name: str) -> torch.device:
    """The device of a run that was trained, or what auto takes where this machine lacks it."""
    numbers = range(torch.cuda.device_count())
    here = {"cpu", *(("cuda", *(f"cuda:{number}" for number in numbers)) if numbers else ())}
    return choose_device(name if name in here else "auto")


def choose_precision(name: str, device: torch.device) -> torch.dtype | None:
    """The data type for autocast, or None for fp32; auto is bf16 where the device has it."""
    bf16 = native_bf16(device) if name == "auto" else name == "bf16"
    return torch.bfloat16 if bf16 else None


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """State of the random generators that a model may draw from, for dropout for instance."""
    on_device = {"device": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}
    return {"cpu": torch.get_rng_state(), **on_device}


def set_rng_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restore the result of `rng_state`; a GPU's generator only if the state has one."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "device" in state:
        torch.cuda.set_rng_state(state["device"], device)


def describe_environment(
    device: torch.device, precision: torch.dtype | None, seed: int
) -> dict[str, Any]:
    """Contents of environment.json."""
    return {
        "command": sys.argv,
        "versions": {
            "python": platform.python_version(),
            **{package: metadata.version(package) for package in PACKAGES},
        },
        "git": _git_state(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "device_type": str(device),
        "precision": "bf16" if precision else "fp32",
        "cores": num_cores(),
        "torch_threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "seeds": {"model": seed, "data": seed},
    }


def processor() -> str:
    """The name of this machine's processor, on which the last bits of a run on CPUs depend."""
    file = Path("/proc/cpuinfo")
    for line in file.read_text().splitlines() if file.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git_state() -> dict[str, Any] | None:
    """The commit of the checkout, and dirty: True if files differ from it; None without one."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
