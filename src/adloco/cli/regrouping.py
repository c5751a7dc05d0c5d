"""Trains a run in this process, with the ranks that there are: after a rank was lost, or has
returned, all that are left meet again and go on from the newest checkpoint (`run.on_loss`).
"""

import gc
from argparse import Namespace
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from signal import SIGINT

from rich.console import Console

from adloco.algorithms.method import Method
from adloco.cli.arguments import read_recipe
from adloco.cli.opening import joined_line
from adloco.cli.rank_processes import RankEnd
from adloco.cli.terminal import open_console, say, working
from adloco.cli.train_log import train_log
from adloco.cli.training_loop import OtherRanks, train
from adloco.config.settings import RunSettings
from adloco.distributed.dtensor import forget_meshes
from adloco.distributed.launch.launcher import (
    num_ranks,
    process_group,
    speaks_for_machine,
    this_rank,
)
from adloco.distributed.launch.meeting import can_grow, come, first_quorum, next_quorum
from adloco.distributed.launch.quorum import (
    Quorum,
    end_all,
    leave,
    lost_islands,
    started_later,
)
from adloco.distributed.launch.restarts import store_outlives_ranks
from adloco.distributed.messages import all_states, broadcast_state
from adloco.errors import LostRankError
from adloco.run.changes import DROPPED
from adloco.run.environment import choose_device
from adloco.run.memory_copies import NO_COPIES, Copies
from adloco.run.starts import Kind
from adloco.run.stored import begun_run, changeable, resumed_recipe
from adloco.run.training_run import TrainingRun

Settings = list[tuple[str, str]]


def train_with_those_left(arguments: Namespace) -> int:
    """Train the run of a line in this process, which may be one of several ranks.

    Args:
        arguments: Of `adloco train`.

    Returns:
        The exit code.

    Raises:
        LostRankError: A rank was lost, and the others do not go on without it.
    """
    quorum = first_quorum() if num_ranks() > 1 else None
    if started_later() and quorum is None:
        return 0
    part = _Part(arguments, quorum)
    while (code := part.train()) is None:
        if not part.meets_again():
            return 0
    return code


def goes_on_after_loss(settings: RunSettings) -> bool:
    """True if ranks of a run with these settings go on after one is lost."""
    # NCCL cannot be left as gloo can.
    return settings.on_loss != "stop" and choose_device(settings.device).type == "cpu"


@dataclass(frozen=True, kw_only=True)
class _Begun:
    """What a process needs to know of a run that has begun, to go on with it after a loss."""

    folder: Path
    shape: tuple[int, int]
    """Shards and replicas of an island."""
    method: Method
    """Says which workers train, and which are dropped."""

    @property
    def most_islands(self) -> int:
        """More islands than workers that train have nothing to do."""
        return len(self.method.living_workers)

    def without(self, lost: Sequence[int]) -> "_Begun":
        """The run without these workers."""
        dropped = tuple(sorted({*self.method.dropped, *lost}))
        return replace(self, method=replace(self.method, dropped=dropped))


