"""The schedule that says which part of the model is synced after which inner step of a round
(Streaming DiLoCo, arXiv 2501.18512).

The model is cut into fragments, each made of whole layers. Each fragment is sent once a round, at
staggered inner steps, so the link carries one fragment at a time. A fragment is in flight for tau
inner steps while training continues; then the workers mix it into their parameters. A round of H
inner steps ends when its last fragment has arrived.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from adloco.errors import require, require_range, require_setting


@dataclass(frozen=True, kw_only=True)
class SyncEvent:
    """The departure or arrival of a fragment between two inner steps, on all workers at once."""

    step: int
    """Inner steps of the round that are done before this event."""
    kind: Literal["sync", "send", "receive"]
    """send: the fragment leaves; receive: it arrives; sync: both at once."""
    fragment: int
    """Number of the fragment, from 0."""


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """Spreads the outer sync over a round.

    One fragment and tau = 0 give the plain outer step at the end of the round.
    """

    fragments: int = 1
    """Number of parts of the model that are synced one after another, each once a round. Part p has
    the layers p, p + fragments, p + 2 fragments, ...
    """
    tau: int = 0
    """Inner steps for which a fragment is in flight while training continues; at most sync_every /
    fragments - 1.
    """
    alpha: float | Literal["auto"] = "auto"
    """Weight of a worker's own parameters when a fragment arrives: they become alpha x own + (1 -
    alpha) x new global parameters. auto: 0.5 if tau > 0, else 0; 1: workers keep their own. A model
    in bf16 takes 0 or 1 alone.
    """

    def __post_init__(self) -> None:
        require_range(self, "fragments", at_least=1)
        require_range(self, "tau", at_least=0)
        require_setting(
            self.alpha == "auto" or 0 <= self.alpha <= 1, self, "alpha", "must be in [0, 1] or auto"
        )

    @property
    def own_weight(self) -> float:
        """`alpha` as a number."""
        return (0.5 if self.tau > 0 else 0.0) if self.alpha == "auto" else self.alpha

    @property
    def mixes(self) -> bool:
        """True if arriving fragments are mixed with a worker's own parameters; see `alpha`."""
        return 0 < self.own_weight < 1

    @property
    def replicas_diverge(self) -> bool:
        """True if workers differ from the global parameters at the end of a round."""
        return self.fragments > 1 or self.own_weight > 0

    @property
    def fewest_steps(self) -> int:
        """The fewest inner steps in which each fragment arrives before the next one is sent."""
        return self.fragments * (self.tau + 1)

    def events(self, inner_steps: int) -> list[SyncEvent]:
        """The events of a round of this many inner steps, in order.

        Two fragments are never in flight at once, not even in a round that is cut short.
        """
        found, before = [], 0
        for fragment in range(self.fragments):
            arrival = (fragment + 1) * inner_steps // self.fragments
            if self.tau == 0:
                found.append(SyncEvent(step=arrival, kind="sync", fragment=fragment))
            else:
                leaves = max(arrival - self.tau, before)
                found.append(SyncEvent(step=leaves, kind="send", fragment=fragment))
                found.append(SyncEvent(step=arrival, kind="receive", fragment=fragment))
            before = arrival
        return found

    def cut(self, layers: Sequence[Sequence[int]], sync_every: int) -> list[list[int]]:
        """Cut a model into fragments of whole layers.

        Args:
            layers: Indices of the parameters of each layer.
            sync_every: Inner steps of a round (H).

        Returns:
            Indices of the parameters of each fragment, in rising order.

        Raises:
            ValueError: The model has too few layers, or a round too few steps, for these settings.
        """
        count = len(layers)
        require(
            self.fragments <= count,
            f"streaming.fragments must be <= {count}, the layers of this model, got "
            f"{self.fragments}",
        )
        require(
            self.fewest_steps <= sync_every,
            f"method.sync_every must be >= {self.fewest_steps} with streaming.fragments = "
            f"{self.fragments} and streaming.tau = {self.tau}, so that a fragment has arrived "
            f"before the next one is sent, got {sync_every}",
        )
        return [
            sorted(member for layer in layers[fragment :: self.fragments] for member in layer)
            for fragment in range(self.fragments)
        ]
