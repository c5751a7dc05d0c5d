"""Error feedback, the link of a sync beside its wire format: what encoding loses is sent later
(`comm/compressed.py` has the chain). A wire format knows nothing of it, so each works with every
feedback.
"""

from dataclasses import dataclass
from typing import Literal

from adloco.distributed.wire.wire_format import WireFormat
from adloco.errors import SettingError, require_choices
from adloco.setting import setting

SCALE_BYTES = 4
"""Bytes of a block that are not counted as bits of its values: formats send a scale of this size
with each block, which is most of a small block.
"""


@dataclass(frozen=True, kw_only=True)
class Feedback:
    """Keeps or loses the residual, which is what a sync in a lossy wire format leaves unsent.

    It is kept in the parameters: the worker trains a model that includes the residual, but for what
    rounding to their type leaves out, which is kept in memory. That is SAEF (arXiv 2008.05823), and
    SA-PEF (arXiv 2601.20738) with its coefficient at 1. If all of it were kept in memory, as usual,
    the model that the worker trains meanwhile would lack it, and make the same progress once more:
    with int1 and few syncs that ends 8% higher (reproduce/LOG.md, 2026-11-27).

    Where sums are encoded again, what that loses is kept too, as DoubleSqueeze does (arXiv
    1905.05957), but by the workers, so that it needs no memory of its own: each worker owns a share
    of the blocks, and adds what is lost of their sum to its residual.
    """

    feedback: Literal["auto", "none", "params"] = setting("auto", aliases=("residual_in_params",))
    """Treatment of what a sync leaves unsent. none: it is lost. params: the worker keeps it in
    its parameters, which are then ahead of the global ones. auto: params if the format has fewer
    than 4 bits for each value (int1 and int2), else none."""
    feedback_decay: float = setting(0.9, aliases=("error_feedback",))
    """Fraction of what a sync leaves unsent that the worker keeps in its parameters; 1: all."""

    def __post_init__(self) -> None:
        require_choices(self)
        if not 0 < self.feedback_decay <= 1:
            raise SettingError(
                self,
                "feedback_decay",
                f"must be in (0, 1], got {self.feedback_decay}; to keep nothing, set {{feedback}} "
                "= none",
            )

    def place(self, wire: WireFormat | None) -> Literal["none", "params"]:
        """Place where workers keep residuals of this format; none if they keep nothing, or if
        nothing is encoded (wire None).
        """
        if wire is None:
            return "none"
        if self.feedback != "auto":
            return self.feedback
        few_bits = 8 * (wire.block_bytes - SCALE_BYTES) < 4 * wire.block
        return "params" if few_bits else "none"