class _Part:
    """This process's part in a run."""

    def __init__(self, arguments: Namespace, quorum: Quorum | None) -> None:
        self._arguments = arguments
        self._limits = _run_settings(arguments)
        # A store that rank 0 keeps can end with it.
        self._meets = (
            quorum is not None and goes_on_after_loss(self._limits) and store_outlives_ranks()
        )
        self._quorum = quorum
        self._ending = RankEnd()
        self._lost = ""
        """What is known of the rank that was lost last."""
        self._joined = False
        """True once this process has trained a part of the run."""
        self._leaves = False
        """True if this rank was told to stop and the others go on."""
        self._copies: Copies = NO_COPIES
        """What this process had in memory of the run when a rank was lost."""
        self._begun: _Begun | None = None
        """None until there is a run to go on with."""
        if quorum is not None and quorum.shape is not None:
            folder = arguments.resume or Path(self._limits.folder)
            method = resumed_recipe(folder, ()).method
            self._begun = _Begun(folder=folder, shape=quorum.shape, method=method)

    def train(self) -> int | None:
        """Train with the ranks of this quorum.

        Returns:
            The exit code; None if the ranks that are left have to meet again.

        Raises:
            LostRankError: A rank was lost, and the others do not go on without it.
        """
        # All is done inside the group, so that bad input on one rank ends all ranks; but the log is
        # closed outside, where the error of another rank has that rank's message.
        try:
            with ExitStack() as opened, self._group():
                console = open_console(quiet=this_rank() != 0)
                run, settings = self._open(console)
                log = opened.enter_context(train_log(run))
                others = OtherRanks(
                    end=self._ending.after_signal, wait=self._others_wait, go_on=self._others_go_on
                )
                code = train(run, console, log, settings, others)
        except LostRankError as error:
            if not self._meets or self._begun is None:
                raise self._ending.advised(error) from None
            assert self._quorum is not None
            # Before a checkpoint that is being written is waited for.
            come(self._quorum)
            self._lost = str(error)
            return None
        if self._quorum and self._leaves:
            leave(self._quorum)
        elif self._quorum and code is not None:
            end_all(self._quorum)
        return code

    def meets_again(self) -> bool:
        """Find the ranks that are left or have returned, to go on with the run in its folder.

        Called outside any handler of an error, whose traceback would keep connections open.

        Returns:
            False if the others have ended the run without this one.

        Raises:
            LostRankError: Too few are left, or they have gone on without this one.
        """
        begun, quorum = self._begun, self._quorum
        assert begun is not None and quorum is not None
        run, self._ending.run = self._ending.run, None
        if run:
            run.saving.wait()  # What is begun is good for all to go on from.
            self._copies = run.copies.copies
        seconds = self._limits.timeout_seconds
        try:
            self._quorum = next_quorum(quorum, begun.shape, begun.most_islands, seconds)
        except LostRankError as error:
            raise self._ending.advised(error) from None
        if self._quorum and run and self._limits.on_loss == "drop":
            lost = lost_islands(quorum, self._quorum, prod(begun.shape))
            living, owner = begun.method.living_workers, run.placement.owner
            self._begun = begun.without([worker for worker in living if owner(worker) in lost])
            del owner
        del run
        forget_meshes()
        gc.collect()  # Models and groups refer to each other in circles.
        return self._quorum is not None

    def _group(self) -> AbstractContextManager[None]:
        end, seconds = self._ending.after_failure, self._limits.timeout_seconds
        on_loss = self._ending.after_loss if self._meets else None
        return process_group(end, seconds, quorum=self._quorum, on_loss=on_loss)

    def _open(self, console: Console) -> tuple[TrainingRun, Settings]:
        """Begin the run, or go on with it; return it and the settings that it was given."""
        given: Settings = self._arguments.settings
        folder = self._begun.folder if self._begun else self._arguments.resume or self._restarted()
        if folder and not self._arguments.resume:
            given = [(name, text) for name, text in given if name in changeable()]
        if self._begun:
            shards, replicas = map(str, self._begun.shape)
            sizes = [("placement.shard_size", shards), ("placement.replica_size", replicas)]
            # A rank that joins has not seen who was lost.
            dropped = broadcast_state([*self._begun.method.dropped])
            given = [*given, *sizes, (DROPPED, str(dropped))]
        with working(console, "reading and tokenising text, building models ..."):
            run = (
                TrainingRun.resume(folder, given, self._kind(), self._copies)
                if folder
                else TrainingRun.create(read_recipe(self._arguments))
            )
        if self._lost:
            rounds = run.algorithm.state.rounds_done
            run.notices.append(
                f"{self._lost}; {run.placement.num_ranks} ranks go on after round {rounds}"
            )
            self._lost = ""
        if not self._joined and speaks_for_machine():
            say(open_console(), joined_line(run))
        self._joined = True
        self._ending.run, self._ending.folder = run, run.folder
        placement = run.placement
        shape = (placement.shards, placement.ranks_per_worker // placement.shards)
        self._begun = _Begun(folder=run.folder, shape=shape, method=run.recipe.method)
        return run, given

    def _kind(self) -> Kind:
        """What starts.jsonl says of a run that goes on."""
        if self._lost:
            return "regroup"
        return "join" if self._quorum and self._quorum.number else "resume"

    def _restarted(self) -> Path | None:
        """The folder of the run that `--restart` goes on with, the same on all ranks; None if no
        rank has one, and it has to begin.
        """
        if not self._arguments.restart:
            return None
        folder = str(begun_run(read_recipe(self._arguments)) or "")
        if num_ranks() > 1:
            folder = next(filter(None, all_states(folder)), "")
        return Path(folder) if folder else None

    def _others_wait(self) -> bool:
        """True, on all ranks, if there are ranks that wait to join. Called between rounds."""
        run, begun, quorum = self._ending.run, self._begun, self._quorum
        if not self._meets or run is None or begun is None or quorum is None:
            return False
        asked = run.placement.is_rank_zero and can_grow(quorum, begun.shape, begun.most_islands)
        return run.placement.agree(asked)

    def _others_go_on(self, signals: Sequence[int]) -> bool:
        """True, on all ranks, if only some were told to stop, and not by Ctrl+C: a machine leaves.

        signals: Those that came here.
        """
        run = self._ending.run
        if not self._meets or run is None:
            return False
        everywhere = run.placement.all_values([*signals])
        told = [rank for rank, numbers in enumerate(everywhere) if numbers]
        by_hand = any(SIGINT in numbers for numbers in everywhere)
        if by_hand or len(told) in (0, run.placement.num_ranks):
            return False
        self._leaves = bool(signals)
        self._lost = f"ranks told to leave: {', '.join(map(str, told))}"
        return True


def _run_settings(arguments: Namespace) -> RunSettings:
    """The settings of [run]; their defaults if the recipe is wrong, which all ranks must join to
    say.
    """
    try:
        if arguments.resume:
            return resumed_recipe(arguments.resume, arguments.settings).run
        return read_recipe(arguments).run
    except (ValueError, OSError):
        return RunSettings()
