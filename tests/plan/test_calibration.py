"""Fits of the time of a round, against constants that are known."""

import csv
import math
import random
from pathlib import Path

import numpy as np
import pytest

from adloco.cli.main import main
from adloco.plan.calibration import calibrate, predict
from adloco.plan.measured_rows import Measure, Row, Rows, read_rows

H = (1, 2, 4, 8, 16, 32, 64, 128)
BANDWIDTHS = (50e6, 100e6, 200e6, 500e6, 1e9, 2e9, 5e9)
GROUP = ("diloco", 4.0, 1e9)
MEASURED, OVERLAPPED = (
    Path(__file__).parents[2] / "benchmarks" / f"plan_{name}.csv" for name in ("links", "overlap")
)


def rows(measure: Measure, value: dict[tuple[float, float], float]) -> Rows:
    made = [
        Row(group=GROUP, sync_every=steps, bits_per_second=bits, value=found)
        for (steps, bits), found in value.items()
    ]
    return Rows(rows=made, measure=measure, cells=[])


def grid(time: object) -> dict[tuple[float, float], float]:
    assert callable(time)
    return {(steps, bits): time(steps, bits) for steps in H for bits in BANDWIDTHS}


def test_two_constants_by_hand() -> None:
    """A step of 2 s, 3 s of latency, 8 Gbit: 10 steps on 1 Gbit/s take 20 + 3 + 8 = 31 s."""
    exact = grid(lambda steps, bits: 2 * steps + 3 + 8e9 / bits)
    assert exact[1, 1e9] == 13
    found = calibrate(rows("round_seconds", exact))[GROUP]
    assert found.constants.terms == pytest.approx({"overhead": 2, "latency": 3, "volume": 8e9})
    row = Row(group=GROUP, sync_every=10, bits_per_second=1e9)
    assert found.constants.value(row) == pytest.approx(31)
    assert predict({GROUP: found}, [row]) == [pytest.approx(20 / 31)]
    assert found.held_out_steps and found.held_out_steps.worst < 1e-9

    # The same by utilisations: constants in units of a step.
    ratios = {key: 2 * key[0] / seconds for key, seconds in exact.items()}
    by_ratio = calibrate(rows("compute_utilisation", ratios))[GROUP]
    assert by_ratio.constants.terms == pytest.approx({"latency": 1.5, "volume": 4e9})
    assert predict({GROUP: by_ratio}, [row]) == [pytest.approx(20 / 31)]


def test_free_links_leave_computation() -> None:
    found = calibrate(rows("compute_utilisation", grid(lambda steps, bits: 1.0)))[GROUP]
    assert found.constants.utilisation(Row(group=GROUP, sync_every=1, bits_per_second=1.0)) == 1.0


def test_what_was_left_out_is_predicted_within_the_noise() -> None:
    """Links whose efficiency falls with their speed, waiting for the slowest of four workers, and
    3% of noise: two values of H and two bandwidths are not in the fit.
    """
    rng = random.Random(0)

    def utilisation(steps: float, bits: float) -> float:
        effective = bits / (1 + (bits / 3e9) ** 0.6)
        seconds = 0.4 * steps + 0.15 + 6e9 / effective + 0.05 * math.sqrt(steps)
        return min(1.0, 0.4 * steps / seconds * math.exp(rng.gauss(0, 0.03)))

    whole = grid(utilisation)
    left_out = {key for key in whole if key[0] in (8, 64) or key[1] in (200e6, 2e9)}
    fit = {key: value for key, value in whole.items() if key not in left_out}
    found = calibrate(rows("compute_utilisation", fit))
    wanted = [Row(group=GROUP, sync_every=key[0], bits_per_second=key[1]) for key in left_out]
    errors = [
        abs(prediction / whole[key] - 1)
        for key, prediction in zip(left_out, predict(found, wanted), strict=True)
    ]
    assert np.median(errors) <= 0.05 and max(errors) <= 0.15


def written(path: Path, lines: list[str]) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


