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
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bench_pairs import spread
from peer_job import BATCH, CONTEXT, ROUNDS, STEPS, SYNC_EVERY, WORKERS

from adloco.data.files import library_texts

ENVIRONMENTS = Path(__file__).absolute().parents[1] / ".venv-peers"
PROGRAM = Path(__file__).absolute().with_name("peer_arms.py")
VALIDATION_WINDOWS, TIMEOUT_SECONDS = 64, 600
Turn = dict[str, Any]
"""What one turn of a library measured; what each number is, `measured` says."""
Peer = dict[str, Any]
"""A library's numbers, medians over its turns: a line of the second table of performance.md.
`failed` says why there are none, and `ratio` is that of steps per second to adloco's."""
MEDIANS = ("steps_per_second", "sync_seconds", "start_seconds", "round_megabytes", "loss")
# The loopback of a new namespace is down. The first rank that fails ends the script; 127 is said of
# one that had ended before, which bash may forget.
RANKS = """
ip link set lo up 2>/dev/null
for rank in $(seq 0 $((WORLD_SIZE - 1))); do RANK=$rank LOCAL_RANK=$rank "$@" & done
for rank in $(seq $WORLD_SIZE); do wait -n || [ $? = 127 ] || exit 1; done
"""
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
NOT_RUN = "not run: its only release on PyPI, `exogym` 0.0.0a0, contains no code"


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
    yield without("diloco", "exo-gym", NOT_RUN)


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
    texts = list(library_texts())
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
    arguments = [str(python), str(PROGRAM), f"{arm.library}-{arm.method}", str(folder)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(WORKERS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    began = time.time()
    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            [*(ALONE if has_namespaces() else []), "bash", "-c", RANKS, "ranks", *arguments],
            env=os.environ | shared,
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


def measured(readings: Sequence[dict[str, Any]], result: dict[str, Any], began: float) -> Turn:
    """The numbers of a turn.

    Args:
        readings: When each step's batch was asked for, and the loopback's bytes by then.
        result: The final loss on held-out windows, and the library's version.
        began: When the process was started.
    """
    times = [reading["time"] for reading in readings]
    steps = [after - before for before, after in pairwise(times)]
    # A sync follows step H, or in one library step H + 1; it adds to the steps around it.
    ends = range(SYNC_EVERY, len(steps), SYNC_EVERY)
    usual = statistics.median(steps)
    syncs = [steps[at - 1] + steps[at] - 2 * usual for at in ends]
    # Whole rounds, from the middle of the first one to the middle of the last.
    first, last = SYNC_EVERY // 2, STEPS - SYNC_EVERY // 2
    sent = readings[last]["loopback_bytes"] - readings[first]["loopback_bytes"]
    return {
        "version": result["version"],
        # Inner steps of a worker, syncs included.
        "steps_per_second": (last - first) / (times[last] - times[first]),
        "sync_seconds": statistics.median(syncs),
        # Until the first step is done.
        "start_seconds": times[1] - began,
        # Of both ranks together.
        "round_megabytes": sent / (ROUNDS - 1) / 1e6,
        "loss": result["loss"],
    }


def summed_up(method: str, library: str, turns: Sequence[Turn], base: Sequence[Turn]) -> Peer:
    """The line of a library.

    Args:
        method: What was trained.
        library: With which library.
        turns: Its turns.
        base: Those of adloco with the same method; the n-th of both were taken one soon after the
            other.
    """
    speeds = ([turn["steps_per_second"] for turn in of_side] for of_side in (turns, base))
    ratios = [mine / other for mine, other in zip(*speeds, strict=True)]
    medians = {name: statistics.median(turn[name] for turn in turns) for name in MEDIANS}
    version = turns[0]["version"]
    about = {"method": method, "library": library, "failed": "", "version": version}
    return about | spread(ratios) | medians


def without(method: str, library: str, failed: str) -> Peer:
    """The line of a library that has no numbers."""
    return {"method": method, "library": library, "failed": failed}
