"""Starts and ends the ranks of a command that runs in several processes of this machine."""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from adloco.cli import elastic_room
from adloco.cli.alerts import Alerts
from adloco.cli.terminal import open_console, print_error, say
from adloco.cluster.network import LOOPBACK, VARIABLES, address_towards, interfaces
from adloco.config.sections import Recipe
from adloco.config.settings import RunSettings
from adloco.distributed.launch.failures import readable
from adloco.distributed.launch.launcher import this_rank
from adloco.distributed.launch.local_ranks import INTERRUPTED, start_ranks
from adloco.distributed.launch.rank_store import MEETING_POINT
from adloco.distributed.placement.islands import island_shape
from adloco.errors import OtherRankError, RankFailureError, exit_code, require
from adloco.run.folder import resume_line
from adloco.run.training_run import TrainingRun

if TYPE_CHECKING:
    from adloco.elastic.machine_launcher import Recovery
    from adloco.elastic.machines import Rendezvous

SHORTEST_MEETING_SECONDS = 30.0
"""A launcher takes seconds to start, more on a busy machine. If each waits for less than that, and
is started again when it has given up, they may miss each other for ever.
"""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """The machines whose launchers meet."""

    host: str
    """Address of the machine on which the store of the run is kept."""
    port: int
    number: int
    """Number of processes that begin the run."""

    @staticmethod
    def read(number: int, address: str) -> "Machines | None":
        """The machines that --machines and --meet name; None: this one alone.

        Raises:
            ValueError: One of the two is missing, or is none, or elastic/ was removed.
        """
        if number == 1 and not address:
            return None
        require(
            elastic_room.is_there(),
            "--machines needs the folder elastic/ of adloco, which was removed here; leave out "
            "--machines and --meet, or start the ranks with torchrun",
        )
        require(number >= 2, f"--meet needs the number of --machines, at least 2, got {number}")
        require(
            bool(address),
            f"--machines {number} needs --meet HOST:PORT, the address of the first machine and a "
            "port that is free there",
        )
        host, _, port = address.rpartition(":")
        require(
            bool(host) and port.isdecimal() and 0 < int(port) < 1 << 16,
            f"--meet must be HOST:PORT, for instance 10.0.0.1:29400, got {readable(address)}",
        )
        return Machines(host=host, port=int(port), number=number)

    @property
    def point(self) -> str:
        """The address as on the line."""
        return f"{self.host}:{self.port}"

    def rendezvous(self, count: int, settings: RunSettings, secret: bytes) -> "Rendezvous":
        """Meet the launchers of the others; `on_machines` says how.

        Args:
            count: Ranks that this one starts.
            settings: Of the run; they say how long to wait.
            secret: The run's, which all prove; empty: there is none.
        """
        from adloco.elastic.connections import give_up_after
        from adloco.elastic.machines import on_machines

        console = open_console(trains=True)
        say(console, f"meets {self.number} machines at {self.point} ...")
        if not secret and not address_towards(self.host).startswith(LOOPBACK):
            say(
                console,
                f"without run.secret_file, whoever can reach {self.point} can use the store of "
                "this run, and end it",
            )
        address, seconds = (self.host, self.port), settings.timeout_seconds
        place = on_machines(address, self.number, count, seconds, secret)
        # So a machine that was cut off meets the others again as soon as its link is back.
        give_up_after(settings.silent_seconds, self.port)
        return place

    def environment(self) -> dict[str, str]:
        """The variables by which gloo and NCCL use the network that leads to the first machine,
        unless the user has chosen one; and the one with the meeting point.
        """
        own = address_towards(self.host)
        names = [name for name, address in interfaces().items() if address == own]
        network = {name: names[0] for name in VARIABLES if names and not os.environ.get(name)}
        return network | {MEETING_POINT: self.point}

    def end_after_signal(self, number: int) -> None:
        """Say that the signal came while the launcher waited for the store; end this process."""
        print_error(
            f"told to stop by {signal.Signals(number).name}, while the launcher at {self.point} "
            "did not answer; the ranks of this machine have ended; the same command starts them "
            "again"
        )
        sys.stdout.flush()
        os._exit(INTERRUPTED)