HEADER = "method,workers,parameters,sync_every,bandwidth_bits_per_second"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ROWS.csv keeps its columns and order, and has the utilisation filled in.

    The measurements are as spreadsheets write them: behind a byte order mark, names with spaces.
    """
    lines = [f"diloco,4,1e9,{h},{b},{h / (h + 1.5 + 4e9 / b)}" for h in H for b in BANDWIDTHS]
    header = f"{HEADER},compute_utilisation".replace(",", ", ")
    measured = written(tmp_path / "m.csv", [f"\ufeff{header}", *lines])
    rows = ["diloco,4,1000000000,10,1e9,mine", "diloco,4,1e9,100,5e7,,too many"]
    wanted, out = written(tmp_path / "r.csv", [f"{HEADER},note", *rows]), tmp_path / "out.csv"
    assert main(["plan", "--measured", measured, "--predict", wanted, "--to", str(out)]) == 0
    found = list(csv.DictReader(out.read_text().splitlines()))
    assert [float(row["compute_utilisation"]) for row in found] == [
        pytest.approx(10 / 15.5, rel=1e-5),
        pytest.approx(100 / 181.5, rel=1e-5),
    ]
    assert [row["note"] for row in found] == ["mine", ""]
    said = capsys.readouterr().out
    assert "diloco, 4 workers, 1e+09 parameters, 56 rounds" in said
    assert "constants (steps): latency 1.5, volume 4e+09" in said
    assert "each bandwidth, left out" in said


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["method,workers", "a,1"], "it lacks parameters, sync_every, bandwidth_bits_per_second"),
        ([HEADER, "a,1,1,1,1"], "it lacks compute_utilisation and round_seconds"),
        ([f"{HEADER},round_seconds"], "has no rows below its header"),
        ([f"{HEADER},round_seconds", "a,2,9,1,1e9,3"], "needs at least 3 measured rows"),
        (
            [f"{HEADER},round_seconds", "a,2,9,1,-5,3"],
            "line 2: bandwidth_bits_per_second must be a number > 0, got '-5'",
        ),
        (
            [f"{HEADER},compute_utilisation", "a,2,9,1,1gbit,0.5"],
            "line 2: bandwidth_bits_per_second must be a number > 0, got '1gbit'",
        ),
        (
            [f"{HEADER},compute_utilisation", "a,2,9,1,1e9,50"],
            "line 2: compute_utilisation must be > 0 and <= 1, got 50",
        ),
    ],
)
def test_bad_files(
    lines: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--measured", written(tmp_path / "m.csv", lines)]) == 2
    assert message in capsys.readouterr().err


def test_nothing_is_written_of_rows_that_were_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = written(
        tmp_path / "m.csv",
        [f"{HEADER},round_seconds", *(f"a,2,9,{h},1e9,{h + 1}" for h in (1, 2, 4))],
    )
    wanted, out = written(tmp_path / "r.csv", [HEADER, "b,2,9,1,1e9"]), tmp_path / "out.csv"
    assert main(["plan", "--measured", measured, "--predict", wanted, "--to", str(out)]) == 2
    assert "nothing was measured of b, 2 workers, 9 parameters" in capsys.readouterr().err
    assert main(["plan", "--measured", measured, "--predict", wanted]) == 2
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == []


def test_measured_rows_are_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{HEADER},round_seconds", *(f"a,2,9,{h},1e9,{h + 1}" for h in (1, 2, 4))]
    measured = written(tmp_path / "m.csv", rows)
    before = Path(measured).read_text()
    assert main(["plan", "--measured", measured, "--predict", measured, "--to", measured]) == 2
    assert "m.csv would replace what was measured" in capsys.readouterr().err
    assert Path(measured).read_text() == before


def test_two_bandwidths_tell_no_inefficiency_and_more_tell_every_constant() -> None:
    """A transfer that goes with 1 / sqrt(B) fits two bandwidths as well as one with 1 / B. More
    bandwidths tell all five constants.
    """
    every = {"overhead": 0.08, "latency": 0.3, "volume": 2e7}
    every |= {"inefficiency": 500, "stragglers": 0.05}
    exact = {
        (h, bits): 0.08 * h + 0.3 + 2e7 / bits + 500 / math.sqrt(bits) + 0.05 * math.sqrt(h)
        for h in (5, 10, 20, 40)
        for bits in BANDWIDTHS
    }
    two = {key: value for key, value in exact.items() if key[1] in BANDWIDTHS[:2]}
    assert "inefficiency" not in calibrate(rows("round_seconds", two))[GROUP].constants.terms
    terms = calibrate(rows("round_seconds", exact))[GROUP].constants.terms
    assert terms == pytest.approx(every)


@pytest.mark.parametrize("column", ["sync_every", "bits_per_second"])
def test_rounds_that_we_measured_are_predicted(column: str) -> None:
    """Those of each H, and of each bandwidth, by the others of their method."""
    measured = [
        Row(
            group=(cell["method"], 2.0, 1.0),
            sync_every=float(cell["sync_every"]),
            bits_per_second=float(cell["bandwidth_bits_per_second"]),
            value=float(cell["round_seconds"]),
        )
        for cell in csv.DictReader(MEASURED.read_text().splitlines())
        if cell["method"] != "ddp" and cell["bandwidth_bits_per_second"] != "0"
    ]
    errors = []
    for key in {(row.group, getattr(row, column)) for row in measured}:
        group, left_out = key
        others = [
            row for row in measured if row.group == group and getattr(row, column) != left_out
        ]
        fit = calibrate(Rows(rows=others, measure="round_seconds", cells=[]))[group].constants
        errors += [
            abs(fit.value(row) / row.value - 1)
            for row in measured
            if (row.group, getattr(row, column)) == key and row.value
        ]
    assert len(errors) == 24
    assert np.median(errors) < 0.03 and max(errors) < 0.11
    assert sum(error > 0.1 for error in errors) <= 1


def test_overlapped_rounds_that_we_measured_are_predicted() -> None:
    """Fragments were in flight for half of the steps of a round, which is what the fit finds."""
    for (method, *_), found in calibrate(read_rows(OVERLAPPED, measured=True)).items():
        assert found.constants.hidden == (0.5 if method == "diloco-fp32-overlap" else 0.0)
        for errors in (found.held_out_steps, found.held_out_bandwidths):
            assert errors and errors.median < 0.06 and errors.worst < 0.25


def test_a_ceiling_of_the_bandwidth() -> None:
    """Transfers get no faster from 1.2 Gbit/s on; what lies above and below is predicted."""
    every, bandwidths = (1, 8, 64), (50e6, 200e6, 500e6, 1e9, 2e9, 5e9)

    def utilisation(steps: float, bits: float) -> float:
        return steps / (steps + 0.5 + 6e9 / min(bits, 1.2e9))

    rows = [
        Row(group=GROUP, sync_every=h, bits_per_second=b, value=utilisation(h, b))
        for h in every
        for b in bandwidths
    ]
    (found,) = calibrate(Rows(rows=rows, measure="compute_utilisation", cells=[])).values()
    assert 1e9 < found.constants.ceiling < 1.5e9
    assert found.held_out_steps is not None and found.held_out_steps.worst < 0.01
    new = Row(group=GROUP, sync_every=16, bits_per_second=1e10)
    assert found.constants.utilisation(new) == pytest.approx(utilisation(16, 1e10), rel=0.05)


@pytest.mark.parametrize("measure", ["round_seconds", "compute_utilisation"])
@pytest.mark.parametrize("hidden", [0.25, 1.0])
def test_transfers_that_steps_hide(hidden: float, measure: Measure) -> None:
    """A larger H hides more of them: 6 Gbit take 3.2 of 6 s on 1 Gbit/s behind a quarter of 28
    steps.
    """

    def seconds(steps: float, bits: float) -> float:
        return 0.4 * steps + 0.2 + max(0.0, 6e9 / bits - hidden * 0.4 * steps)

    exact = grid(seconds)
    if measure == "compute_utilisation":
        exact = {(steps, bits): 0.4 * steps / value for (steps, bits), value in exact.items()}
    found = calibrate(rows(measure, exact))[GROUP]
    assert found.constants.hidden == hidden
    assert found.held_out_steps and found.held_out_steps.worst < 1e-6
    assert found.held_out_bandwidths and found.held_out_bandwidths.worst < 1e-6
    row = Row(group=GROUP, sync_every=28, bits_per_second=1e9)
    assert found.constants.utilisation(row) == pytest.approx(11.2 / seconds(28, 1e9))


@pytest.mark.parametrize("every", [(1, 2, 4, 8, 16, 32, 64, 128), (1, 4, 16, 64)])
@pytest.mark.parametrize("measure", ["round_seconds", "compute_utilisation"])
def test_few_late_transfers_are_found(every: tuple[int, ...], measure: Measure) -> None:
    """Nothing but steps and transfers; where a first guess finds nothing late, others do."""
    by_ratio = measure == "compute_utilisation"
    exact = {}
    for h in every:
        for bits in (10e6, 30e6, 100e6, 300e6):
            seconds = 0.5 * h + max(0.0, 20e6 / bits - 0.25 * h)
            exact[h, bits] = 0.5 * h / seconds if by_ratio else seconds
    found = calibrate(rows(measure, exact))[GROUP]
    assert found.constants.hidden == 0.5
    assert found.fitted.worst < 1e-6


def test_from_one_h_nothing_is_hidden() -> None:
    exact = {(4, 2e6 * 2**n): 2 + 0.3 + max(0.0, 20e6 / (2e6 * 2**n) - 1) for n in range(7)}
    assert calibrate(rows("round_seconds", exact))[GROUP].constants.hidden == 0


def test_of_one_h_and_one_bandwidth_nothing_can_be_left_out() -> None:
    row = Row(group=GROUP, sync_every=4, bits_per_second=1e9, value=3.0)
    found = calibrate(Rows(rows=[row] * 3, measure="round_seconds", cells=[]))[GROUP]
    assert found.constants.value(row) == pytest.approx(3)
    assert (found.held_out_steps, found.held_out_bandwidths) == (None, None)
