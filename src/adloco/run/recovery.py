"""Finds the checkpoint from which a run resumes: the newest one of which every part is good.

Every process takes the parts that it needs from copies in its memory, or reads them in the folder
that it sees. What it does not find, a process that has it sends.
"""

import shutil
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adloco.algorithms.state_parts import RUN, local_parts, of_workers
from adloco.distributed.placement.placement import Placement
from adloco.distributed.plain_state import state_bytes
from adloco.errors import require
from adloco.run.checkpoint import DAMAGED, SAVE, foreign, list_all
from adloco.run.machine_folders import in_turn
from adloco.run.part_file import DamagedCheckpointError, read_part


class LostPartsError(ValueError):
    """Each checkpoint lacks a part that no process of this start has."""


@dataclass(frozen=True, kw_only=True)
class Unusable:
    """A checkpoint that lacks parts."""

    name: str
    damage: str
    """Damage in the checkpoint; empty if files are only missing."""
    missing: str
    """The parts that no process has."""


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """The checkpoint from which a run resumes."""

    checkpoint: Path
    parts: dict[str, Any]
    """The checkpoint's parts that this process needs, with `run`."""
    unusable: Sequence[Unusable]
    """The newer ones."""
    newest_on_disk: str
    """Name of the checkpoint, or of the newest one before if memory had parts of it."""
    bytes_received: int
    """Bytes of parts that this process has received from another island."""

    @property
    def save(self) -> str:
        """Identity of the save that made the checkpoint."""
        return str(self.parts[RUN][SAVE])


def load_newest_good(
    folder: Path,
    placement: Placement,
    workers: Collection[int],
    copies: Mapping[str, Mapping[str, Any]],
) -> Recovered:
    """Load the newest checkpoint of which every part is good somewhere. Called on all ranks.

    Args:
        workers: Ids of the run's workers, whose parts are needed.
        copies: Parts that this process has in memory, by the name of the checkpoint that they
            would make, and by part.

    Raises:
        LostPartsError: No checkpoint is good.
        ValueError: Another version wrote it.
    """
    on_disk = set[str]().union(*placement.all_values([path.name for path in list_all(folder)]))
    names = sorted(on_disk.union(*placement.all_values(list(copies))), reverse=True)
    require(bool(names), f"{folder} has no checkpoint; start the run again in another folder")
    unusable: list[Unusable] = []
    for name in names:
        sharing = _Sharing(folder / name, copies.get(name, {}), placement)
        lost = sharing.get([RUN]) or sharing.choose_save()
        if not lost:
            numbers = of_workers(sharing.parts[RUN]["algorithm"], workers)
            lost = sharing.get(local_parts(numbers, placement))
        if not lost:
            return Recovered(
                checkpoint=folder / name,
                parts=sharing.parts,
                unusable=unusable,
                newest_on_disk=max((each for each in on_disk if each < name), default="")
                if placement.any(sharing.used_copies)
                else name,
                bytes_received=sharing.bytes_received,
            )
        damage = "; ".join(sorted({text for text in lost.values() if text}))
        missing = ", ".join(lost)
        unusable.append(Unusable(name=name, damage=damage, missing=missing))
    found = "; ".join(
        f"{each.name}: {each.damage or f'{each.missing} is missing'}" for each in unusable
    )
    raise LostPartsError(
        f"no checkpoint in {folder} is good ({found}); bring back the files, or start the run "
        "again in another folder"
    )


