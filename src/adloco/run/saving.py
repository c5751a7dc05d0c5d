"""The checkpoints that a run writes, in the background while it trains; without room for them it
continues.
"""

import shutil
import socket
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any, Protocol

from adloco.algorithms.state_parts import RUN
from adloco.distributed.placement.placement import Placement
from adloco.errors import RunWarning
from adloco.run.checkpoint import list_all, remove_old
from adloco.run.folder import CHECKPOINTS
from adloco.run.part_file import write_part
from adloco.whole_file import remedy, to_disk

Content = Callable[[], dict[str, Any]]
"""Makes the parts that this process writes; called in all processes."""


class Saving:
    """Writes checkpoints, and knows the newest. All methods but `wait` are called on all ranks."""

    def __init__(
        self,
        folder: Path,
        placement: Placement,
        keep: int,
        spared: Callable[[Collection[str]], str],
        before_run: Callable[[], None],
        resume: str,
    ) -> None:
        """
        Args:
            spared: Tells from the names of all checkpoints which one to keep besides; empty: none.
            before_run: Called before the part `run` is written, in the thread that writes.
            resume: The command or call that resumes the run.
        """
        self.newest = ""
        """Name of the newest checkpoint that all ranks have written."""
        self.seconds = 0.0
        """Seconds that this process took for its parts of the newest; a resumed run knows those of
        the one before.
        """
        self.missing = False
        """True if the last checkpoint that was due found no room, and no other was begun."""
        self._folder = folder
        self._placement = placement
        self._keep = keep
        self._spared = spared
        self._before_run = before_run
        self._resume = resume
        self._making = self._warned = False
        self._began = 0.0
        self._newest_began = time.monotonic()
        self._name = ""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None

    @property
    def in_progress(self) -> bool:
        """True while this process makes or writes its parts of a checkpoint."""
        return self._making or not (self._written is None or self._written.done())

    def wait(self) -> None:
        """Wait until this process has written its parts, or has found no room for them."""
        if self._written:
            self._written.exception()

    @property
    def advice(self) -> str:
        """The rest of a sentence about numbers that are not finite: how to continue from the newest
        checkpoint; empty if there is none.
        """
        return (
            f"; the last good checkpoint is {self._folder / CHECKPOINTS / self.newest}; "
            f"{self._resume} continues from there, with a lower inner.lr or method.max_grad_norm, "
            "with run.on_nonfinite skip, or with data.skip_samples N past N samples of each stream"
            if self.newest
            else ""
        )

    def save(self, name: str, content: Content) -> None:
        """Write a checkpoint and wait for all ranks. The part `run` comes last of all.

        Raises:
            OSError: A rank has no room for it.
        """
        parts = self._parts(content)
        for last in (False, True):
            self._begin(name, {part: parts[part] for part in parts if (part == RUN) is last})
            self.wait()
            self._look(whole=last)

    def try_to_save(self, name: str, content: Content, *, last: bool, waits: bool) -> None:
        """Write a checkpoint: the last one as `save` does, others in the background.

        Args:
            last: It is the last of this start.
            waits: Wait for it, because training changes the tensors of `content`.

        Raises:
            ValueError: There is no room for the last checkpoint.
        """
        self._newest_began = time.monotonic()
        if self.has(name):  # No step was trained since the run was resumed.
            return
        if not last:
            # Held by the thread that writes, and not after that: copies are as large as the state.
            self._begin(name, self._parts(content))
            if waits:
                self.wait()
            return
        try:
            self.save(name, content)
        except OSError as error:
            raise ValueError(
                f"the last checkpoint of the run {self._problem(error)}; {remedy(error)}, then "
                f"resume from {self.newest} with: {self._resume}"
            ) from error

    def has(self, name: str) -> bool:
        """True if all ranks have written this checkpoint, the newest; waits for one in progress."""
        self.wait()
        self.look()
        return name == self.newest

    @contextmanager
    def overdue(self, seconds: float, save: Callable[[], None]) -> Iterator[None]:
        """Call `save` once so many seconds have passed since the last checkpoint; 0: never.

        Each rank has a timer of its own, so that all leave their steps at about the same time.
        """
        if not seconds:
            yield
            return
        timer = Timer(self._newest_began + seconds - time.monotonic(), save)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # Or it could be the last to hold the run, at Python's end.

    def look(self) -> None:
        """Learn if all ranks have written what was begun; warn if one had no room."""
        try:
            self._look()
        except OSError as error:
            if not self._warned and self._placement.is_rank_zero:
                warnings.warn(
                    f"a checkpoint {self._problem(error)}; the run continues and tries again after "
                    f"each round, and the newest checkpoint is {self.newest}",
                    RunWarning,
                    stacklevel=2,
                )
            self.missing = self._warned = True

    def _problem(self, error: OSError) -> str:
        return f"cannot be written in {self._folder} ({error.strerror or error})"

    def _parts(self, content: Content) -> dict[str, Any]:
        self._making, self._began = True, time.monotonic()
        try:
            return content()
        finally:
            self._making = False

    def _begin(self, name: str, parts: Mapping[str, Any]) -> None:
        self._name, self.missing = name, False
        self._written = self._pool.submit(self._write, self._folder / CHECKPOINTS / name, parts)

    def _write(self, folder: Path, parts: Mapping[str, Any]) -> None:
        try:
            if parts:
                # Without parents: a run folder that was renamed or removed meanwhile must not come
                # back, with a checkpoint and no recipe.
                folder.parent.mkdir(exist_ok=True)
                folder.mkdir(exist_ok=True)
                to_disk(self._folder)
                to_disk(folder.parent)  # Its name, before older checkpoints are removed.
            for part in sorted(parts, key=lambda part: part == RUN):
                if part == RUN:
                    self._before_run()
                write_part(folder, part, parts[part])
        finally:
            self.seconds = time.monotonic() - self._began

    def _look(self, *, whole: bool = True) -> None:
        """Learn if all ranks have written what was begun, and remove old checkpoints.

        whole: False if the part `run` is still to come, without which the checkpoint is none.

        Raises:
            OSError: One of them had no room.
        """
        if self._written is None:
            return
        done = self._written.done()
        error = self._written.exception() if done else None
        if error and not isinstance(error, OSError):
            raise error
        most = self._placement.largest(2 if not done else 1 if error else 0)
        if most == 2:  # A rank still writes.
            return
        name, self._name, self._written = self._name, "", None
        checkpoints = self._folder / CHECKPOINTS
        if most:
            reasons = self._placement.all_values(_reason(error, self._placement))
            if self._placement.is_island_first:
                shutil.rmtree(checkpoints / name, ignore_errors=True)
            raise OSError(*next(filter(None, reasons)))
        if not whole:
            return
        self.newest, self._warned = name, False
        if self._placement.is_island_first:
            spared = self._spared([path.name for path in list_all(checkpoints)])
            remove_old(checkpoints, name, self._keep, spared)


