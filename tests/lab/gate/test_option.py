"""The gate by hand: norms against their median, directions against the mean direction."""

import math

import pytest

from adloco.lab.gate.option import Gate, Verdict, cosines_with_others
from adloco.run.stored import changeable


def test_norms_are_compared_with_their_median() -> None:
    """The norms are 5, 1, 2, 41 and 4, their median is 4."""
    vectors = {0: (3, 4), 1: (1, 0), 2: (0, 2), 3: (9, 40), 7: (0, 4)}
    verdicts = Gate(gate=True, gate_factor=10, gate_cosine=-1).judge(vectors)
    assert [verdict.relative_norm for verdict in verdicts.values()] == [1.25, 0.25, 0.5, 10.25, 1]
    assert [worker for worker, verdict in verdicts.items() if verdict.left_out] == [3]
    assert verdicts[3].cosine is None
    verdicts = Gate(gate=True, gate_factor=3.9, gate_cosine=-1).judge(vectors)
    assert [worker for worker, verdict in verdicts.items() if verdict.left_out] == [1, 3]
    verdicts = Gate(gate=True, gate_factor=10.5, gate_cosine=-1).judge(vectors)
    assert not any(verdict.left_out for verdict in verdicts.values())


def test_cosines_are_those_with_the_mean_direction_of_the_others() -> None:
    """Of the first, (0, 1) and (-1, 0) have the mean (-1/2, 1/2); lengths do not count."""
    cosines = cosines_with_others({0: (5, 0), 1: (0, 1), 2: (-100, 0)})
    assert cosines == pytest.approx({0: -math.sqrt(0.5), 1: None, 2: -math.sqrt(0.5)})
    assert cosines_with_others({0: (1, 0), 1: (0, 0), 2: (1, 0)})[1] is None


def test_a_worker_that_points_the_other_way_is_left_out_however_long() -> None:
    for length in (0.2, 1, 9):
        vectors = {worker: (1.0, 0.1 * worker) for worker in range(4)} | {4: (-length, 0.0)}
        verdicts = Gate(gate=True).judge(vectors)
        assert [worker for worker, verdict in verdicts.items() if verdict.left_out] == [4]
        cosine = verdicts[4].cosine
        assert cosine is not None
        assert cosine < -0.9
        assert not any(verdict.left_out for verdict in Gate(gate_cosine=-1).judge(vectors).values())


@pytest.mark.parametrize(
    "vectors",
    [
        {0: (1, 0), 1: (-100, 0)},  # Nobody knows which of two is wrong.
        {0: (1, 0), 1: (1, 0), 2: (-1, 0), 3: (-1, 0)},  # Nor of two halves.
        {0: (0, 0), 1: (0, 0), 2: (1, 0)},  # The median is 0: most have not moved.
        {0: (1, 0), 1: (0, 1), 2: (0, -1), 3: (1, 0)},
    ],
)
def test_the_gate_leaves_in_what_it_cannot_judge(vectors: dict[int, tuple[float, float]]) -> None:
    verdicts = Gate(gate=True).judge(vectors)
    assert verdicts.keys() == vectors.keys()
    assert not any(verdict.left_out for verdict in verdicts.values())


def test_of_two_workers_nothing_is_measured() -> None:
    assert Gate(gate=True).judge({0: (1.0,), 4: (2.0,)}) == {0: Verdict(), 4: Verdict()}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gate_factor": 1.0}, "gate_factor must be > 1, got 1.0"),
        ({"gate_cosine": 0.1}, r"gate_cosine must be in \[-1, 0\), got 0.1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Gate(**settings)  # type: ignore[arg-type]


def test_limits_of_a_gate_that_is_off_are_said() -> None:
    for gate, unused in [
        (Gate(), False),
        (Gate(gate_factor=5), True),
        (Gate(gate=True, gate_factor=5), False),
    ]:
        assert ("change nothing without outer.gate" in gate.unused(4)) is unused


def test_a_worker_that_is_left_out_is_named() -> None:
    found = {"syncs_left_out": 1, "relative_norm": 104.0, "cosine_with_others": None}
    rows = [{"worker": 4, "trainer": 0, "syncs_left_out": 0}, {"worker": 5, "trainer": 0} | found]
    record = {"round": 1, "workers": rows}
    (sign,) = Gate.signs(record)
    assert (sign.kind, sign.trainer, sign.since) == ("worker 5 left out", 0, 1)
    assert sign.seen.endswith("is 104 times the median of the workers that it is compared with")
    (event,) = Gate.events(record)
    assert event.startswith("worker 5 of trainer 0 was left out of 1 sync, ")
    assert event.endswith("norm 104 times the median, cosine -")


def test_it_may_be_switched_on_when_a_run_is_resumed() -> None:
    assert {"outer.gate", "outer.gate_factor", "outer.gate_cosine"} <= {*changeable()}
