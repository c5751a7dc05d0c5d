"""Disturbs real runs by a schedule of faults, and checks that nothing is lost or counted twice.

    .venv/bin/python benchmarks/chaos.py [--faults 100] [--seed 1] [--modes ranks,torchrun]
        [--kinds kill,stop]

Each mode of `MODES` trains a tiny AdLoCo run on a small disk of its own, with the faults that fit
it (`chaos_run.py`). After each fault the run goes on as its user would let it: by the launcher's
own restart, or by the same line again. At its end it must have the numbers of a run without faults,
as `chaos_checks.py` says, and leave no process and no temporary file behind. A table says for each
mode and kind of fault how many were survived, how many of those in place, without a restart of all
processes, how many recorded rounds were trained again, how long it took until a round was complete
that was begun after the fault, how long after a long cut all machines trained together, and how
often one of them was later than the goal (`Outcome.late`). It is
also written beside this file (--out), as Markdown, with a CSV line for each fault. Goodput is the
part of the time that the rounds would have taken without faults; the rest is start-up.

Everything happens in private namespaces for processes, networks and mounts, which the kernel
removes with this program. Linux allows them to root, and to others where user namespaces are
allowed; elsewhere the program ends with one sentence and exit code 2. Exit code 1: a check failed,
and the run's folder and output were copied for you to read.
"""

import argparse
import csv
import ctypes
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from chaos_checks import (
    LONG_CUT,
    SILENT_SECONDS,
    TIMEOUT_SECONDS,
    Fault,
    Outcome,
    RunFiles,
    names_below,
    problems,
    schedule,
)
from chaos_run import FAULTS, DisturbedRun
from common import script_parser, table
from links_network import (
    DEVICE,
    PRIVATE_FOLDER,
    LinkShape,
    LinksRefusedError,
    Network,
    address,
    call,
    die_with_parent,
    enter_private_namespaces,
    namespace,
)

INSIDE, CLONE_NEWPID = "CHAOS_INSIDE", 0x20000000
WORK, DISK = PRIVATE_FOLDER / "chaos", "48m"
SECRET = WORK / "secret.txt"
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
SETTINGS = f"""
--data.path {WORK}/text.txt --data.cache {WORK}/cache --data.tokenizer bytes
--data.context_tokens 32 --model.hidden_size 32 --model.num_layers 1 --model.num_heads 2
--model.num_kv_heads 2 --model.intermediate_size 48 --method.num_trainers 2
--method.workers_per_trainer 2 --method.sync_every 10 --batch.eta 0.5 --batch.initial 4
--batch.minimum 4 --batch.maximum 16 --learning_rate.shape constant --evaluation.windows 8
--run.tokens 0 --run.trackers none --run.checkpoint_every 1 --run.keep_checkpoints 3
--run.silent_seconds {SILENT_SECONDS} --run.timeout_seconds {TIMEOUT_SECONDS}
--run.grace_seconds 10
""".split()
"""25,184 parameters, two trainers of two workers that merge after round 3, and rounds of about half
a second. Muon and the blocks of 4 bits, which the recipe has, make a percent of a changed bit.
"""


QUICK_ROUND_SECONDS, TRIED_ROUNDS = 0.2, 10
"""A short time for a round; rounds by which a busy machine is known."""
MEANWHILE = ("disk", "leave", "cut", "half-open", LONG_CUT)
"""Kinds of faults that pass, and during which a run can go on."""
TOGETHER_SECONDS = 30.0
"""Time for which a run must have rounds left after a long cut, until all machines train."""
SHARED_MEMORY = Path("/dev/shm")
FOLDERS_OF_OTHERS = ("torchelastic_", "torchinductor_", "pytest-of-")
"""Names of temporary folders that torch leaves, or that tests beside it write in."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A way to start a run."""

    kinds: Sequence[str]
    """The faults that fit it."""
    flags: str = ""
    launchers: Sequence[str] = ("",)
    """Words before `-m adloco`, by node; several nodes have a network of their own each."""
    own_disks: bool = False
    """True if each node has a disk of its own, at the same path."""
    undisturbed: str = "one"
    """The mode whose run without faults has the same numbers, to the last bit."""


def torchrun(node: int) -> str:
    """The launcher of one of two nodes, either of which may be away."""
    quick = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    return (
        "-m torch.distributed.run --nnodes 1:2 --nproc-per-node 1 --max-restarts 100 "
        f"--rdzv-backend c10d --rdzv-endpoint {address(0)}:29400 --local-addr {address(node)} "
        f"--rdzv-conf is_host={str(node == 0).lower()},{quick} --shutdown-timeout 10"
    )


