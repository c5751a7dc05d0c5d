"""The clock of a run, on a wall clock that moves by hand."""

import pytest

from adloco.run import run_progress


def test_it_counts_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(run_progress.time, "monotonic", lambda: now)
    run = run_progress.Clock(7.0)
    now = 150.0  # It does not run yet.
    assert run.seconds == 7
    with run.running():
        now = 160.0
        assert run.seconds == 17
        now = 163.0
    now = 500.0
    assert run.seconds == 20
    with pytest.raises(KeyError), run.running():
        now = 501.0
        raise KeyError
    assert run.seconds == 21
