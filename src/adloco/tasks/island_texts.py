"""A task on the texts of several islands, each of which has its own (`data.islands`).

A process opens the texts of its own workers' islands alone. Of the others it learns a fingerprint
and a number of samples.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from adloco.algorithms.evaluation import total
from adloco.algorithms.method import Method, Source
from adloco.data.data_settings import DataSettings
from adloco.distributed.placement.islands import island_of
from adloco.errors import require
from adloco.tasks.task import Task, TaskData, TaskSettings


def fewer_texts(data: DataSettings, method: Method) -> list[str]:
    """A sentence if all workers of an island with a text of its own are dropped."""
    names = [*data.islands]
    living = {
        names[island_of(worker, method.num_workers, len(names))]
        for worker in (method.living_workers if names else ())
    }
    if len(living) == len(names):
        return []
    left = " and ".join(name for name in names if name in living)
    return [f"val_loss is that of {left} alone, because the other islands are dropped"]


def open_islands(
    settings: TaskSettings, given: TaskData, here: Sequence[int], workers: int
) -> Task:
    """Open the texts of the islands whose workers are here; the one text if islands share it.

    Args:
        here: The numbers of these islands, from 0.
        workers: Workers of all islands together.

    Raises:
        ValueError: A text cannot be read, or two islands have the same one.
    """
    names = [*given.data.islands]
    if not names:
        return settings.open(given)
    own = {island: given.data.of_island(names[island]) for island in here}
    for island, data in own.items():
        same = [names[other] for other in here if other != island and own[other] == data]
        require(
            not same,
            f"this process has the workers of islands {names[island]} and {', '.join(same)}, which "
            f"have the same text ({data.source}); give each its own in data.islands, or train each "
            "island in a process of its own",
        )
    tasks: dict[int, Task] = {}
    for island, data in own.items():
        try:
            tasks[island] = settings.open(replace(given, data=data))
        except ValueError as error:
            raise ValueError(f"island {names[island]}: {error}") from error
    return IslandTexts(given.data, tasks, workers)


class IslandTexts:
    """A task on the texts of islands, as `Task` says."""

    def __init__(self, data: DataSettings, tasks: Mapping[int, Task], workers: int) -> None:
        """
        Args:
            tasks: The task on the text of each island that is open here, by number.
            workers: Workers of all islands together, each of which has a stream.
        """
        self.tasks = tasks
        self.first = next(iter(tasks.values()))
        self.tokenizer = self.first.tokenizer
        self._data, self._names = data, [*data.islands]
        self._texts: dict[str, str] = {}
        """The fingerprint of each island's text, by name."""
        self._samples: dict[int, int] = {}
        """The samples of each island's text, by number."""
        self.streams = IslandSource(workers, len(self._names))

    def gather_texts(self, gather: Callable[[Any], list[Any]]) -> None:
        """Learn of the texts of all islands, by a function that takes this rank's value and returns
        those of all ranks. Called on all ranks, before the task is used.

        Raises:
            ValueError: The tokenizers of islands differ, or ranks of one have other texts.
        """
        tokenizer = self.tokenizer.fingerprint()
        here = {
            self._names[island]: (task.corpus, task.num_train_samples(0))
            for island, task in self.tasks.items()
        }
        found: dict[str, tuple[str, int]] = {}
        for other, theirs in gather((tokenizer, here)):
            require(
                other == tokenizer,
                f"data.tokenizer {self._data.tokenizer!r} differs between islands; give all of "
                "them the same",
            )
            for name, text in theirs.items():
                require(
                    found.setdefault(name, tuple(text)) == tuple(text),
                    f"the text of island {name} differs between its ranks; give them the same",
                )
        self._texts = {name: found[name][0] for name in self._names if name in found}
        for one, other in itertools.combinations(self._texts, 2):
            require(
                self._texts[one] != self._texts[other],
                f"islands {one} and {other} have the same text, so their workers would read the "
                "same samples; give each its own in data.islands",
            )
        self._samples = {self._names.index(name): count for name, (_, count) in found.items()}

    @property
    def corpus(self) -> str:
        return json.dumps(self._texts)

    def changed(self, corpus: str) -> list[str]:
        """The islands here whose texts differ from those in an earlier `corpus`, if it has them."""
        before = json.loads(corpus)
        return [name for name, text in self._texts.items() if before.get(name, text) != text]

    def matches_fingerprint(self, corpus: str) -> bool:
        return not self.changed(corpus)

    def rows_read(self) -> int | None:
        return None

    def skipped(self) -> str:
        told = ((self._names[island], task.skipped()) for island, task in self.tasks.items())
        return "; ".join(f"island {name}: {text}" for name, text in told if text)

    def configure(self, config: Any) -> Any:
        return self.first.configure(config)

    def train_source(self, num_streams: int, seed: int, least: int) -> Source:
        source = IslandSource(num_streams, len(self._names))
        for island, task in self.tasks.items():
            streams = source.streams_of(island)
            share = -(-least * streams // num_streams)
            source.sources[island] = task.train_source(streams, seed, share)
        return source

    def num_train_samples(self, at_least: int) -> int:
        """The samples of all streams before those of the first island begin again."""
        streams = {island: self.streams.streams_of(island) for island in self._samples}
        each = (self._samples[island] // number for island, number in streams.items())
        # A text that has fewer is refused where it is read; the others must not divide by 0 here.
        return max(1, min(each)) * sum(streams.values())

    def largest_source(self) -> Source:
        return self.first.largest_source()

    def loss(self, model: Any, batch: Any) -> Tensor:
        return self.first.loss(model, batch)

    def validate_model(self, model: Any, device: torch.device) -> str:
        return self.first.validate_model(model, device)

    def measure(
        self, model: nn.Module, device: torch.device, at_once: int, part: int = 0, parts: int = 1
    ) -> list[float]:
        each = self.tasks.values()
        return total([task.measure(model, device, at_once, part, parts) for task in each])


@dataclass(eq=False)
class IslandSource:
    """Streams that are divided among islands, each with a source of its own."""

    num_streams: int
    """Streams of all islands together."""
    islands: int
    """Their number; island i has the streams of which `island_of` is i."""
    sources: dict[int, Source] = field(default_factory=dict)
    """The sources of the islands that are open here."""

    def first_of(self, island: int) -> int:
        """The first stream of an island, or of those after the last one."""
        return -(-island * self.num_streams // self.islands)

    def streams_of(self, island: int) -> int:
        """The number of an island's streams."""
        return self.first_of(island + 1) - self.first_of(island)

    def read(self, stream: int, position: int, count: int) -> Any:
        """Read samples of a stream, from the text of its island, which must be open here."""
        island = island_of(stream, self.num_streams, self.islands)
        return self.sources[island].read(stream - self.first_of(island), position, count)


def of_island(task: Task, island: int) -> Task:
    """The task on the text of an island; itself if all islands read one text."""
    return task.tasks[island] if isinstance(task, IslandTexts) else task


def open_streams(task: Task, num_streams: int) -> Sequence[int]:
    """The streams, of so many, whose text is open here: all if islands read one text."""
    if not isinstance(task, IslandTexts):
        return range(num_streams)
    return [
        stream
        for island in task.tasks
        for stream in range(task.streams.first_of(island), task.streams.first_of(island + 1))
    ]