EVERYWHERE = ("kill", "stop", "term", "disk", "damage")
APART = (
    f"--ranks 2 --machines 2 --meet {address(0)}:29400 --run.on_rank_failure replace "
    "--run.copy_every 1"
)
"""Two machines without a shared folder, as docs/clusters.md has them: each keeps copies of what the
other has on its disk."""
MODES = {
    "one": Mode(kinds=EVERYWHERE),
    "ranks": Mode(kinds=(*EVERYWHERE, "launcher"), flags="--ranks 2"),
    # The remaining ranks recover in place, and a new one joins them.
    "place": Mode(kinds=(*EVERYWHERE, "launcher"), flags="--ranks 3 --run.on_rank_failure replace"),
    # The same without a disk: from copies in the memory of another rank.
    "memory": Mode(
        kinds=("kill", "stop"),
        flags="--ranks 3 --run.on_rank_failure replace --run.copy_every 1 "
        "--run.checkpoint_every 1000",
    ),
    # Machines whose own launchers meet: those that remain continue, and one that returns joins.
    "machines": Mode(
        kinds=(*EVERYWHERE, "launcher", "leave", "cut", "half-open"),
        flags=f"--ranks 2 --machines 2 --meet {address(0)}:29400 --run.on_rank_failure replace",
        launchers=("", ""),
    ),
    "disks": Mode(
        kinds=(*EVERYWHERE, "launcher", "leave", "cut", "half-open", LONG_CUT),
        flags=APART,
        launchers=("", ""),
        own_disks=True,
    ),
    # The same, where all that meet must know a secret.
    "secret": Mode(
        kinds=("kill", "launcher", "cut", "half-open", LONG_CUT),
        flags=f"{APART} --run.secret_file {SECRET}",
        launchers=("", ""),
        own_disks=True,
    ),
    "torchrun": Mode(
        kinds=(*EVERYWHERE, "launcher", "leave", "cut", "half-open"),
        launchers=(torchrun(0), torchrun(1)),
    ),
    "shards": Mode(
        kinds=(*EVERYWHERE, "launcher"),
        flags="--ranks 2 --placement.shard_size 2 --inner.optimizer adamw",
        undisturbed="shards",
    ),
    # Two islands of two ranks, each of which shards its workers.
    "islands": Mode(
        kinds=("kill", "stop", "term"),
        flags="--ranks 4 --placement.shard_size 2 --run.on_rank_failure replace",
        undisturbed="islands",
    ),
}


def main() -> int:
    arguments = parse()
    if INSIDE not in os.environ:
        return in_namespaces()
    die_with_parent(0)  # Process 1 sees no parent.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    call("mount -t proc proc /proc")
    kinds = {
        mode: [kind for kind in MODES[mode].kinds if kind in arguments.kinds]
        for mode in arguments.modes
    }
    campaign = Campaign(schedule(kinds, arguments.faults, arguments.seed), arguments.seed)
    for mode in arguments.modes:
        campaign.disturb(mode)
    campaign.write(arguments.out)
    return 1 if any(campaign.wrong.values()) else 0


def parse() -> argparse.Namespace:
    parser = script_parser(__doc__)
    parser.add_argument("--faults", type=int, default=20, help="number of faults (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of faults and runs (default: 0)")
    choices = {"modes": [*MODES], "kinds": [*FAULTS]}
    for name, known in choices.items():
        parser.add_argument(f"--{name}", default=",".join(known), help="default: %(default)s")
    beside = Path(__file__).with_suffix("")
    parser.add_argument("--out", type=Path, default=beside, help="files to write, without suffix")
    arguments = parser.parse_args()
    for name, known in choices.items():
        given = getattr(arguments, name).split(",")
        if unknown := sorted({*given} - {*known}):
            parser.error(f"--{name} takes {', '.join(known)}, got {', '.join(unknown)}")
        setattr(arguments, name, given)
    if not {kind for mode in arguments.modes for kind in MODES[mode].kinds} & {*arguments.kinds}:
        parser.error("none of these --kinds fits one of these --modes")
    return arguments


def in_namespaces() -> int:
    """Run this program again as process 1 of private namespaces and return its exit code."""
    enter_private_namespaces()
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWPID) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise LinksRefusedError(f"a namespace for processes cannot be made here ({reason})")
    child = subprocess.Popen([sys.executable, *sys.argv], env=os.environ | {INSIDE: "1"})
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: child.send_signal(number))
    return child.wait()


