"""Decides which faults `chaos.py` injects and when, what each has cost, and what must be true of a
run afterwards.
"""

import json
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from adloco.run.checkpoint import DAMAGED, newest
from adloco.run.folder import SUMMARY

START_SECONDS, ROUND_SECONDS = 8.0, 0.6
"""About what passes before the first round, and what a round takes."""
SILENT_SECONDS, TIMEOUT_SECONDS = 5, 90
"""`run.silent_seconds` and `run.timeout_seconds` of the runs. A rank that is stopped before it has
met the others is missed after the second.
"""
LONG_CUT, LONG_CUT_SECONDS = "long-cut", 60.0
"""The fault that lasts so long, longer than TCP tries again every few seconds."""
SILENT = ("stop", "cut", "half-open", LONG_CUT)
"""Faults that others notice by nothing but silence."""
RESTART_SECONDS = 60.0
"""Within which a run should go on by a restart, and a machine that was cut off train again."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault, and when it comes."""

    kind: str
    round: int
    """It comes after this round was recorded (0: after the start), ..."""
    delay: float
    """... so many seconds later."""
    victim: int
    """Which rank or node it hits, modulo how many there are."""
    seconds: float
    """How long it lasts, if it is one that passes."""


@dataclass(kw_only=True)
class Outcome:
    """What a fault has cost."""

    fault: Fault
    struck: float
    recorded: int
    """Rounds that were recorded when it struck."""
    trained_by: frozenset[int]
    """The processes that trained then."""
    passes: bool = False
    """True if it passes by itself."""
    repeated: int = 0
    """Recorded rounds that were trained again."""
    on_full_disk: int = 0
    """Rounds that were recorded while there was no room for a checkpoint."""
    recovery: float | None = None
    """Seconds until a round was complete that was begun after the fault; None: it never was."""
    in_place: bool = False
    """True if a process that trained before the fault trained that round too."""
    together: float | None = None
    """Seconds from the end of a fault that passes until all machines had trained a round together;
    None: they never had, or it is not known.
    """

    def see(self, round: int, trained_by: frozenset[int], moment: float) -> bool:
        """Take note of a round; True if it is the first that was begun after the fault.

        Those that survive may still complete the round before.
        """
        later = round > self.recorded + 1 and (self.passes or trained_by != self.trained_by)
        if self.recovery is not None or not (later or trained_by - self.trained_by):
            return False
        self.recovery = moment - self.struck
        self.in_place = bool(trained_by & self.trained_by)
        return True

    @property
    def goal(self) -> float:
        """Seconds within which the run should have gone on: after a round and 5 s in place, after
        60 s by a restart. A fault that passes may last first, and silence is noticed within twice
        `SILENT_SECONDS`, or `TIMEOUT_SECONDS` before the first round.
        """
        noticed = self.fault.seconds if self.passes else 0.0
        if self.recorded == 0 and self.fault.kind in SILENT:
            noticed = max(noticed, TIMEOUT_SECONDS)
        if not self.in_place:
            return noticed + RESTART_SECONDS
        if self.fault.kind in SILENT:
            noticed = min(noticed or math.inf, 2.0 * SILENT_SECONDS)
        return noticed + ROUND_SECONDS + 5

    @property
    def late(self) -> bool:
        """True if it went on later than `goal` says, or a machine that was cut off for long was
        back later than a restart may take.
        """
        apart = self.fault.kind == LONG_CUT and (self.together or 0.0) > RESTART_SECONDS
        return self.recovery is not None and (self.recovery > self.goal or apart)

    @property
    def over(self) -> bool:
        """True if the run has gone on, and after a long cut with all machines."""
        together = self.fault.kind != LONG_CUT or self.together is not None
        return self.recovery is not None and together

    @property
    def too_many_repeated(self) -> bool:
        """True beyond the round of the fault, that of a checkpoint which was damaged, and those
        for whose checkpoints the disk had no room.
        """
        return self.repeated > 1 + (self.fault.kind == "damage") + self.on_full_disk


