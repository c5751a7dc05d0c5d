"""The part of bench.py that trains the same model on the same data with other libraries.

Each library has an environment of its own, made once in `.venv-peers/` (git ignores it), with the
torch of this environment. All arms take turns; a turn's steps per second are divided by those of
adloco's arm for the same method. Where the kernel allows it, an arm runs in a network namespace of
its own, so that the bytes of its loopback are its own.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from peer_job import BATCH, CONTEXT, STEPS, WORKERS
from peer_numbers import Peer, Turn, measured, summed_up, without

from adloco.data.standard_library import StandardLibrary

ENVIRONMENTS = Path(__file__).absolute().parents[1] / ".venv-peers"
PROGRAM = Path(__file__).absolute().with_name("peer_launch.py")
VALIDATION_WINDOWS, TIMEOUT_SECONDS = 64, 600
ALONE = ["unshare", "--user", "--map-root-user", "--net"]


@dataclass(frozen=True)
class Arm:
    """A method trained with a library."""

    method: str
    library: str
    packages: tuple[str, ...] = ()
    """What pip installs for the library; nothing: it is in this environment."""


ARMS = (
    Arm("ddp", "adloco"),
    Arm("ddp", "torch"),
    Arm("local-sgd", "adloco"),
    Arm("local-sgd", "accelerate", ("accelerate==1.15.0",)),
    Arm("local-sgd", "torchft", ("torchft==0.2.0",)),
    Arm("diloco", "adloco"),
    Arm("diloco", "torchft", ("torchft==0.2.0",)),
)
NOT_RUN = without(
    "diloco",
    "exo-gym",
    "not run: its only release on PyPI, `exogym` 0.0.0a0, contains no code",
)


def peers(*, quick: bool) -> Iterator[Peer]:
    """All arms in turns; another library that fails takes part in no further one."""
    turns: dict[Arm, list[Turn]] = {arm: [] for arm in ARMS}
    failures: dict[Arm, str] = {}
    with tempfile.TemporaryDirectory() as name:
        write_data(Path(name))
        for number in range(1 if quick else 3):
            for arm in ARMS:
                if arm in failures:
                    continue
                print(f"  turn {number + 1}: {arm.method} with {arm.library}", flush=True)
                try:
                    turns[arm].append(one_turn(arm, environment(arm), Path(name)))
                except PeerError as error:
                    if arm.library == "adloco":
                        raise
                    failures[arm] = str(error)
    for arm in ARMS:
        base = turns[next(other for other in ARMS if other.method == arm.method)]
        if arm in failures:
            yield without(arm.method, arm.library, failures[arm])
        else:
            yield summed_up(arm.method, arm.library, turns[arm], base)
    yield NOT_RUN


class PeerError(Exception):
    """A library cannot be installed, or its arm cannot be run. The message says why."""


def environment(arm: Arm) -> Path:
    """The interpreter of a library's environment, which is made if it is not there."""
    if not arm.packages:
        return Path(sys.executable)
    folder = ENVIRONMENTS / arm.library
    python = folder / "bin" / "python"
    done = folder / "installed.txt"
    wanted = "\n".join(arm.packages) + "\n"
    if done.exists() and done.read_text() == wanted:
        return python
    print(f"  installing {', '.join(arm.packages)} in {folder}: 1 GB, minutes", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(f"torch=={torch.__version__.split('+')[0]}\n")
    pip = [str(python), "-m", "pip", "install", "--quiet", "-c", str(constraints)]
    result = subprocess.run([*pip, "torch", "numpy", *arm.packages], capture_output=True, text=True)
    if result.returncode:
        raise PeerError(f"pip cannot install it: {last_line(result.stderr)}")
    done.write_text(wanted)
    return python


def write_data(folder: Path) -> None:
    """Write windows of the standard library's source, in bytes: each worker's, and those held out.

    The held-out windows come from the last texts.
    """
    texts = [str(row["text"]) for _, row in StandardLibrary("text").read(["text"], 0)]
    data = torch.frombuffer(bytearray("\0".join(texts).encode()), dtype=torch.uint8)
    windows = data[: len(data) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
    held_out, rows = windows[-VALIDATION_WINDOWS:], windows[: -10 * VALIDATION_WINDOWS]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    count = WORKERS * STEPS * BATCH
    torch.save(held_out.clone(), folder / "validation.pt")
    torch.save(rows[order[:count]].view(WORKERS, -1, CONTEXT + 1), folder / "train.pt")


def one_turn(arm: Arm, python: Path, folder: Path) -> Turn:
    """Train with an arm once."""
    for name in ("readings.json", "result.json"):
        (folder / name).unlink(missing_ok=True)
    command = [str(python), str(PROGRAM), str(WORKERS), f"{arm.library}-{arm.method}", str(folder)]
    began = time.time()
    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            [*(ALONE if has_namespaces() else []), *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
        )
        try:
            code = process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise PeerError(f"it did not end within {TIMEOUT_SECONDS} seconds") from error
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output.seek(0)
        if code or not (folder / "result.json").exists():
            raise PeerError(f"it ends with an error: {last_line(output.read())}")
    return measured(
        json.loads((folder / "readings.json").read_text()),
        json.loads((folder / "result.json").read_text()),
        began,
    )


@cache
def has_namespaces() -> bool:
    """True if this user may make a network namespace."""
    try:
        return subprocess.run([*ALONE, "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def last_line(text: str) -> str:
    """The last line that says something."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no message")
