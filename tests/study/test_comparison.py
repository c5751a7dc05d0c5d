"""What a comparison says of curves, by hand."""

from pathlib import Path

from adloco.metrics import NATS, ROUND, Metric
from adloco.report.compare_files import to_csv, to_json
from adloco.study.arms import plan_runs
from adloco.study.comparison import Comparison, RunCurves


def comparison(problem: str = "") -> Comparison:
    """Two seeds of an arm that fall from 4 to 2 and to 1 over 100 tokens; the second may have a
    problem.
    """
    runs = plan_runs(["diloco"], [], 2, Path("study"))
    curves = [
        RunCurves(
            run=run,
            axes={"tokens": [0.0, 100.0]},
            measures={"val_loss": [4.0, last]},
            corpus="",
            problem=text,
        )
        for run, last, text in zip(runs, (2.0, 1.0), ("", problem), strict=True)
    ]
    return Comparison(
        arms={"diloco": curves},
        axes={"tokens": ROUND["tokens"]},
        measures=(Metric("val_loss", "validation loss", NATS),),
        targets=(2.5,),
        replicas=2,
        equal=("data",),
        unequal=(),
    )


def test_means_over_seeds() -> None:
    found = comparison()
    assert found.finals("diloco", "val_loss").mean == 1.5
    # From 4 to 2 it passes 2.5 after 75 tokens, from 4 to 1 after 50.
    assert found.to_target("diloco", "tokens", 2.5).mean == 62.5


def test_a_run_that_did_not_end_enters_no_number_but_its_curve() -> None:
    found = comparison(problem="loss is nan")
    assert found.finals("diloco", "val_loss").mean == 2.0
    assert found.totals("diloco", "tokens").count == 1
    assert found.to_target("diloco", "tokens", 2.5).mean == 75
    rows = to_csv(found).splitlines()
    assert rows[2].startswith("diloco,1,") and rows[2].endswith("loss is nan,,,")
    (arm,) = to_json(found)["arms"]
    assert arm["runs"][1]["measures"]["val_loss"] == [4.0, 1.0]
