"""compare.html of a comparison, its tables, and all files beside it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from adloco.metrics import Metric
from adloco.report.compare_files import differences_csv, to_csv, to_json
from adloco.report.curves import Chart, Curve, Panel, charts_content
from adloco.report.html import embedded, write_page
from adloco.report.table import Cell, Table, table_of
from adloco.run.records import write_json
from adloco.study.comparison import Comparison
from adloco.study.statistics import Difference, Spread
from adloco.whole_file import write_text


def tables(comparison: Comparison) -> list[Table]:
    """The final values, what each arm needs for each target, and the differences."""
    spread = "Mean over seeds; below it the lowest and the highest."
    axes = comparison.axes
    return [
        Table(
            title="At the end",
            note=f"{spread}{comparison.warning}",
            columns=[
                "arm",
                *(metric.axis for metric in comparison.measures),
                *(metric.axis for metric in axes.values()),
            ],
            rows=[
                [
                    Cell(arm),
                    *(
                        _cell(metric, comparison.finals(arm, metric.name))
                        for metric in comparison.measures
                    ),
                    *(_cell(axes[axis], comparison.totals(arm, axis)) for axis in axes),
                ]
                for arm in comparison.arms
            ],
        ),
        *(
            Table(
                title=f"To {comparison.loss.label} {target:g}",
                note=f"{spread} On the line between evaluations. -: not reached."
                f"{comparison.warning}",
                columns=["arm", *(metric.axis for metric in axes.values())],
                rows=[
                    [
                        Cell(arm),
                        *(
                            _cell(
                                axes[axis],
                                comparison.to_target(arm, axis, target),
                                of=len(comparison.arms[arm]),
                            )
                            for axis in axes
                        ),
                    ]
                    for arm in comparison.arms
                ],
            )
            for target in comparison.targets
        ),
        *_difference_tables(comparison),
    ]


def write_comparison(
    comparison: Comparison,
    folder: Path,
    title: str,
    draw: Callable[[Comparison], list[Path]] = lambda comparison: [],
) -> Path:
    """Write the files for programs, the PNGs and compare.html; return the page's path.

    Args:
        comparison: What to write.
        folder: Where to write it.
        title: Heading of the page.
        draw: Draws further pictures, which the page shows.
    """
    from adloco.report.pictures import draw_comparison  # Late, for matplotlib.

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "compare.json", to_json(comparison))
    write_text(folder / "compare.csv", to_csv(comparison))
    write_text(folder / "compare_differences.csv", differences_csv(comparison))
    chart = comparison_chart(comparison)
    images = draw_comparison(chart, comparison.statement, folder)
    path = folder / "compare.html"
    write_page(path, "compare.html", _content(comparison, chart, images, draw(comparison), title))
    return path


def comparison_chart(comparison: Comparison) -> Chart:
    """The measures of all runs against every axis, with a line per seed."""
    curves = [
        Curve(name=arm, detail=f"seed {run.run.seed}", axes=run.axes, measures=run.measures)
        for arm, runs in comparison.arms.items()
        for run in runs
    ]
    return Chart(axes=comparison.axes, measures=comparison.measures, curves=curves)


def _content(
    comparison: Comparison,
    chart: Chart,
    images: Sequence[Path],
    further: Sequence[Path],
    title: str,
) -> dict[str, Any]:
    runs = [run for found in comparison.arms.values() for run in found]
    curves = Panel(title="", caption=f"A line is one seed.{comparison.warning}", charts=[chart])
    return charts_content([curves]) | {
        "title": title,
        "statement": comparison.statement.removesuffix(comparison.warning),
        "warning": comparison.warning.strip(),
        "problems": [
            f"{run.run.arm}, seed {run.run.seed} did not end: {run.problem}"
            for run in runs
            if run.problem
        ],
        "images": [embedded(image) for image in images],
        "further": [embedded(image) for image in further],
        "tables": [
            *tables(comparison),
            table_of(
                "Runs",
                "",
                ["arm", "seed", "folder"],
                [(run.run.arm, run.run.seed, run.run.folder) for run in runs],
            ),
        ],
    }


def _difference_tables(comparison: Comparison) -> list[Table]:
    paired = (
        "First minus second, paired by seed, with the 95% interval of Student's t. With one seed "
        "there is no interval."
    )
    axes, loss = comparison.axes, comparison.loss
    found = [
        Table(
            title="Differences of the final loss",
            note=f"{paired}{comparison.warning}",
            columns=["pair", "seeds", loss.axis, "reading"],
            rows=[
                [
                    *_pair(difference),
                    Cell(_interval(loss, difference)),
                    Cell(_reading(difference)),
                ]
                for difference in comparison.final_differences()
            ],
        ),
        *(
            Table(
                title=f"Differences of what {loss.label} {target:g} needs",
                note=f"{paired} A seed with which one of the two does not reach it is left out, "
                f"which favours that one.{comparison.warning}",
                columns=["pair", "seeds", *(metric.axis for metric in axes.values())],
                rows=[
                    [
                        *_pair(row[0]),
                        *(
                            Cell(_interval(metric, difference), _needs_less(difference))
                            for metric, difference in zip(axes.values(), row, strict=True)
                        ),
                    ]
                    for row in zip(
                        *(comparison.differences_to_target(axis, target) for axis in axes),
                        strict=True,
                    )
                ],
            )
            for target in comparison.targets
        ),
    ]
    return [table for table in found if table.rows]


def _pair(difference: Difference) -> list[Cell]:
    return [Cell(f"{difference.first} - {difference.second}"), Cell(str(difference.seeds))]


def _interval(metric: Metric, difference: Difference) -> str:
    def number(value: float) -> str:
        # Of few syncs the tenths count.
        few = metric.whole and abs(difference.mean) < 100
        return f"{value:,.1f}" if few else _number(metric, value)

    sign = "+" if difference.mean > 0 else ""
    half = "" if difference.half_width is None else f" ± {number(difference.half_width)}"
    return f"{sign}{number(difference.mean)}{half}"


def _needs_less(difference: Difference) -> str:
    """The arm that clearly needs less; empty if none does."""
    less = difference.first if difference.mean < 0 else difference.second
    return f"{less} needs less" if difference.clear else ""


def _reading(difference: Difference) -> str:
    if difference.half_width is None:
        return "one seed: no claim"
    if not difference.clear:
        return "no clear difference"
    return f"{difference.first if difference.mean < 0 else difference.second} is lower"


def _cell(metric: Metric, spread: Spread, of: int = 0) -> Cell:
    """The mean with its range.

    Args:
        metric: Gives the format.
        spread: The numbers.
        of: Seeds that there are; those without the number are named. 0: not said.
    """
    if spread.mean is None or spread.lowest is None or spread.highest is None:
        return Cell("-")
    missing = f"{spread.count} of {of} seeds" if 0 < spread.count < of else ""
    mean, lowest, highest = (
        _number(metric, value) for value in (spread.mean, spread.lowest, spread.highest)
    )
    between = "" if lowest == highest else f"{lowest} to {highest}"
    return Cell(f"{mean} ({missing})" if missing else mean, between)


def _number(metric: Metric, value: float) -> str:
    """A mean over seeds: that of a count is shown as a whole number."""
    return metric.number(round(value) if metric.whole else value)
