"""A machine that loses its power loses what was not flushed, and a run resumes all the same.

A run is recorded on a modelled disk. Before each flush (`os.fsync`) and after each removal, the
power could fail: then a file has the content of its last flush, or none; a folder has the names of
its last flush; and any part of what came later may be there too.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from adloco.distributed.launch.launcher import place
from adloco.run import saving
from adloco.run.checkpoint import newest
from adloco.run.folder import CHECKPOINTS, RECIPE, check_free, not_begun
from adloco.run.records import Records
from adloco.run.stored import recovered_run, resumed_recipe
from adloco.run.training_run import TrainingRun
from tests.conftest import small_flags
from tests.problems import without_timings
from tests.run.test_training_run import make_run

Names = Mapping[str, int | None]
"""What is in a folder: the number of each file, None for a folder."""
Tree = dict[str, bytes | None]
"""The content of each file by its path, None for a folder."""


@dataclass
class Disk:
    """What would be left of a folder after a power failure, at each moment that differs."""

    root: Path
    newest: str = ""
    """The newest checkpoint that the run has taken for complete."""
    left: dict[int, tuple[str, Tree]] = field(default_factory=dict)
    """The newest complete checkpoint, and what could be left, without repetitions."""
    _files: dict[int, int] = field(default_factory=dict)
    """The number of each file that is there, by its inode, which another file may get later."""
    _contents: dict[int, bytes] = field(default_factory=dict)
    _flushed_contents: dict[int, bytes] = field(default_factory=dict)
    _names: dict[str, Names] = field(default_factory=dict)
    _flushed_names: dict[str, Names] = field(default_factory=dict)
    _seen: set[tuple[int, int, int]] = field(default_factory=set)
    """The number, size and time of each content that was read."""
    _draw: random.Random = field(default_factory=lambda: random.Random(0))

    def flush(self, path: Path) -> None:
        """A file or folder is flushed."""
        self.fail()
        where = self._at(path)
        if path.is_dir():
            self._flushed_names[where] = self._names[where]
        else:
            number = self._files[path.stat().st_ino]
            self._flushed_contents[number] = self._contents[number]

    def fail(self) -> None:
        """The power could fail now."""
        self._look()
        nothing = self._flushed_names
        # Old names are gone, and the new ones are not there.
        removals = {
            where: {
                name: file for name, file in names.items() if name in self._names.get(where, {})
            }
            for where, names in nothing.items()
        }
        some = {where: self._some_names(where) for where in {**nothing, **self._names}}
        whole, flushed = self._contents, self._flushed_contents
        unflushed = [each for each in self._files.values() if whole[each] is not flushed.get(each)]
        partly = {number: self._some_content(number) for number in unflushed}
        for names, contents in (
            (nothing, flushed),
            (removals, flushed),
            (self._names, flushed),
            (self._names, whole),
            (some, flushed | partly),
        ):
            tree: Tree = {}
            build(tree, ".", names, contents)
            # Temporary files of checkpoints are not read.
            read = [item for item in tree.items() if "/." not in item[0].partition("/")[2]]
            key = hash((self.newest, *sorted(read, key=itemgetter(0))))
            self.left.setdefault(key, (self.newest, tree))

    def _some_names(self, where: str) -> Names:
        before, after = self._flushed_names.get(where, {}), self._names.get(where, {})
        return {
            name: chosen[name]
            for name in {**before, **after}
            if name in (chosen := self._draw.choice((before, after)))
        }

    def _some_content(self, number: int) -> bytes:
        """As many of the new bytes as were written, and zeros in the place of others."""
        before, after = self._flushed_contents.get(number, b""), self._contents[number]
        if not after.startswith(before):
            return self._draw.choice((before, after))
        length = self._draw.randint(len(before), len(after))
        return after[:length] + bytes(self._draw.choice((0, len(after) - length)))

    def _look(self) -> None:
        """Read what a process sees now."""
        self._names, files = {}, {}
        for folder, folders, names in os.walk(self.root):
            numbers = {}
            for name in names:
                file = Path(folder, name)
                status = file.stat()
                number = self._files.get(status.st_ino, len(self._contents))
                files[status.st_ino] = numbers[name] = number
                state = number, status.st_size, status.st_mtime_ns
                if state not in self._seen:
                    self._seen.add(state)
                    self._contents[number] = file.read_bytes()
            self._names[self._at(Path(folder))] = dict.fromkeys(folders) | numbers
        self._files = files

    def _at(self, path: Path) -> str:
        return os.path.normpath(path.relative_to(self.root))


def build(
    tree: Tree, where: str, names: Mapping[str, Names], contents: Mapping[int, bytes]
) -> None:
    """Add to a tree what is below a folder, if it has these names and its files these contents."""
    for name, number in names.get(where, {}).items():
        path = os.path.normpath(f"{where}/{name}")
        tree[path] = None if number is None else contents.get(number, b"")
        if number is None:
            build(tree, path, names, contents)


class AtOnce:
    """Writes checkpoints before training continues, so that a seed decides what is recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, act: Callable[..., None], *arguments: Any) -> "Future[None]":
        done: Future[None] = Future()
        act(*arguments)
        done.set_result(None)
        return done


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Records what is written to tmp_path/disk."""
    disk = Disk(tmp_path / "disk")
    disk.root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        remove, remove_old = shutil.rmtree, saving.remove_old

        def recorded_flush(descriptor: int) -> None:
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            if path.is_relative_to(disk.root):
                disk.flush(path)

        def recorded_removal(path: Path, ignore_errors: bool = False) -> None:
            remove(path, ignore_errors=ignore_errors)
            disk.fail()

        def complete(folder: Path, newest: str, *arguments: Any) -> None:
            disk.newest = newest
            remove_old(folder, newest, *arguments)

        patch.setattr(os, "fsync", recorded_flush)
        patch.setattr(shutil, "rmtree", recorded_removal)
        patch.setattr(saving, "remove_old", complete)
        patch.setattr(saving, "ThreadPoolExecutor", AtOnce)
        yield disk


def restore(root: Path, tree: Tree) -> None:
    """Make a folder what a power failure has left of it."""
    shutil.rmtree(root)
    root.mkdir()
    for name, content in tree.items():
        if content is None:
            (root / name).mkdir(parents=True)
        else:
            (root / name).write_bytes(content)


def numbers(folder: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """The rounds of a run without their times, and all tensors of its last checkpoint."""
    files = sorted(newest(folder / CHECKPOINTS).glob("*.safetensors"))
    tensors = {
        f"{file.stem}.{name}": tensor.clone()
        for file in files
        for name, tensor in load_file(file).items()
    }
    return [without_timings(record) for record in Records(folder).read()], tensors


def test_the_power_fails_at_each_moment(disk: Disk, corpus: Path, tmp_path: Path) -> None:
    flags = [*small_flags(corpus, tmp_path), "--run.folder", str(disk.root / "run")]
    flags += ["--run.rounds", "3", "--run.tokens", "0", "--learning_rate.shape", "constant"]
    flags += ["--method.workers_per_trainer", "1"]
    run = make_run("diloco", [*flags, "--run.checkpoint_every", "1", "--run.keep_checkpoints", "1"])
    folder, rounds = run.folder, run.rounds()
    next(rounds), next(rounds)
    rounds.close()  # type: ignore[attr-defined]
    assert len(list(TrainingRun.resume(folder).rounds())) == 1
    records, tensors = numbers(folder)
    recipe, left = resumed_recipe(folder, ()), [*disk.left.values()]
    complete = sorted({name for name, _ in left})
    assert [name[:12] for name in complete] == ["", "round-000000", "round-000001", "round-000003"]

    resumed = set[str]()
    for least, tree in left:
        restore(disk.root, tree)
        if not least and (not_begun(folder) or not (folder / RECIPE).is_file()):
            check_free(recipe)  # It begins again.
            continue
        stored, found = recovered_run(folder, recipe, place(recipe.method.num_workers), {})
        assert found.checkpoint.name >= least
        assert Records(folder).cut(stored.algorithm["rounds_done"]) == [], "no line is lost"
        if found.checkpoint.name not in resumed:
            resumed.add(found.checkpoint.name)
            restore(disk.root, tree)
            list(TrainingRun.resume(folder).rounds())
            again, ended = numbers(folder)
            assert again == records
            assert all(torch.equal(ended[name], tensor) for name, tensor in tensors.items())
    assert len(resumed) == 4
