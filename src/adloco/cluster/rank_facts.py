"""Facts about a rank's machine, which the ranks exchange before a long run."""

import math
import os
import platform
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch

from adloco.cluster.job import PORT
from adloco.cluster.network import (
    VARIABLES,
    address_towards,
    gloo_address,
    interfaces,
    port_is_free,
)
from adloco.config.sections import Recipe
from adloco.distributed.launch.launcher import this_rank
from adloco.distributed.launch.rank_store import meeting_point
from adloco.distributed.messages import all_states
from adloco.distributed.placement.islands import island_shape
from adloco.run.environment import choose_device, code_checksum

SEEN_SECONDS = 5.0
"""Seconds until a file shows on other machines; NFS keeps lists of names for seconds."""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """One rank and its machine."""

    host: str
    machine: int
    """Number of the machine, as the launcher counts them."""
    versions: Mapping[str, str]
    """The versions of python, torch and adloco, and a checksum of adloco's code, by name."""
    device: str
    """The GPU's name, or cpu."""
    gpus: int
    ranks_here: int
    """Ranks on this machine."""
    address: str
    """Address where gloo listens; empty if GLOO_SOCKET_IFNAME names no interface."""
    towards_first: str
    """This machine's address on the way to the first one; empty if there is none."""
    addresses: Mapping[str, str]
    """The address of each interface, by its name."""
    chosen: Mapping[str, str]
    """The variables that choose an interface, those that are set."""
    port_is_free: bool
    """True if torchrun's agents could meet on this machine, at their port."""
    folder: str
    """The folder for runs, or the nearest one above it that exists."""
    writable: str
    """Why nothing can be written there; empty if it can."""
    free_bytes: int
    """Free disk there."""


def look(folder: Path, device_name: str) -> RankFacts:
    """Look at this rank's machine.

    Args:
        folder: The run's folder, which need not exist yet.
        device_name: As `run.device`.
    """
    device = choose_device(device_name)
    whole = folder.absolute()
    there = next(each for each in (whole, *whole.parents) if each.is_dir())
    return RankFacts(
        host=socket.gethostname(),
        machine=int(os.environ.get("GROUP_RANK", "0")),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "adloco": metadata.version("adloco"),
            "the code of adloco": code_checksum(),
        },
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        gpus=torch.cuda.device_count() if device.type == "cuda" else 0,
        ranks_here=int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1"))),
        address=gloo_address(),
        towards_first=address_towards(meeting_point().rpartition(":")[0]),
        addresses=interfaces(),
        chosen={name: os.environ[name] for name in VARIABLES if os.environ.get(name)},
        port_is_free=port_is_free(PORT),
        folder=str(there),
        writable=_why_not_writable(there),
        free_bytes=shutil.disk_usage(there).free,
    )


def all_facts(mine: RankFacts) -> list[RankFacts]:
    """The facts of all ranks, in their order, on every rank.

    A rank with another version of adloco, which `versions` tells, may have other facts: what it
    does not say is taken to be as here.
    """
    own = asdict(mine)
    known = ({name: said.get(name, own[name]) for name in own} for said in all_states(own))
    return [RankFacts(**each) for each in known]


def first_of_islands(facts: Sequence[RankFacts], recipe: Recipe | None) -> list[int]:
    """The first rank of each island.

    recipe: Says how large an island is. Without one, and where one worker is on all ranks, each
        machine is an island; on a single machine, each rank.

    Raises:
        ValueError: These ranks cannot share the recipe's workers.
    """
    if recipe is not None and not recipe.data_parallel:
        shape = recipe.placement
        workers = len(recipe.method.living_workers)
        sizes = island_shape(len(facts), workers, shape.shard_size, shape.replica_size)
        return list(range(0, len(facts), math.prod(sizes)))
    machines = [each.machine for each in facts]
    firsts = [machines.index(machine) for machine in sorted({*machines})]
    return firsts if len(firsts) > 1 else list(range(len(facts)))


def who_sees(folder: Path) -> list[bool]:
    """For each rank, True if it sees a file that rank 0 writes into its folder.

    Called on all ranks.

    folder: A folder that exists and that rank 0 can write into; the other ranks' is ignored.
    """
    # Every rank has the name before the file is there.
    file = Path(all_states(str(folder.absolute() / f".adloco-{uuid.uuid4().hex}"))[0])
    try:
        if this_rank() == 0:
            file.touch()
        all_states(None)
        deadline = time.monotonic() + SEEN_SECONDS
        while not (seen := file.exists()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return all_states(seen)
    finally:
        if this_rank() == 0:
            file.unlink(missing_ok=True)


def _why_not_writable(folder: Path) -> str:
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)
