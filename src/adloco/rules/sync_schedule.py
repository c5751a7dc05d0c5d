"""When which part of the model is synced within a round (Streaming DiLoCo, arXiv 2501.18512).

The model is cut into fragments of layers. Each is sent once a round, at staggered inner steps, so
that the link carries a fragment at a time; what is sent travels for tau inner steps while training
goes on, and is then mixed in. A round of H inner steps ends when its last fragment has arrived.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from adloco.errors import require


@dataclass(frozen=True, kw_only=True)
class SyncEvent:
    """Something that happens between two inner steps of all workers at once."""

    step: int
    """Inner steps of the round before it."""
    kind: Literal["sync", "send", "receive"]
    """send: the fragment leaves; receive: it arrives; sync: both at once."""
    fragment: int


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """How an outer sync is spread over a round. One fragment and tau = 0 is the plain outer step at
    the end of the round.
    """

    fragments: int = 1
    """Parts of the model that are synced one after another, each once a round."""
    pattern: Literal["strided", "sequential"] = "strided"
    """strided: fragment p has the layers p, p + fragments, ...; sequential: neighbouring layers, as
    many in each.
    """
    tau: int = 0
    """Inner steps that a fragment may take to arrive while training goes on; less than sync_every /
    fragments.
    """
    alpha: float = 0.5
    """Part of a worker's own parameters in the mix with a fragment that arrives, if tau > 0; the
    rest are the new global ones.
    """

    def __post_init__(self) -> None:
        require(self.fragments >= 1, f"fragments must be >= 1, got {self.fragments}")
        require(
            self.pattern in ("strided", "sequential"),
            f"pattern must be strided or sequential, got {self.pattern!r}",
        )
        require(self.tau >= 0, f"tau must be >= 0, got {self.tau}")
        require(0 <= self.alpha < 1, f"alpha must be in [0, 1), got {self.alpha}")

    @property
    def replicas_diverge(self) -> bool:
        """True if workers differ from the global parameters at the end of a round."""
        return self.fragments > 1 or (self.tau > 0 and self.alpha > 0)

    def events(self, inner_steps: int) -> list[SyncEvent]:
        """Events of a round of that many inner steps, in order; never two fragments in flight, also
        in a round cut short.
        """
        return list(self._events(inner_steps))

    def _events(self, inner_steps: int) -> Iterator[SyncEvent]:
        before = 0
        for fragment in range(self.fragments):
            arrival = (fragment + 1) * inner_steps // self.fragments
            if self.tau == 0:
                yield SyncEvent(step=arrival, kind="sync", fragment=fragment)
            else:
                yield SyncEvent(
                    step=max(arrival - self.tau, before), kind="send", fragment=fragment
                )
                yield SyncEvent(step=arrival, kind="receive", fragment=fragment)
            before = arrival

    def cut(self, layers: Sequence[Sequence[int]], sync_every: int) -> list[list[int]]:
        """The members of each fragment, in rising order, from those of each layer; a ValueError for
        what does not go with model or rounds.
        """
        count, most = len(layers), sync_every // self.fragments - 1
        require(
            self.fragments <= count,
            f"fragments must be <= {count}, the layers of this model, got {self.fragments}",
        )
        require(
            self.fragments <= sync_every,
            f"fragments must be <= sync_every = {sync_every}, got {self.fragments}",
        )
        why = (
            f"less than sync_every // fragments = {sync_every} // {self.fragments}, so that a "
            "fragment has arrived when the next leaves"
        )
        require(self.tau <= most, f"tau must be <= {most}, {why}, got {self.tau}")
        homes = [
            layer % self.fragments if self.pattern == "strided" else layer * self.fragments // count
            for layer in range(count)
        ]
        return [
            sorted(
                member
                for home, layer in zip(homes, layers, strict=True)
                if home == fragment
                for member in layer
            )
            for fragment in range(self.fragments)
        ]