def schedule(kinds: Mapping[str, Sequence[str]], count: int, seed: int) -> dict[str, list[Fault]]:
    """Faults by mode: every kind in every mode as often as any other, in an order that is drawn.

    Args:
        kinds: The kinds of faults of each mode.
        count: Number of faults.
        seed: The same seed gives the same faults.
    """
    draw = random.Random(seed)
    chosen: dict[str, list[Fault]] = {mode: [] for mode in kinds}
    deck: list[tuple[str, str]] = []
    for _ in range(count):
        if not deck:
            deck = [(mode, kind) for mode in kinds for kind in kinds[mode]]
            draw.shuffle(deck)
        mode, kind = deck.pop()
        before = chosen[mode][-1].round + 1 if chosen[mode] else -1
        # Two checkpoints must be there before the newest is damaged.
        round = max(before + draw.randint(1, 3), 2 if kind == "damage" else 0)
        fault = Fault(
            kind=kind,
            round=round,
            delay=draw.random() * (ROUND_SECONDS if round else START_SECONDS),
            victim=draw.randrange(100),
            seconds=draw.uniform(1, 12),
        )
        if kind == LONG_CUT:
            fault = replace(fault, seconds=LONG_CUT_SECONDS)
        chosen[mode].append(fault)
    return chosen


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What a run has left in its folder."""

    records: list[dict[str, Any]]
    steps: list[dict[str, Any]]
    tensors: dict[str, torch.Tensor]
    """Parameters and optimizer states of the newest checkpoint, by name."""
    files: frozenset[str]

    @staticmethod
    def read(folders: Sequence[Path], cache: Path) -> "RunFiles":
        """Read a run's folder, and the names in its token cache.

        Args:
            folders: The run's folder on each machine's disk, one if they share it. The machine that
                has completed the run has its end. Its records begin where it took over rank 0, so
                earlier rounds are on other machines.
            cache: The token cache.
        """
        folder = max(folders, key=lambda each: _changed(each / SUMMARY))
        others = [each for each in folders if each != folder]
        parts = sorted(newest(folder / "checkpoints").glob("*-*.safetensors"))
        return RunFiles(
            records=_with_earlier("metrics.jsonl", folder, others),
            steps=_with_earlier("steps.jsonl", folder, others),
            tensors={
                # A copy: the file is memory-mapped, and a busy disk stays mounted.
                f"{part.stem}.{name}": tensor.clone()
                for part in parts
                for name, tensor in load_file(part).items()
            },
            files=names_below(folder) | names_below(cache),
        )


def names_below(folder: Path) -> frozenset[str]:
    """All names in a folder and below it, without checkpoints: which are kept depends on faults."""
    names = (path.relative_to(folder) for path in folder.rglob("*"))
    return frozenset(
        str(name)
        for name in names
        if not any(part.startswith(("round-", DAMAGED)) for part in name.parts)
    )


def _changed(file: Path) -> float:
    """When a file was written; 0 if it is not there."""
    return file.stat().st_mtime if file.exists() else 0.0


def _with_earlier(name: str, folder: Path, others: Sequence[Path]) -> list[dict[str, Any]]:
    """The lines of a file in a folder, after those of earlier rounds that only others have."""
    found = lines_of(folder / name)
    for other in others:
        first = min((line["round"] for line in found), default=math.inf)
        found = [line for line in lines_of(other / name) if line["round"] < first] + found
    return found


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def problems(run: RunFiles, undisturbed: RunFiles) -> list[str]:
    """What is wrong with a run after its faults, a sentence each.

    Args:
        run: The run.
        undisturbed: A run of the same recipe and seed without faults.
    """
    return [
        *wrong_rounds(run.records, len(undisturbed.records)),
        *wrong_samples(run.records, run.steps),
        *wrong_decisions(run.records, undisturbed.records),
        *wrong_tensors(run.tensors, undisturbed.tensors),
        *(f"{name} is left over" for name in sorted(run.files - undisturbed.files)),
        *(f"{name} is missing" for name in sorted(undisturbed.files - run.files)),
    ]


def wrong_rounds(records: Sequence[Mapping[str, Any]], rounds: int) -> list[str]:
    """Rounds of 1 to `rounds` that are recorded never or twice, and their order."""
    found = [record["round"] for record in records]
    times = Counter(found)
    return [
        f"round {number} is recorded {times[number]} times"
        for number in sorted({*times, *range(1, rounds + 1)})
        if times[number] != (1 <= number <= rounds)
    ] or [
        f"round {second} is recorded after round {first}"
        for first, second in pairwise(found)
        if second < first
    ]


def wrong_samples(
    records: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Inner steps that are recorded twice, and rounds whose samples are not their steps'."""
    names = ("round", "trainer", "worker", "inner_step")
    times = Counter(tuple(step[name] for name in names) for step in steps)
    twice = [
        f"inner step {dict(zip(names, step, strict=True))} is recorded {count} times"
        for step, count in times.items()
        if count > 1
    ]
    of_steps: Counter[int] = Counter()
    for step in steps:
        of_steps[step["round"]] += step["samples"]
    totals = [0, *(record["samples"] for record in records)]
    return twice + [
        f"round {record['round']} counts {after - before} samples, but its steps have "
        f"{of_steps[record['round']]}"
        for record, (before, after) in zip(records, pairwise(totals), strict=True)
        if after - before != of_steps[record["round"]]
    ]


def wrong_decisions(
    records: Sequence[Mapping[str, Any]], undisturbed: Sequence[Mapping[str, Any]]
) -> list[str]:
    """The first round whose counters, batches or merges are not those of the undisturbed run."""
    for ours, theirs in zip(records, undisturbed, strict=False):
        for name, value in _decided(ours).items():
            if value != _decided(theirs)[name]:
                return [
                    f"{name} of round {ours['round']} is {value}, and {_decided(theirs)[name]} "
                    "without faults"
                ]
    return []


def _decided(record: Mapping[str, Any]) -> dict[str, Any]:
    of_round = ("round", "tokens", "samples", "inner_steps", "syncs", "learning_rate", "merges")
    of_trainer = ("trainer", "workers", "requested_batch", "trainer_batch")
    return {name: record[name] for name in of_round} | {
        name: [trainer[name] for trainer in record["trainers"]] for name in of_trainer
    }


def wrong_tensors(
    tensors: Mapping[str, torch.Tensor], undisturbed: Mapping[str, torch.Tensor]
) -> list[str]:
    """Parameters and optimizer states that are not those of the undisturbed run, bit for bit."""
    if tensors.keys() != undisturbed.keys():
        return [f"only one run has {', '.join(sorted(tensors.keys() ^ undisturbed.keys()))}"]
    differing = [name for name in tensors if not torch.equal(tensors[name], undisturbed[name])]
    return [
        f"{len(differing)} of {len(tensors)} tensors differ, the first is {name}"
        for name in differing[:1]
    ]
