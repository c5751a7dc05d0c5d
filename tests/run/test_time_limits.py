"""Warnings that a run needs more time than its settings grant."""

from adloco.config.settings import RunSettings
from adloco.run.time_limits import late_checkpoint, slow_ranks

SETTINGS = RunSettings(grace_seconds=30.0, timeout_seconds=60.0)


def test_a_checkpoint_that_takes_longer_than_the_grace() -> None:
    assert late_checkpoint(SETTINGS, 30.0) == ""
    late = late_checkpoint(SETTINGS, 45.2)
    assert late.startswith("the last checkpoint took 45 s, longer than run.grace_seconds = 30: ")


def test_a_round_that_takes_longer_than_the_timeout() -> None:
    assert slow_ranks(SETTINGS, 60.0) == ""
    assert "took 61 s, longer than run.timeout_seconds = 60" in slow_ranks(SETTINGS, 61.0)
    assert slow_ranks(SETTINGS, 90.0).endswith("set it to 180 or more")
