"""This process's part in a run whose ranks recover: after a rank has failed, or has returned, all
that remain meet again and train from the newest checkpoint, or from newer copies in memory
(`run.on_rank_failure`). README.md follows one failure in order, `membership.py` is the
table of what is seen and done, and `meeting.py` finds the next quorum.
"""

import gc
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from signal import SIGINT

from adloco.config.sections import Recipe
from adloco.distributed.dtensor import forget_meshes
from adloco.distributed.launch.failures import Notes
from adloco.distributed.launch.rank_store import Quorum, store_outlives_ranks
from adloco.distributed.messages import broadcast_state
from adloco.distributed.placement.islands import island_of
from adloco.elastic.meeting import can_grow, come, failed_islands, next_quorum, shape_of
from adloco.elastic.store import end_all, leave
from adloco.errors import RankFailureError
from adloco.run.starts import Kind
from adloco.run.training_run import TrainingRun

MEETINGS = 3
"""Meetings in a row after a failure to which every member comes, without a new round in between."""


class Regrouping:
    """The memory of a rank from one quorum of its run to the next."""

    def __init__(self, recipe: Recipe, quorum: Quorum, resumed: Path | None) -> None:
        """
        Args:
            quorum: The first one that this process is in.
            resumed: Folder of the run to resume; None: the recipe says.
        """
        self.quorum = quorum
        # A store that rank 0 keeps can end with it.
        self.recovers = recipe.run.on_rank_failure != "stop" and store_outlives_ranks()
        if self.recovers:
            # NCCL would end the process when it finds another one gone, as torchrun tells it to;
            # 2: it ends its collectives.
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
        self.folder: Path | None = None
        """The folder of the run to resume; None until it has begun."""
        self._settings = recipe.run
        # A machine that joins may not have the run's folder yet, in which they stand too.
        self._num_workers, self._dropped = recipe.method.num_workers, {*recipe.method.dropped}
        self._run: TrainingRun | None = None
        self._opened: tuple[Quorum, Sequence[int]] | None = None
        """The quorum in which the run was opened here last, and the workers that it had then."""
        self._failure = ""
        """A sentence about the rank that failed last."""
        self._rounds = self._meetings = 0
        """The most rounds that were trained here before a failure; the meetings after it to which
        every member has come."""
        self._leaves = False
        """True if this rank was told to stop and the others continue."""
        if quorum.number:
            self.folder = resumed or Path(recipe.run.folder)
            self._shape = shape_of(quorum)

    @property
    def _living(self) -> list[int]:
        """The workers that train."""
        return [worker for worker in range(self._num_workers) if worker not in self._dropped]

    def given(self) -> list[tuple[str, str]]:
        """The settings with which the run resumes in this quorum, by section.key. Called on all
        ranks.
        """
        shards, replicas = map(str, self._shape)
        # A rank that joins has not seen who failed.
        dropped = broadcast_state(sorted(self._dropped))
        self._dropped = {*dropped}
        return [
            ("placement.shard_size", shards),
            ("placement.replica_size", replicas),
            ("method.dropped", str(dropped)),
        ]

    def kind(self) -> Kind:
        """The word in starts.jsonl for the run when it resumes."""
        return "regroup" if self._failure else "join" if self.quorum.number else "resume"

    def turned_away(self, error: Exception) -> None:
        """Tell the others that this rank, which has just joined, cannot take part."""
        why = f"rank {self.quorum.rank} has come and cannot take part: {error}"
        Notes(self.quorum).add(RankFailureError(why))

    def opened(self, run: TrainingRun) -> None:
        """Take the run that has begun, or resumes, in this quorum."""
        if self._failure:
            rounds, ranks = run.algorithm.state.rounds_done, run.placement.num_ranks
            run.notices.append(
                f"{self._failure}; {ranks} ranks continue after round {rounds}"
                if ranks > 1
                else f"{self._failure}; one rank continues after round {rounds}"
            )
            self._failure = ""
        self._run, self.folder = run, run.folder
        self._opened = self.quorum, run.recipe.method.living_workers
        placement = run.placement
        self._shape = placement.shards, placement.ranks_per_worker // placement.shards
        method = run.recipe.method
        self._num_workers, self._dropped = method.num_workers, {*method.dropped}

    def failed(self, error: RankFailureError) -> bool:
        """Keep the message if the ranks recover from this, and meet; False if they cannot."""
        if not self.recovers or self.folder is None:
            return False
        self._failure = str(error)
        return True

    def meet(self) -> bool:
        """Find the ranks that remain or have returned, to resume the run in its folder.

        Called outside any handler of an error, whose traceback would keep connections open.

        Returns:
            False if the others have ended the run without this one.

        Raises:
            RankFailureError: Too few remain, they have continued without this one, or all are there
                and fail again and again.
        """
        run, self._run = self._run, None
        come(self.quorum)  # Or the others could take this rank for failed while it writes.
        if run:
            run.saving.wait()  # All can resume from a checkpoint that is complete.
        rounds = run.algorithm.state.rounds_done if run else 0
        seconds = self._settings.silent_seconds
        quorum = next_quorum(self.quorum, self._shape, len(self._living), seconds)
        del run
        if quorum and self._failure and quorum.members == self.quorum.members:
            self._count_meeting(rounds)
        else:
            self._meetings = 0
        if quorum and quorum.number > self.quorum.number + 1:
            self._opened = None  # It was left out, and has joined again; `given` tells who is left.
        if quorum and self._settings.on_rank_failure == "drop":
            self._drop_workers(quorum)
        forget_meshes()
        gc.collect()  # Models and groups refer to each other in circles.
        self.quorum = quorum or self.quorum
        return quorum is not None

    def _count_meeting(self, rounds: int) -> None:
        """Raise RankFailureError if the members, who are all there, cannot train any more: two of
        them may not reach each other, or what one computes fails each time.

        rounds: Rounds that were trained here before they met.
        """
        self._meetings = 1 if rounds > self._rounds else self._meetings + 1
        self._rounds = max(rounds, self._rounds)
        if self._meetings > MEETINGS:
            raise RankFailureError(
                f"{self._failure}; all ranks live, and this has happened {self._meetings} times "
                "without a new round in between"
            )

    def _drop_workers(self, after: Quorum) -> None:
        """Leave out the workers of the islands that trained last and are not whole in the next
        quorum. Those that have joined since then, and failed at once, had none yet.
        """
        if self._opened is None:
            return
        (before, living), size = self._opened, prod(self._shape)
        failed = failed_islands(before, after, size)
        islands = len(before.members) // size
        self._dropped |= {
            worker
            for place, worker in enumerate(living)
            if island_of(place, len(living), islands) in failed
        }
        if not self._living:
            raise RankFailureError(
                f"each island of {size} ranks has lost one, and no worker is left"
            )

    def ended(self, code: int | None) -> None:
        """Tell the others how training has ended here.

        code: The exit code; None if the ranks meet again.
        """
        if self._leaves:
            leave(self.quorum)
        elif code is not None:
            end_all(self.quorum)

    def others_wait(self) -> bool:
        """True, on all ranks, if there are ranks that wait to join. Called between rounds."""
        run = self._run
        if not self.recovers or run is None:
            return False
        most = len(self._living)
        asked = run.placement.is_rank_zero and can_grow(self.quorum, self._shape, most)
        return run.placement.agree(asked)

    def others_continue(self, signals: Sequence[int]) -> bool:
        """True, on all ranks, if only some were told to stop, and not by Ctrl+C: a machine leaves.

        signals: Those that came here.
        """
        run = self._run
        if not self.recovers or run is None:
            return False
        everywhere = run.placement.all_values([*signals])
        told = [rank for rank, numbers in enumerate(everywhere) if numbers]
        by_hand = any(SIGINT in numbers for numbers in everywhere)
        if by_hand or len(told) in (0, run.placement.num_ranks):
            return False
        self._leaves = bool(signals)
        self._failure = f"ranks told to leave: {', '.join(map(str, told))}"
        return True