def _reason(error: BaseException | None, placement: Placement) -> list[Any]:
    """Why this process could not write, as a number and a text; empty if it could."""
    if not isinstance(error, OSError):
        return []
    where = "" if placement.is_rank_zero else f" on {socket.gethostname()}"
    return [error.errno, f"{error.strerror or error}{where}"]


class Copies(Protocol):
    """Copies of a run's state in the memory of its processes."""

    parts: dict[str, dict[str, Any]]
    """The copies of this process, by the name of the checkpoint they would make, and by part."""
    for_disk: dict[str, Any]
    """The newest parts of islands that see another folder: this process writes them to its own."""
    bytes_kept: int
    """Bytes of tensors in the newest copies here."""

    def place(self, folder: Path, placement: Placement, every: int, resumed: str = "") -> None:
        """Choose where copies go, by who sees the run's folder, which is there; forget what is
        here. Called on all ranks.

        Args:
            every: Rounds from one copy to the next; 0: none are made.
            resumed: Name of the checkpoint from which the run resumes, whose copies stay.
        """

    @property
    def made(self) -> bool:
        """True if this run makes copies."""

    def due(self, round: int, *, saves: bool, last: bool) -> bool:
        """True if copies are to be made after a round, after which a checkpoint is written
        (`saves`), or which is the run's last.
        """

    def keep(self, name: str, parts: Mapping[str, Any], placement: Placement) -> None:
        """Keep the parts that this process would write into the checkpoint of this name, and
        exchange copies with others. Called on all ranks; the parts are not changed any more.
        """