def ranks_needed(count: int, recipe: Recipe) -> int:
    """The number of ranks, out of so many, that can share the workers that were not dropped."""
    workers, shape = len(recipe.method.living_workers), recipe.placement
    for fewer in range(count, 0, -1) if recipe.method.dropped else ():
        with suppress(ValueError):
            island_shape(fewer, workers, shape.shard_size, shape.replica_size)
            return fewer
    return count  # `on_ranks` says why they cannot.


def on_ranks(
    count: int,
    recipe: Recipe | None,
    words: Sequence[str],
    *,
    recovery: "Recovery | None" = None,
    machines: Machines | None = None,
) -> int:
    """Run `adloco WORDS` on several ranks of this machine and return the exit code.

    Args:
        recipe: The recipe that the ranks run; None: there is none.
        recovery: What happens after a rank has failed, if the others recover; None: all end.
        machines: Those whose ranks train together; None: this one alone.

    Raises:
        ValueError: The workers of the recipe cannot be spread over that many ranks, the machines
            would wait too briefly for each other, or the file with their secret cannot be used.
        RankFailureError: The other machines did not come.
    """
    require(count >= 1, f"--ranks must be >= 1, got {count}")
    run = recipe.run if recipe else RunSettings()
    if recipe:
        workers, shape = len(recipe.method.living_workers), recipe.placement
        everywhere = count * (machines.number if machines else 1)
        island_shape(everywhere, workers, shape.shard_size, shape.replica_size)
    if machines is None and recovery is None:
        return start_ranks(count, words, run.grace_seconds)
    from adloco.elastic import machine_launcher
    from adloco.elastic.secret import read_secret

    if machines:
        require(
            run.timeout_seconds >= SHORTEST_MEETING_SECONDS,
            f"run.timeout_seconds must be >= {SHORTEST_MEETING_SECONDS:g} with --machines, got "
            f"{run.timeout_seconds:g}: launchers that wait so briefly would miss each other; give "
            "more, or leave it out",
        )
    secret = read_secret(run.secret_file) if machines and run.secret_file else b""
    return machine_launcher.start_ranks(
        count,
        words,
        run.grace_seconds,
        recovery=recovery,
        rendezvous=(lambda: machines.rendezvous(count, run, secret)) if machines else None,
        environment=machines.environment() if machines else None,
        unheard=machines.end_after_signal if machines else None,
    )


@dataclass
class RankEnd:
    """Ends this rank if its main thread waits for another one."""

    alerts: Alerts = field(default_factory=Alerts)
    run: TrainingRun | None = field(default=None, init=False)
    """The run that this rank trains; None: there is none yet."""
    folder: Path | None = field(default=None, init=False)
    """The run that a failed rank leaves to be resumed; None: there is none yet."""

    def let_go(self) -> None:
        """Let the main thread leave the inner steps that it takes."""
        if self.run:
            self.run.stop()

    def after_failure(self, error: OtherRankError) -> None:
        """Print the error of another rank and end this process."""
        # Rank 0 may be the one that failed.
        anyone = isinstance(error, RankFailureError)
        self._end(str(self.advised(error)), exit_code(error), anyone=anyone)

    def turned_away(self, error: Exception) -> None:
        """Print why this rank, which has just joined, cannot take part, and end this process."""
        self._end(str(error), exit_code(error))

    def after_signal(self, number: int) -> None:
        """Say that the signal came while this rank waited for another one; end this process."""
        assert self.folder  # It trains.
        self._end(
            f"told to stop by {signal.Signals(number).name}, but another rank failed, or did not "
            "come within run.grace_seconds; what was trained since the newest checkpoint is lost; "
            "resume with: " + resume_line(self.folder),
            INTERRUPTED,
        )

    def advised(self, error: OtherRankError) -> OtherRankError:
        """The error, with the line that resumes the run after the failure of a rank."""
        if not isinstance(error, RankFailureError) or self.folder is None:
            return error
        return RankFailureError(f"{error}; resume with: {resume_line(self.folder)}")

    def _end(self, message: str, code: int, *, anyone: bool = False) -> None:
        log = logging.getLogger(__name__)
        if log.hasHandlers():  # Else logging itself would print the message, before training.
            log.error("%s", message)
        print_error(message, f"adloco (rank {this_rank()})")
        self.alerts.failed(message, anyone=anyone)
        if self.run:
            self.run.saving.wait()
        self.alerts.wait()
        os._exit(code)
