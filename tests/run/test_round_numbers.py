"""A line of metrics.jsonl, by hand."""

import math

import pytest
import torch

from adloco import BatchGuards
from adloco.config.recipe import build_recipe, override, read_values
from adloco.run.memory_use import Memory
from adloco.run.round_numbers import round_record
from adloco.run.run_progress import Progress
from tests.problems import make_run


@pytest.mark.parametrize(
    ("losses", "best"),
    [((3.0, 2.0), 2.0), ((2.0, 3.0), 2.0), ((math.nan, 3.0), 3.0), ((3.0, -math.inf), 3.0)],
)
def test_a_line_has_the_best_trainer(losses: tuple[float, float], best: float) -> None:
    """A loss that is not finite is none. Two trainers take 3 steps of 8 samples of 32 tokens."""
    report = make_run(num_trainers=2, guards=BatchGuards(initial=8)).round()
    assert report is not None
    line = round_record(
        report,
        build_recipe(override(read_values("adloco"), [("data.context_tokens", "32")])),
        Progress(
            tokens=0, rows=7, seconds=1.23456, part=0.5, budget="", inner_step=0, round_steps=0
        ),
        tokens_per_second=12.345,
        mfu=0.123456,
        bytes_checkpoint=5,
        memory=Memory(torch.device("cpu")),
        # The sums of a trainer over two islands: of losses and bytes, and the number of tokens.
        measured={
            trainer: {0: [3 * loss, 6.0, 3], 1: [loss, 2.0, 1]}
            for trainer, loss in enumerate(losses)
        },
    )
    assert (line["samples"], line["tokens"], line["rows_read"]) == (48, 48 * 32, 7)
    assert (line["seconds"], line["tokens_per_second"], line["mfu"]) == (1.235, 12.3, 0.1235)
    assert line["bytes_checkpoint"] == 5
    assert line["val_loss"] == best
    assert line["val_bits_per_byte"] == pytest.approx(best / math.log(2) / 2)
    assert [row["val_loss"] for row in line["trainers"]] == pytest.approx(losses, nan_ok=True)
    assert line["islands"] == []