class _Sharing:
    """The parts of a checkpoint that this process has, and how it gets others."""

    def __init__(self, folder: Path, copies: Mapping[str, Any], placement: Placement) -> None:
        self.parts: dict[str, Any] = {}
        self.bytes_received = 0
        self.used_copies = False
        self._folder = folder
        self._copies = copies
        self._placement = placement

    def get(self, wanted: Sequence[str]) -> dict[str, str]:
        """Read these parts, or receive them from other ranks. Called on all ranks.

        Returns:
            The parts that nobody has, and what is damaged in each; the same on all ranks.
        """
        placement = self._placement
        spare: dict[str, Any] = {}
        damage: dict[str, str] = {}

        def read(part: str, into: dict[str, Any]) -> None:
            if part in self._copies:
                # Training changes what it continues from.
                state, self.used_copies = deepcopy(self._copies[part]), True
            else:
                try:
                    state = read_part(self._folder, part)
                except DamagedCheckpointError as error:
                    damage[part] = error.damage
                    return
            if state is None:
                return
            if wrong := foreign(part, state, self.parts.get(RUN, state)):
                damage[part] = wrong
            else:
                into[part] = state

        for part in wanted:
            read(part, self.parts)
        lacking = placement.all_values([part for part in wanted if part not in self.parts])
        asked = sorted({part for parts in lacking for part in parts})
        if not asked:
            return {}
        for part in asked:
            if part not in wanted:
                read(part, spare)
        having = placement.all_values([part for part in asked if part in {**self.parts, **spare}])
        damaged = placement.all_values(damage)
        lost = {
            part: next((texts[part] for texts in damaged if part in texts), "")
            for part in asked
            if not any(part in parts for parts in having)
        }
        if lost:
            return lost
        for part in asked:
            receivers = [rank for rank, parts in enumerate(lacking) if part in parts]
            senders = [rank for rank, parts in enumerate(having) if part in parts]
            for receiver in receivers:
                self._transfer(part, spare, senders, receiver)
                senders.append(receiver)
        return {}

    def choose_save(self) -> dict[str, str]:
        """If ranks have the part `run` of different saves, take the one that is in memory.

        A machine that comes back can have another save of the round on its disk, which the others
        have trained again since.

        Returns:
            As `get`: an error text if none of these saves, or several, are in memory.
        """
        placement = self._placement
        saves = placement.all_values(self.parts[RUN][SAVE])
        if len({*saves}) == 1:
            return {}
        in_memory = placement.all_values(RUN in self._copies)
        holders = [rank for rank, held in enumerate(in_memory) if held]
        if len({saves[rank] for rank in holders}) != 1:
            return {RUN: f"{RUN} differs between machines"}
        for receiver, save in enumerate(saves):
            if save != saves[holders[0]]:
                self._transfer(RUN, {}, holders, receiver)
        return {}

    def _transfer(
        self, part: str, spare: dict[str, Any], senders: Sequence[int], receiver: int
    ) -> None:
        """Send a part from one of the ranks that have it, if there is one from the same island."""
        placement = self._placement
        island = receiver // placement.ranks_per_worker
        sender = min(senders, key=lambda rank: (rank // placement.ranks_per_worker != island, rank))
        if placement.rank not in (sender, receiver):
            return
        state = placement.transfer(self.parts.get(part, spare.get(part)), sender, receiver)
        if placement.rank == receiver:
            self.parts[part] = state
            if sender // placement.ranks_per_worker != island:
                self.bytes_received += state_bytes(state)


def clear_unusable(folder: Path, found: Recovered, placement: Placement) -> list[str]:
    """Rename damaged checkpoints and remove incomplete ones, so that they do not count any more;
    return a sentence for each. Called on all ranks.

    folder: Folder of all checkpoints of the run.
    """

    def clear() -> None:
        for each in found.unusable:
            if each.damage:
                _rename(folder / each.name, folder / f"{DAMAGED}{each.name}")
            else:
                shutil.rmtree(folder / each.name, ignore_errors=True)

    in_turn(placement, clear)
    continues = f"the run continues from {found.checkpoint.name}"
    return [
        f"checkpoint {folder / each.name} is damaged ({each.damage}) and is now called "
        f"{DAMAGED}{each.name}; {continues}"
        if each.damage
        else f"checkpoint {folder / each.name} was not written to its end ({each.missing} is "
        f"missing) and is removed; {continues}"
        for each in found.unusable
    ]


def _rename(checkpoint: Path, target: Path) -> None:
    # Tried, and not looked for before: a network file system may show a folder that was renamed.
    try:
        checkpoint.replace(target)
    except FileNotFoundError:
        return  # Another island has renamed it, or it is on another machine.
    except OSError:
        shutil.rmtree(target, ignore_errors=True)  # Of the same round, damaged before.
        checkpoint.replace(target)
