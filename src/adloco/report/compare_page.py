"""compare.html of a comparison, its tables, and all files beside it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from adloco.metrics import Metric
from adloco.report.compare_files import to_csv, to_json
from adloco.report.curves import Chart, Curve, Panel
from adloco.report.html import embedded, write_page
from adloco.report.table import Cell, Table, table_of
from adloco.run.json_files import write_json
from adloco.study.comparison import Comparison, Quantity
from adloco.study.statistics import Difference, Spread
from adloco.whole_file import write_text


def tables(comparison: Comparison) -> list[Table]:
    """The final values, what each arm needs for each target, and the differences."""
    loss, warning = comparison.loss, comparison.warning
    spread = "Mean over seeds; below it the lowest and the highest."
    paired = (
        "First minus second, paired by seed, with the 95% interval of Student's t. With one seed "
        "there is no interval."
    )
    needed = [
        _table_of_arms(
            comparison,
            f"To {loss.label} {target:g}",
            f"{spread} On the line between evaluations. -: not reached, or below it at the first "
            f"evaluation already, so that the place is not known.{warning}",
            comparison.needed(target),
        )
        for target in comparison.targets
    ]
    differing = [
        _table_of_pairs(
            comparison,
            f"Differences of what {loss.label} {target:g} needs",
            f"{paired} A seed with which one of the two does not reach it is left out, which "
            f"favours that one.{warning}",
            comparison.needed(target),
            "needs less",
        )
        for target in comparison.targets
    ]
    at_end = [*comparison.finals, *comparison.totals]
    finals = _table_of_pairs(
        comparison,
        "Differences of the final loss",
        f"{paired}{warning}",
        comparison.finals[:1],
        "is lower",
    )
    return [
        _table_of_arms(comparison, "At the end", f"{spread}{warning}", at_end),
        *needed,
        *(table for table in (finals, *differing) if table.rows),
    ]


def _table_of_arms(
    comparison: Comparison, title: str, note: str, quantities: Sequence[Quantity]
) -> Table:
    """A row for each arm."""
    rows = [
        [
            Cell(arm),
            *(_cell(each.metric, comparison.spread(each, arm), len(runs)) for each in quantities),
        ]
        for arm, runs in comparison.arms.items()
    ]
    columns = ["arm", *(each.metric.axis for each in quantities)]
    return Table(title=title, note=note, columns=columns, rows=rows)


def _table_of_pairs(
    comparison: Comparison, title: str, note: str, quantities: Sequence[Quantity], better: str
) -> Table:
    """A row for each pair of arms.

    better: What is said of the arm with the lower number, if it clearly is.
    """
    rows = [
        [
            Cell(f"{row[0].first} - {row[0].second}"),
            Cell(str(row[0].seeds)),
            *(
                Cell(_interval(each.metric, difference), _reading(difference, better))
                for each, difference in zip(quantities, row, strict=True)
            ),
        ]
        for row in zip(*map(comparison.differences, quantities), strict=True)
    ]
    columns = ["pair", "seeds", *(each.metric.axis for each in quantities)]
    return Table(title=title, note=note, columns=columns, rows=rows)


def write_comparison(
    comparison: Comparison,
    folder: Path,
    title: str,
    draw: Callable[[Comparison], list[Path]] = lambda comparison: [],
) -> Path:
    """Write all files of a comparison, with pictures that `draw` makes; return the page's path."""
    from adloco.report.pictures import draw_comparison  # Late, for matplotlib.

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "compare.json", to_json(comparison))
    write_text(folder / "compare.csv", to_csv(comparison))
    chart = comparison_chart(comparison)
    draw_comparison(chart, comparison.statement, folder)
    curves = Panel(title="", caption=f"A line is one seed.{comparison.warning}", charts=[chart])
    content = _content(comparison, draw(comparison), title)
    return write_page(folder / "compare.html", [curves], content)


def comparison_chart(comparison: Comparison) -> Chart:
    """The measures of all runs against every axis, with a line per seed."""
    curves = [
        Curve(name=arm, detail=f"seed {run.run.seed}", axes=run.axes, measures=run.measures)
        for arm, runs in comparison.arms.items()
        for run in runs
    ]
    return Chart(axes=comparison.axes, measures=comparison.measures, curves=curves)


def _content(comparison: Comparison, further: Sequence[Path], title: str) -> dict[str, Any]:
    runs = [run for found in comparison.arms.values() for run in found]
    return {
        "title": title,
        "statement": comparison.statement.removesuffix(comparison.warning),
        "differing": comparison.differing,
        "warning": comparison.warning.strip(),
        "problems": [
            f"{run.run.arm}, seed {run.run.seed} failed: {run.problem}"
            for run in runs
            if run.problem
        ],
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


def _interval(metric: Metric, difference: Difference) -> str:
    def number(value: float) -> str:
        # Of few syncs the tenths count.
        few = metric.whole and abs(difference.mean) < 100
        return f"{value:,.1f}" if few else _number(metric, value)

    sign = "+" if difference.mean > 0 else ""
    half = "" if difference.half_width is None else f" ± {number(difference.half_width)}"
    return f"{sign}{number(difference.mean)}{half}"


def _reading(difference: Difference, better: str) -> str:
    """Names the arm that clearly has the lower number, or why none is named."""
    if difference.half_width is None:
        return "one seed: no claim"
    if not difference.clear:
        return "no clear difference"
    return f"{difference.first if difference.mean < 0 else difference.second} {better}"


def _cell(metric: Metric, spread: Spread, of: int) -> Cell:
    """The mean with its range.

    of: Seeds that there are; those without the number are named.
    """
    if spread.mean is None or spread.lowest is None or spread.highest is None:
        return Cell("-")
    missing = f"{spread.count} of {of} seeds" if spread.count < of else ""
    mean, lowest, highest = (
        _number(metric, value) for value in (spread.mean, spread.lowest, spread.highest)
    )
    between = "" if lowest == highest else f"{lowest} to {highest}"
    return Cell(f"{mean} ({missing})" if missing else mean, between)


def _number(metric: Metric, value: float) -> str:
    """A mean over seeds: that of a count is shown as a whole number."""
    return metric.number(round(value) if metric.whole else value)
