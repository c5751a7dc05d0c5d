"""A run whose processes, disk and links `chaos.py` disturbs, and the user who starts it again.

It is in namespaces of its own, where the benchmark is process 1: all other processes that the
kernel shows there belong to the run.
"""

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos_checks import LONG_CUT, Fault, Outcome, lines_of
from links_network import DEVICE, address, call, namespace

from adloco.run.checkpoint import list_checkpoints
from adloco.run.folder import SUMMARY

TICK_SECONDS, STALL_SECONDS, ORPHAN_SECONDS, AGAIN_SECONDS = 0.02, 240.0, 5.0, 1.0
END_SECONDS = 330.0
"""torchrun's agents wait five minutes at the end of a run for one that failed."""
NODE = "CHAOS_NODE"
"""The variable that tells the processes of nodes apart."""
NOWHERE = "02:00:00:00:00:99"
"""A hardware address that no interface has."""


@dataclass(frozen=True)
class Process:
    """A process of the run."""

    pid: int
    rank: int
    """-1: a launcher, or a run without ranks."""
    node: int
    stopped: bool
    orphan: bool
    """True for a rank whose launcher has ended."""

    @staticmethod
    def all() -> list["Process"]:
        """All processes of the run that have not ended, by rank."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:  # It has ended meanwhile.
                continue
            of = dict(word.split("=", 1) for word in words if "=" in word)
            if folder.name != "1" and state not in "ZX":  # Z, X: it has ended.
                rank, node = int(of.get("RANK", "-1")), int(of.get(NODE, "-1"))
                found.append(
                    Process(int(folder.name), rank, node, state == "T", rank >= 0 and parent == "1")
                )
        return sorted(found, key=lambda process: (process.rank, process.pid))


class DisturbedRun:
    """A run, from its start to its end.

    Args:
        lines: The command line of each node.
        environment: Variables of its processes.
        folders: The run's folder as each node sees it, alone on a small disk.
        log: The file for the output of all nodes.
        faults: The faults, in their order.
        show: Called with each fault from which the run has recovered.
    """

    def __init__(
        self,
        lines: Sequence[Sequence[str]],
        environment: Mapping[str, str],
        folders: Sequence[Path],
        log: Path,
        faults: Sequence[Fault],
        show: Callable[[Outcome], None],
    ) -> None:
        self.outcomes: list[Outcome] = []
        self.starts = 0
        """How often a line was started, by a user or a scheduler."""
        self.seconds = 0.0
        """From the first start to the end."""
        self._lines, self._environment, self._folders, self._log = lines, environment, folders, log
        self._faults, self._show = list(faults), show
        self._filler: Path | None = None
        """The file that fills a disk."""
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._away: set[int] = set()
        self._ended: dict[int, float] = {}
        self._passing: tuple[float, Callable[[], object]] | None = None
        self._seen: set[tuple[int, float]] = set()
        self._moved = time.monotonic()
        self._reached = {0: self._moved}
        self._newest = 0
        """The newest round that is recorded; a restart sets it back."""
        self._unsaved: list[Path] | None = None
        """The newest checkpoint, if any, when the disk had room again; None: a newer one came."""
        self._struck = self._healed = 0.0
        """When the last fault came, in seconds since 1970, and when it was over if it passes."""

    def train(self) -> list[str]:
        """Train until the budget is spent and return what went wrong, a sentence each."""
        began = time.monotonic()
        for node in range(len(self._lines)):
            self._start(node)
        try:
            while self._passing or not self._over():
                self._look()
                ends = any((folder / SUMMARY).exists() for folder in self._folders)
                limit = END_SECONDS if ends else STALL_SECONDS
                if time.monotonic() - self._moved > limit:
                    return [f"nothing happened within {limit:g} s of the last round"]
                if self._passing and time.monotonic() >= self._passing[0]:
                    self._passing[1]()
                    self._passing, self._healed = None, time.monotonic()
                    self._note(f"{self.outcomes[-1].fault.kind} is over")
                if self._faults and self._is_due(self._faults[0]) and self._strike(self._faults[0]):
                    del self._faults[0]
                self._start_again()
                time.sleep(TICK_SECONDS)
            self._look()
            if self.outcomes and self.outcomes[-1].recovery is None and not self._faults:
                # Ranks went on to the end.
                self.outcomes[-1].recovery = self._moved - self.outcomes[-1].struck
                self.outcomes[-1].in_place = True
                self._show(self.outcomes[-1])
            self.seconds = time.monotonic() - began
            orphans = self._orphans()
            return [
                *(f"the run ended before its fault {fault}" for fault in self._faults),
                *(
                    f"the machines did not train together again after {outcome.fault}"
                    for outcome in self.outcomes
                    if outcome.recovery is not None and not outcome.over
                ),
                *orphans,
            ]
        finally:
            for process in Process.all():
                kill(process)
            for launcher in self._nodes.values():
                launcher.wait()

    def _start(self, node: int) -> None:
        self._note(f"node {node} is started")
        self.starts += 1
        with self._log.open("ab") as log:
            self._nodes[node] = subprocess.Popen(
                self._lines[node],
                env=os.environ | self._environment | {NODE: str(node)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _start_again(self) -> None:
        """Start what has failed by the same line, as a user or a scheduler does until the run is
        complete.
        """
        if any(launcher.poll() == 0 for launcher in self._nodes.values()):
            return
        for node, launcher in self._nodes.items():
            if launcher.poll() and node not in self._away and not self._filler:
                ended = self._ended.setdefault(launcher.pid, time.monotonic())
                if time.monotonic() - ended > AGAIN_SECONDS:
                    self._start(node)

    def _over(self) -> bool:
        """True if a node has completed the run and the others have ended too. With the first of
        them goes the store of torchrun, so the others may end with an error.
        """
        codes = [launcher.poll() for launcher in self._nodes.values()]
        return 0 in codes and None not in codes

    def _orphans(self) -> list[str]:
        deadline = time.monotonic() + ORPHAN_SECONDS
        while (left := Process.all()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return [f"{process} outlives the run" for process in left]

    def _look(self) -> None:
        """See whether a round was recorded since the last look."""
        # The records are on the disk of the machine that has rank 0, which can change.
        for folder in dict.fromkeys(self._folders):
            line = _last_line(folder / "metrics.jsonl")
            # A line that was there before is the newest again, if a restart has cut later ones.
            if line and (line["round"], line["seconds"]) not in self._seen:
                self._seen.add((line["round"], line["seconds"]))
                self._see(line["round"], folder)

    def _see(self, round: int, folder: Path) -> None:
        """Take note of a round that was recorded in a folder."""
        self._moved = time.monotonic()
        if self.outcomes:
            outcome = self.outcomes[-1]
            outcome.repeated += max(0, self._newest + 1 - round)
            outcome.on_full_disk += self._filler is not None
            seen = outcome.see(round, self._trained_by(), self._moved)
            together = self._see_together(outcome, folder)
            if (seen or together) and outcome.over:
                self._show(outcome)
        self._reached.setdefault(round, self._moved)
        self._newest = round

    def _see_together(self, outcome: Outcome, folder: Path) -> bool:
        """True if the round that was just recorded is the first that all machines have trained
        together after a long cut.
        """
        if outcome.fault.kind != LONG_CUT or outcome.together is not None or self._passing:
            return False
        starts = [line for line in lines_of(folder / "starts.jsonl") if line["time"] > self._struck]
        # Those that remain regroup; the machine that was away joins them, or all resume.
        if starts and starts[-1]["kind"] == "regroup":
            return False
        outcome.together = self._moved - self._healed
        return True

    def _is_due(self, fault: Fault) -> bool:
        """True if the last fault is over and the moment of this one has come. A disk that was full
        is over when a checkpoint is written.
        """
        over = not self.outcomes or self.outcomes[-1].over
        if self._unsaved is not None and self._unsaved != self._newest_checkpoint():
            self._unsaved = None
        passed = self._passing is None and self._unsaved is None
        moment = self._reached.get(fault.round, math.inf) + fault.delay
        return over and passed and time.monotonic() >= moment

    def _newest_checkpoint(self) -> list[Path]:
        """It alone, or nothing if there is none."""
        found = [one for each in self._folders for one in list_checkpoints(each / "checkpoints")]
        return [max(found, key=lambda checkpoint: checkpoint.name)] if found else []

    def _ranks(self) -> list[Process]:
        """The processes that train, by rank; in a run without ranks the one that was started."""
        processes = Process.all()
        alone = "--ranks" not in self._lines[0] and len(self._lines) == 1
        return processes[:1] if alone else [one for one in processes if one.rank >= 0]

    def _trained_by(self) -> frozenset[int]:
        return frozenset(process.pid for process in self._ranks() if not process.stopped)

    def _strike(self, fault: Fault) -> bool:
        """Inject a fault; False if there is nothing yet that it could hit."""
        ranks = [process for process in self._ranks() if not process.orphan]
        node = fault.victim % len(self._lines)
        if not ranks or self._nodes[node].poll() is not None:
            return False
        self._note(f"{fault.kind} after round {self._newest}")
        self._moved, self._struck = time.monotonic(), time.time()
        outcome = Outcome(
            fault=fault, struck=self._moved, recorded=self._newest, trained_by=self._trained_by()
        )
        self.outcomes.append(outcome)
        heal = FAULTS[fault.kind](self, ranks[fault.victim % len(ranks)], node)
        if heal:
            outcome.passes = True
            self._passing = (self._moved + fault.seconds, heal)
        return True

    def _note(self, text: str) -> None:
        with self._log.open("a") as log:
            log.write(f"== {time.strftime('%X')} {text}\n")

    # The faults: each gets the rank and the node that it hits, and returns what ends it if it
    # passes by itself.

    def kill_rank(self, rank: Process, node: int) -> None:
        """SIGKILL of a rank."""
        kill(rank)

    def stop_rank(self, rank: Process, node: int) -> Callable[[], object] | None:
        """SIGSTOP of a rank; a process without others goes on after a while."""
        os.kill(rank.pid, signal.SIGSTOP)
        return None if rank.rank >= 0 else lambda: os.kill(rank.pid, signal.SIGCONT)

    def terminate_node(self, rank: Process, node: int) -> None:
        """SIGTERM of a node's launcher, which ends gracefully."""
        self._nodes[node].terminate()

    def kill_launcher(self, rank: Process, node: int) -> None:
        """SIGKILL of a node's launcher, but not of its ranks."""
        self._nodes[node].kill()

    def fill_disk(self, rank: Process, node: int) -> Callable[[], object]:
        """The disk of the run, or of a node, is full for a while."""
        file = self._filler = self._folders[node].parent / "filler"
        with suppress(OSError), file.open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))

        def make_room() -> None:
            file.unlink()
            self._filler, self._unsaved = None, self._newest_checkpoint()

        return make_room

    def damage_checkpoint(self, rank: Process, node: int) -> None:
        """SIGKILL of all ranks, and a flipped bit in the newest checkpoint."""
        for process in self._ranks():
            kill(process)
        (checkpoint,) = self._newest_checkpoint()
        file = checkpoint / "worker-0.safetensors"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    def leave(self, rank: Process, node: int) -> Callable[[], object]:
        """A node loses its power, and comes back after a while."""
        self._away.add(node)
        for process in Process.all():
            if process.node == node:
                kill(process)
        return lambda: self._away.remove(node)

    def cut_link(self, rank: Process, node: int) -> Callable[[], object]:
        """Nothing passes the link of a node for a while."""
        link = f"ip -n {namespace(node)} link set {DEVICE}"
        call(f"{link} down")
        return lambda: call(f"{link} up")

    def half_open_link(self, rank: Process, node: int) -> Callable[[], object]:
        """Nothing that a node sends arrives for a while, but it receives."""
        neighbour, other = f"ip -n {namespace(node)} neigh", f"{address(1 - node)} dev {DEVICE}"
        call(f"{neighbour} replace {other} lladdr {NOWHERE} nud permanent")
        return lambda: call(f"{neighbour} del {other}")


def _last_line(file: Path) -> dict[str, Any]:
    """The last complete line of a file that a run appends to; empty if there is none."""
    try:
        with file.open("rb") as content:
            content.seek(max(0, content.seek(0, os.SEEK_END) - (1 << 16)))
            line: dict[str, Any] = json.loads(content.read().split(b"\n")[-2])
    except (OSError, IndexError, ValueError):
        return {}
    return line


def kill(process: Process) -> None:
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)


FAULTS: dict[str, Callable[[DisturbedRun, Process, int], Callable[[], object] | None]] = {
    "kill": DisturbedRun.kill_rank,
    "stop": DisturbedRun.stop_rank,
    "term": DisturbedRun.terminate_node,
    "launcher": DisturbedRun.kill_launcher,
    "disk": DisturbedRun.fill_disk,
    "damage": DisturbedRun.damage_checkpoint,
    "leave": DisturbedRun.leave,
    "cut": DisturbedRun.cut_link,
    "half-open": DisturbedRun.half_open_link,
    LONG_CUT: DisturbedRun.cut_link,
}
