"""Trains a run in this process, with the ranks that there are: after a rank was lost, or has
returned, all that are left meet again and go on from the newest checkpoint (`run.on_loss`).
"""

from argparse import Namespace
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from adloco.cli.arguments import read_recipe
from adloco.cli.rank_processes import RankEnd
from adloco.cli.terminal import open_console
from adloco.cli.train_log import train_log
from adloco.cli.training_loop import JOINING, train
from adloco.config.settings import RunSettings
from adloco.distributed.launch.launcher import num_ranks, process_group, this_rank
from adloco.distributed.launch.quorum import (
    Quorum,
    can_grow,
    end_all,
    first_quorum,
    next_quorum,
    started_later,
)
from adloco.distributed.launch.restarts import store_outlives_ranks
from adloco.distributed.messages import broadcast_state
from adloco.errors import LostRankError
from adloco.run.environment import choose_device
from adloco.run.starts import Kind
from adloco.run.stored import CHANGEABLE, begun_run, resumed_recipe
from adloco.run.training_run import TrainingRun


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


@dataclass(frozen=True, kw_only=True)
class _GoingOn:
    """What a process needs to know to go on with a run after a loss."""

    folder: Path
    shape: tuple[int, int]
    """Shards and replicas of an island."""
    num_workers: int


class _Part:
    """This process's part in a run."""

    def __init__(self, arguments: Namespace, quorum: Quorum | None) -> None:
        self._arguments = arguments
        self._settings: list[tuple[str, str]] = arguments.settings
        self._known = _run_settings(arguments)
        self._quorum = quorum
        self._ending = RankEnd()
        self._lost = ""
        """What is known of the rank that was lost last."""
        self._going_on: _GoingOn | None = None
        """Known as soon as a run is there to go on with."""
        if quorum is not None and quorum.shape is not None:
            folder = arguments.resume or Path(self._known.folder)
            workers = resumed_recipe(folder, ()).method.num_workers
            self._going_on = _GoingOn(folder=folder, shape=quorum.shape, num_workers=workers)
            self._goes_on(folder)

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
                run = self._open(console)
                log = opened.enter_context(train_log(run))
                end = self._ending.after_signal
                code = train(run, console, log, self._settings, end, self._others_wait)
        except LostRankError as error:
            if not self._meets or self._going_on is None:
                raise self._ending.advised(error) from None
            self._lost = str(error)
            return None
        if code == JOINING:
            return None
        if self._quorum:
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
        assert self._going_on is not None and self._quorum is not None
        run, self._ending.run = self._ending.run, None
        if run:
            run.saving.wait()  # What is begun is good for all to go on from.
        known, shape, seconds = self._going_on, self._going_on.shape, self._known.timeout_seconds
        try:
            self._quorum = next_quorum(self._quorum, shape, known.num_workers, seconds)
        except LostRankError as error:
            raise self._ending.advised(error) from None
        if self._quorum is None:
            return False
        self._goes_on(known.folder)
        return True

    @property
    def _meets(self) -> bool:
        """True if ranks that are left go on after a loss."""
        # NCCL cannot be left as gloo can; and a store that rank 0 keeps can end with it.
        return (
            self._quorum is not None
            and self._known.on_loss == "replace"
            and store_outlives_ranks()
            and choose_device(self._known.device).type == "cpu"
        )

    @property
    def _kind(self) -> Kind:
        """What starts.jsonl says of a run that goes on."""
        if self._lost:
            return "regroup"
        return "join" if self._quorum and self._quorum.number else "resume"

    def _goes_on(self, folder: Path) -> None:
        """Take the run in a folder, with the islands of the quorum."""
        changeable = [(name, text) for name, text in self._arguments.settings if name in CHANGEABLE]
        assert self._quorum is not None and self._quorum.shape is not None
        shards, replicas = self._quorum.shape
        self._settings = [
            *changeable,
            ("placement.shard_size", str(shards)),
            ("placement.replica_size", str(replicas)),
        ]
        self._arguments.resume = folder

    def _group(self) -> AbstractContextManager[None]:
        end, seconds = self._ending.after_failure, self._known.timeout_seconds
        on_loss = self._ending.after_loss if self._meets else None
        return process_group(end, seconds, quorum=self._quorum, on_loss=on_loss)

    def _open(self, console: Console) -> TrainingRun:
        """Begin the run, or go on with it."""
        with console.status("reading and tokenising text, building models ..."):
            folder = self._arguments.resume or self._begun()
            run = (
                TrainingRun.resume(folder, self._settings, self._kind)
                if folder
                else TrainingRun.create(read_recipe(self._arguments))
            )
        if self._lost:
            rounds = run.algorithm.state.rounds_done
            run.notices.append(
                f"{self._lost}; {run.placement.num_ranks} ranks go on after round {rounds}"
            )
            self._lost = ""
        self._ending.run, self._ending.folder = run, run.folder
        placement = run.placement
        self._going_on = _GoingOn(
            folder=run.folder,
            shape=(placement.shards, placement.ranks_per_worker // placement.shards),
            num_workers=run.recipe.method.num_workers,
        )
        return run

    def _begun(self) -> Path | None:
        """The folder of the run that `--restart` goes on with, the same on all ranks; None if it
        has to begin.
        """
        if not self._arguments.restart:
            return None
        folder = str(begun_run(read_recipe(self._arguments)) or "")
        if num_ranks() > 1:
            folder = broadcast_state(folder)
        if not folder:
            return None
        self._settings = [(name, text) for name, text in self._settings if name in CHANGEABLE]
        return Path(folder)

    def _others_wait(self) -> bool:
        """True, on all ranks, if there are ranks that wait to join. Called between rounds."""
        run, known = self._ending.run, self._going_on
        if not self._meets or run is None or known is None:
            return False
        assert self._quorum is not None
        asked = run.placement.is_rank_zero and can_grow(
            self._quorum, known.shape, known.num_workers
        )
        return run.placement.agree(asked)


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
