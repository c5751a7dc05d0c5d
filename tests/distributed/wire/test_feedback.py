"""What is kept of what a wire format loses: which feedback `auto` is, two syncs by hand in float32
and bf16, and a format of one's own under every feedback.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from adloco import Bf16, Feedback, Int1, Int2, Int4, Int8
from adloco.algorithms.model_state import Replica
from adloco.distributed.comm.comm import Comm
from adloco.distributed.comm.sum_islands import Islands
from adloco.distributed.traffic import Traffic
from adloco.distributed.wire.wire_format import WireFormat
from adloco.rules.sync_schedule import SyncEvent
from tests.problems import make_run, outer_sync


@dataclass(frozen=True, kw_only=True)
class WholeNumbers:
    """Each value as a whole number of units, rounded towards zero, in a byte. It has no more than
    `WireFormat` asks for.
    """

    unit: float = 1.0
    """The smallest value that is sent."""

    block = 4
    block_bytes = 4

    def encode(self, values: Tensor) -> Tensor:
        return (values / self.unit).trunc().clamp(-127, 127).to(torch.int8).view(torch.uint8)

    def decode(self, blocks: Tensor) -> Tensor:
        return blocks.view(torch.int8).float() * self.unit


@pytest.mark.parametrize(
    ("wire", "place"),
    [
        (None, "none"),
        (Bf16(), "none"),
        *((Int8(block=block), "none") for block in (1, 3, 256)),
        *((Int4(block=block), "none") for block in (2, 10, 128, 1 << 16)),
        *((Int2(block=block), "params") for block in (4, 12, 128, 512)),
        *((Int1(block=block), "params") for block in (8, 256, 1 << 12)),
        (WholeNumbers(), "params"),
    ],
    ids=str,
)
def test_what_auto_is(wire: WireFormat | None, place: str) -> None:
    assert Feedback().place(wire) == place
    for given in ("none", "params"):
        assert Feedback(feedback=given).place(wire) == (given if wire else "none")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("feedback", "begins", "kept", "end"),
    [
        # Global is 32 and workers are at 27 and 30. They send half of 5 and of 2 as whole numbers,
        # 2 and 1, so global becomes 29. The first has 5 - 2 / (1/2) = 1 left, and keeps 0.5 of it.
        # Then both move by 3.5, of which half is sent as 1 each, and global becomes 27.
        ("none", (29.0, 29.0), None, 27.0),
        # It begins at 29 - 0.5 and moves to 25, so half of 4 is sent.
        ("params", (28.5, 29.0), (0.0, 0.0), 26.0),
    ],
)
def test_two_syncs_by_hand(
    feedback: Any,
    begins: tuple[float, ...],
    kept: tuple[float, ...] | None,
    end: float,
    dtype: torch.dtype,
) -> None:
    outer = outer_sync(
        [torch.full((1,), 32.0, dtype=dtype)],
        None,
        wire=WholeNumbers(),
        feedback=Feedback(feedback=feedback, feedback_decay=0.5),
    )
    replicas = [
        Replica(
            names=["a"],
            params=[torch.full((1,), place, dtype=dtype)],
            buffers=[],
            residuals=[torch.zeros(1)] if kept else [],
        )
        for place in (27.0, 30.0)
    ]
    event, comm = (
        SyncEvent(step=0, kind="sync", fragment=0),
        Comm(Islands(workers=[2], traffic=Traffic())),
    )
    outer.sync(event, replicas, [0.5, 0.5], comm)
    assert outer.global_params[0].item() == 29.0
    assert tuple(replica.params[0].item() for replica in replicas) == begins
    if kept:
        assert tuple(replica.residuals[0].item() for replica in replicas) == kept
    for replica in replicas:
        replica.params[0].sub_(3.5)
    outer.sync(event, replicas, [0.5, 0.5], comm)
    assert outer.global_params[0].item() == end


def test_what_rounding_to_bf16_leaves_out_of_the_parameters_stays_in_memory() -> None:
    # 64.25 is between 64 and 64.5 in bf16, so it is rounded to 64, whose last bit is even.
    start = torch.full((1,), 64.5, dtype=torch.bfloat16)
    replicas = [
        Replica(names=["a"], params=[own], buffers=[], residuals=[torch.zeros(1)])
        for own in (start - 0.5, start.clone())
    ]
    feedback = Feedback(feedback="params", feedback_decay=0.5)
    outer = outer_sync([start], None, wire=WholeNumbers(), feedback=feedback)
    event = SyncEvent(step=0, kind="sync", fragment=0)
    outer.sync(event, replicas, [0.5, 0.5], Comm(Islands(workers=[2], traffic=Traffic())))
    # 0.25 was not sent: the residual is 0.5 of the difference of 0.5.
    assert outer.global_params[0].item() == 64.5
    assert replicas[0].params[0].item() == 64.0
    assert replicas[0].residuals[0].item() == -0.25


@pytest.mark.parametrize("feedback", ["auto", "none", "params"])
def test_a_format_of_ones_own_trains(feedback: Any) -> None:
    run = make_run(wire=WholeNumbers(unit=2**-8), feedback=Feedback(feedback=feedback))
    losses = [report.train_loss for report in run.rounds(6)]
    assert losses[-1] < losses[0] / 2
    one, other = (worker.replica for worker in run.workers.values())
    assert bool(one.residuals) == (feedback != "none")
    equal = all(a.equal(b) for a, b in zip(one.params, other.params, strict=True))
    assert equal == (feedback == "none")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"feedback": "ef21"},
            "feedback must be auto, none or params, got 'ef21'",
        ),
        *(
            (
                {"feedback_decay": decay},
                f"feedback_decay must be in (0, 1], got {decay}; to keep nothing, set "
                "feedback = none",
            )
            for decay in (0.0, 1.1, float("nan"))
        ),
    ],
)
def test_bad_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Feedback(**values)
    assert str(caught.value) == message
