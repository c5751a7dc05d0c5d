"""The clock of a run, on a wall clock that moves by hand."""

import pytest

from adloco.run import clock


def test_it_counts_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(clock.time, "monotonic", lambda: now)
    run = clock.Clock()
    run.set(7.0)
    now = 150.0  # It does not run yet.
    assert run.seconds == 7
    with run.running():
        now = 160.0
        assert run.seconds == 17
        run.set(12.0)  # Training continues from 12 s, while it runs.
        now = 163.0
    now = 500.0
    assert run.seconds == 15
    with pytest.raises(KeyError), run.running():
        now = 501.0
        raise KeyError
    assert run.seconds == 16