class Campaign:
    """The runs of all modes, and what became of their faults."""

    def __init__(self, faults: dict[str, list[Fault]], seed: int) -> None:
        self.wrong: dict[str, list[str]] = {}
        """What went wrong in each mode."""
        self._faults = faults
        self._outcomes: dict[str, list[Outcome]] = {}
        self._goodput: dict[str, float] = {}
        self._undisturbed: dict[tuple[str, int], RunFiles] = {}
        """By mode and number of rounds."""
        WORK.mkdir()
        SECRET.touch(0o600)
        SECRET.write_text("of all machines of this run\n")
        draw = random.Random(seed)
        text = (" ".join(draw.choices(WORDS, k=8)) for _ in range(2400))
        (WORK / "text.txt").write_text("\n".join(text))
        # Most modes have the same rounds, and so the same numbers; four come after the last fault.
        last = max((fault.round for of_mode in faults.values() for fault in of_mode), default=0)
        self._rounds = last + 4
        self._settings = [*SETTINGS, "--run.seed", str(seed)]
        self._quick = QUICK_ROUND_SECONDS
        if any(fault.kind == LONG_CUT for of_mode in faults.values() for fault in of_mode):
            # Hundreds of rounds fit in a long cut, and on a busy machine far fewer.
            _, wrong, files = self._train("one", [], TRIED_ROUNDS)
            if files is None:
                sys.exit(f"chaos.py: the run without faults failed: {'; '.join(wrong)}")
            self._quick = max(self._quick, usual_seconds(files) / 2)

    def disturb(self, name: str) -> None:
        """Train in a mode with its faults, and check the result."""
        mode, faults = MODES[name], self._faults[name]
        rounds = self._rounds + math.ceil(seconds_meanwhile(faults) / self._quick)
        whole = mode.undisturbed, rounds
        if whole not in self._undisturbed:
            print(f"{mode.undisturbed:<9} without faults ...", flush=True)
            _, wrong, files = self._train(mode.undisturbed, [], rounds)
            if files is None:
                sys.exit(f"chaos.py: the run without faults failed: {'; '.join(wrong)}")
            self._undisturbed[whole] = files
        run, wrong, files = self._train(name, faults, rounds)
        self._outcomes[name], self._goodput[name], self.wrong[name] = run.outcomes, 0.0, wrong
        if files is not None:
            wrong += problems(files, self._undisturbed[whole])
            trained = len(files.records) * usual_seconds(files)
            self._goodput[name] = trained / run.seconds if run.seconds else 0.0
        wrong += [
            f"{outcome.repeated} rounds were trained again after {outcome.fault}"
            for outcome in run.outcomes
            if outcome.too_many_repeated
        ]
        print(
            f"{name:<9} {told(wrong)}; started {run.starts} times, "
            f"goodput {self._goodput[name]:.0%}",
            flush=True,
        )
        if wrong:
            kept = tempfile.mkdtemp(prefix=f"adloco-chaos-{name}-")
            for disk in disks_of(name):
                shutil.copytree(disk, Path(kept) / disk.name)
            shutil.copy(WORK / f"{name}.log", kept)
            print(f"{name:<9} its files are in {kept}", flush=True)

    def _train(
        self, name: str, faults: Sequence[Fault], rounds: int
    ) -> tuple[DisturbedRun, list[str], RunFiles | None]:
        """Train a run on small disks; return it, what went wrong, and what it has left."""
        mode, disk, temporary = MODES[name], WORK / name, WORK / f"{name}-temporary"
        environment = {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
        temporary.mkdir(exist_ok=True)
        shared, disks = names_below(SHARED_MEMORY), disks_of(name)
        for each in {disk, *disks}:
            each.mkdir(exist_ok=True)
        for each in disks:
            call(f"mount -t tmpfs -o size={DISK} chaos {each}")
        words = ["-m", "adloco", "train", "adloco", "--restart", "--run.folder", f"{disk}/run"]
        words += [*self._settings, "--run.rounds", str(rounds), *mode.flags.split()]
        lines = [[sys.executable, *launcher.split(), *words] for launcher in mode.launchers]
        with ExitStack() as network:
            if len(lines) > 1:
                cable = LinkShape()
                network.enter_context(Network(len(lines), cable))
                lines = [
                    ["ip", "netns", "exec", namespace(node), *line]
                    for node, line in enumerate(lines)
                ]
                if mode.own_disks:
                    lines = [
                        on_disk(own, disk, line) for own, line in zip(disks, lines, strict=True)
                    ]
                environment |= {
                    "GLOO_SOCKET_IFNAME": DEVICE,
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                }
            run = DisturbedRun(
                lines,
                environment,
                [each / "run" for each in disks] * (1 if mode.own_disks else len(lines)),
                WORK / f"{name}.log",
                faults,
                lambda outcome: show(name, outcome),
            )
            wrong = run.train()
        left = names_below(temporary) | (names_below(SHARED_MEMORY) - shared)
        wrong += [
            f"the temporary file {name} is left over"
            for name in sorted(left)
            if not name.startswith(FOLDERS_OF_OTHERS)
        ]
        try:
            return run, wrong, RunFiles.read([each / "run" for each in disks], WORK / "cache")
        except (OSError, ValueError) as error:
            return run, [*wrong, str(error)], None

    def write(self, out: Path) -> None:
        """Print the tables, and write them and a CSV line for each fault."""
        text = f"{self._table_of_faults()}\n\n{self._table_of_modes()}\n"
        print(text, flush=True)
        out.with_suffix(".md").write_text(text)
        with out.with_suffix(".csv").open("w", newline="") as file:
            lines = csv.writer(file, lineterminator="\n")
            heads = ["mode", "fault", "after_round", "repeated_rounds", "recovery_seconds"]
            lines.writerow([*heads, "in_place", "goal_seconds", "together_seconds"])
            for mode, outcomes in self._outcomes.items():
                for outcome in outcomes:
                    known = outcome.recovery is not None
                    seconds = f"{outcome.recovery:.1f}" if known else ""
                    kind = outcome.fault.kind
                    cells = [mode, kind, outcome.recorded, outcome.repeated, seconds]
                    cells += [int(outcome.in_place), f"{outcome.goal:.1f}"]
                    apart = outcome.together is None
                    lines.writerow([*cells, "" if apart else f"{outcome.together:.1f}"])

    def _table_of_faults(self) -> str:
        rows = []
        for mode, faults in self._faults.items():
            for kind in FAULTS:
                planned = sum(fault.kind == kind for fault in faults)
                found = [one for one in self._outcomes[mode] if one.fault.kind == kind]
                times = [one.recovery for one in found if one.recovery is not None]
                seconds = [f"{each(times):.1f}" if times else "-" for each in (median, max)]
                most = max((one.repeated for one in found), default=0)
                if planned:
                    together = max((one.together for one in found if one.together), default=None)
                    cells = [mode, kind, f"{len(times)} of {planned}"]
                    cells += [str(sum(one.in_place for one in found)), str(most), *seconds]
                    cells += ["-" if together is None else f"{together:.1f}"]
                    rows.append([*cells, str(sum(one.late for one in found))])
        heads = ["mode", "fault", "survived", "in place", "rounds repeated"]
        heads += ["seconds to go on, median", "worst"]
        heads += ["worst from the end of a cut to all machines", "later than the goal"]
        return table(heads, rows)

    def _table_of_modes(self) -> str:
        rows = [
            [mode, told(wrong), f"{self._goodput[mode]:.0%}"] for mode, wrong in self.wrong.items()
        ]
        return table(["mode", "result", "goodput"], rows)


def disks_of(mode: str) -> list[Path]:
    """Where the disks of a mode are mounted: one, or one for each node."""
    nodes = range(len(MODES[mode].launchers))
    return [WORK / f"{mode}-{node}" for node in nodes] if MODES[mode].own_disks else [WORK / mode]


def on_disk(own: Path, disk: Path, line: Sequence[str]) -> list[str]:
    """A line whose processes find a disk of their own at a path, in a mount namespace."""
    return [
        "unshare",
        "--mount",
        "sh",
        "-c",
        f'mount --bind {own} {disk} && exec "$@"',
        "sh",
        *line,
    ]


def seconds_meanwhile(faults: Sequence[Fault]) -> float:
    """How long a run goes on while faults last, and until all machines train after long cuts."""
    seconds = sum(fault.seconds for fault in faults if fault.kind in MEANWHILE)
    return seconds + sum(TOGETHER_SECONDS for fault in faults if fault.kind == LONG_CUT)


def usual_seconds(files: RunFiles) -> float:
    """The median time of a round."""
    moments: list[float] = [0.0, *(record["seconds"] for record in files.records)]
    return median(after - before for before, after in pairwise(moments))


def told(wrong: Sequence[str]) -> str:
    return "; ".join(wrong) or "as without faults"


def show(mode: str, outcome: Outcome) -> None:
    seconds = outcome.together
    together = "" if seconds is None else f", with all machines {seconds:.1f} s after its end"
    print(
        f"{mode:<9} {outcome.fault.kind:<9} after round {outcome.recorded:>3}: went on after "
        f"{outcome.recovery:5.1f} s"
        f"{' in place' * outcome.in_place}"
        f"{together}"
        f"{f', later than the goal of {outcome.goal:.1f} s' * outcome.late}",
        flush=True,
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LinksRefusedError as error:
        print(f"chaos.py: {error}", file=sys.stderr)
        sys.exit(2)
