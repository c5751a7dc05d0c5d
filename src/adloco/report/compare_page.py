"""compare.html, the pictures, compare.json and compare.csv of a comparison."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adloco.metrics import Metric
from adloco.report.compare_files import to_csv, to_json
from adloco.report.curves import Curve, curve_content
from adloco.report.html import embedded, write_page
from adloco.run.records import write_json
from adloco.study.comparison import Comparison
from adloco.study.statistics import Difference, Spread
from adloco.whole_file import write_text


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    detail: str = ""
    """A second, smaller line."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of a comparison, for the page and for the terminal."""

    title: str
    note: str
    columns: list[str]
    rows: list[list[Cell]]


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
    """Write compare.json, compare.csv, the PNGs and compare.html; return the page's path.

    Args:
        comparison: What to write.
        folder: Where to write it.
        title: Heading of the page.
        draw: Draws further pictures, which the page shows.
    """
    from adloco.report.compare_plots import draw_comparison  # Late, for matplotlib.

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "compare.json", to_json(comparison))
    write_text(folder / "compare.csv", to_csv(comparison))
    images = draw_comparison(comparison, folder)
    path = folder / "compare.html"
    write_page(path, "compare.html", _content(comparison, images, draw(comparison), title))
    return path


def _content(
    comparison: Comparison, images: Sequence[Path], further: Sequence[Path], title: str
) -> dict[str, Any]:
    runs = [run for found in comparison.arms.values() for run in found]
    return {
        "title": title,
        "statement": comparison.statement.removesuffix(comparison.warning),
        "warning": comparison.warning.strip(),
        "problems": [
            f"{run.run.arm}, seed {run.run.seed} did not end: {run.problem}"
            for run in runs
            if run.problem
        ],
        "curves": curve_content(
            comparison.axes,
            comparison.measures,
            [
                Curve(
                    name=run.run.arm,
                    detail=f"seed {run.run.seed}",
                    axes=run.axes,
                    measures=run.measures,
                )
                for run in runs
            ],
            f"A line is one seed.{comparison.warning}",
        ),
        "images": [embedded(image) for image in images],
        "further": [embedded(image) for image in further],
        "tables": tables(comparison),
        "runs": [
            {"arm": run.run.arm, "seed": run.run.seed, "folder": run.run.folder} for run in runs
        ],
    }


def _difference_tables(comparison: Comparison) -> list[Table]:
    found = comparison.differences()
    if not found:
        return []
    return [
        Table(
            title="Differences of the final loss",
            note="First minus second, paired by seed, with the 95% interval of Student's t. With "
            f"one seed there is no interval.{comparison.warning}",
            columns=["pair", comparison.loss.axis, "seeds", "reading"],
            rows=[
                [
                    Cell(f"{difference.first} - {difference.second}"),
                    Cell(_interval(difference)),
                    Cell(str(difference.seeds)),
                    Cell(_reading(difference)),
                ]
                for difference in found
            ],
        )
    ]


def _interval(difference: Difference) -> str:
    half = "" if difference.half_width is None else f" ± {difference.half_width:.4f}"
    return f"{difference.mean:+.4f}{half}"


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
        metric.number(round(value) if metric.whole else value)
        for value in (spread.mean, spread.lowest, spread.highest)
    )
    between = "" if lowest == highest else f"{lowest} to {highest}"
    return Cell(f"{mean} ({missing})" if missing else mean, between)
