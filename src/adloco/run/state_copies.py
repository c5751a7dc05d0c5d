"""Protocol for copies of a run's state besides its checkpoints; elastic/ keeps some."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from adloco.distributed.placement.placement import Placement


class Copies(Protocol):
    """Copies of a run's state in the memory of its processes."""

    parts: dict[str, dict[str, Any]]
    """The copies of this process, by the name of the checkpoint they would make, and by part."""
    for_disk: dict[str, Any]
    """Parts of others that this process writes into its checkpoints."""
    bytes_kept: int
    """Bytes of tensors in the newest copies here."""

    def place(self, folder: Path, placement: Placement, every: int) -> None:
        """Begin, and forget what is here. Called on all ranks.

        Args:
            folder: The run's folder, which is there.
            placement: The ranks.
            every: Rounds from one copy to the next; 0: none are made.
        """
        ...

    @property
    def made(self) -> bool:
        """True if this run makes copies."""
        ...

    def due(self, round: int, *, saves: bool, last: bool) -> bool:
        """True if copies are to be made after a round.

        Args:
            round: Its number.
            saves: True if a checkpoint is written after it.
            last: True if it is the run's last.
        """
        ...

    def keep(self, name: str, parts: Mapping[str, Any], placement: Placement) -> int:
        """Keep the parts of this process, and exchange copies with others. Called on all ranks.

        Args:
            name: Name of the checkpoint that the parts would make.
            parts: Those that this process would write.
            placement: The ranks.

        Returns:
            Bytes that all have sent.
        """
        ...
