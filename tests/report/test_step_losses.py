"""Step losses, by hand: means over workers and over neighbouring steps."""

import pytest

from adloco.metrics import Record
from adloco.report.step_losses import POINTS, step_losses, steps_per_point


def line(trainer: int, inner_step: int, loss: float | None, samples: int) -> Record:
    return {"trainer": trainer, "inner_step": inner_step, "loss": loss, "samples": samples}


def test_a_step_is_the_mean_over_the_samples_of_a_trainer() -> None:
    steps = [
        # Trainer 0, two workers: (1 x 4 + 2 x 1) / 3 = 2, then 5 alone, because one loss is nan.
        *(line(0, 1, 4.0, 1), line(0, 1, 1.0, 2), line(0, 2, 5.0, 1), line(0, 2, None, 2)),
        *(line(1, 1, 3.0, 1), line(1, 2, 7.0, 3)),
        line(0, 3, 9.0, 1),  # Of a round that is not complete.
    ]
    records = [{"inner_steps": 2, "tokens": 100, "samples": 10}]
    found = step_losses(records, steps)
    assert {trainer: of_it["loss"] for trainer, of_it in found.items()} == {
        0: [2.0, 5.0],
        1: [3.0, 7.0],
    }
    # Ten tokens a sample: four samples in the first step, six in the second, of both trainers.
    for of_it in found.values():
        assert (of_it["tokens"], of_it["inner_steps"]) == ([40.0, 100.0], [1.0, 2.0])


def test_a_point_of_a_long_run_is_a_mean_and_not_a_sample() -> None:
    """100,000 steps of loss 1 to 100,000; the trainer is absorbed after 1,100 of them."""
    steps = [line(1, step, float(step), 1) for step in range(1, 1101)]
    steps += [line(0, step, float(step), 1) for step in range(1, 100_001)]
    records = [{"inner_steps": 100_000, "tokens": 101_100, "samples": 101_100}]
    assert steps_per_point(records) == 200
    whole, absorbed = step_losses(records, steps).values()
    assert len(whole["loss"]) == POINTS
    # 1 to 200, 201 to 400, ...; the mean of the last hundred steps, 1001 to 1100.
    assert whole["loss"] == whole["inner_steps"]
    assert (whole["loss"][0], whole["loss"][-1]) == (100.5, 99_900.5)
    assert absorbed["loss"] == [100.5, 300.5, 500.5, 700.5, 900.5, 1050.5]
    # Two tokens a step while there are two trainers.
    assert absorbed["tokens"] == [2 * step for step in absorbed["loss"]]
    assert whole["tokens"][-1] == 99_900.5 + 1_100


@pytest.mark.parametrize(("total", "each"), [(1, 1), (500, 1), (501, 2), (1001, 3)])
def test_no_more_points_than_a_picture_can_show(total: int, each: int) -> None:
    records = [{"inner_steps": total, "tokens": total, "samples": total}]
    assert steps_per_point(records) == each
    found = step_losses(records, [line(0, step + 1, 1.0, 1) for step in range(total)])[0]
    assert len(found["loss"]) == -(-total // each) <= POINTS


def test_steps_of_rounds_whose_lines_are_lost_count_their_tokens() -> None:
    """Steps 1 to 3 of six are lost: 60 samples in all, 30 of them in the lines that are left."""
    steps = [line(0, step, 1.0, 10) for step in (4, 5, 6)]
    found = step_losses([{"inner_steps": 6, "tokens": 600, "samples": 60}], steps)[0]
    assert found["tokens"] == [400.0, 500.0, 600.0]


def test_a_run_without_steps_has_no_lines() -> None:
    assert step_losses([{"inner_steps": 3, "tokens": 3, "samples": 3}], []) == {}
