"""The round whose checkpoint `run.keep_best` keeps."""

import math
from typing import Any

from adloco.run.checkpoint import BestRound, name_of


def record(round: int, loss: float | None) -> dict[str, Any]:
    return {"round": round, "inner_steps": 10 * round, "val_loss": loss}


def test_the_lowest_loss_of_the_rounds_that_have_checkpoints() -> None:
    best = BestRound()
    names = {number: name_of(number, 10 * number) for number in range(1, 6)}
    assert [best.add([record(number, loss)]) for number, loss in ((1, 3.0), (2, math.nan))] == [
        True,
        False,
    ]
    assert best.add([record(3, 1.0)]) and not best.add([record(4, 1.0)])
    assert best.spared([names[1], names[4]]) == names[4], "round 3 has no checkpoint"
    assert not best.add([record(5, 2.0)]), "round 3 was better"
    assert best.spared([names[1], names[5]]) == names[5], "that of round 4 was removed"
    assert best.spared([]) == ""
