"""plan.png: seconds to the target against bandwidth, with a line per method."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedFormatter, FixedLocator, NullLocator

from adloco.plan.cluster_plan import Plan
from adloco.plan.measured_rows import MeasuredPoint
from adloco.report.drawing import COLOURS, MARKS, plain, save_figure
from adloco.report.plan_curves import method_lines
from adloco.report.readable import RATES, TIMES, readable

TICKS = [
    (f"{count} {unit}", count * TIMES[unit])
    for unit, counts in {
        "s": (1, 10),
        "min": (1, 10),
        "h": (1, 3, 6),
        "d": (1, 3, 10, 30, 100),
    }.items()
    for count in counts
] + [(f"{count:g} y", count * TIMES["y"]) for count in (1, 10, 100, 1000)]
"""Times that y names."""


def draw_plan(plan: Plan, measured: Sequence[MeasuredPoint], path: Path) -> None:
    """Write the picture; both axes are logarithmic."""
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    axis = figure.subplots()
    colours: dict[str, str] = {}
    for name, line in method_lines(plan).items():
        colours[name] = COLOURS[len(colours) % len(COLOURS)]
        axis.plot(
            [bandwidth for bandwidth, _ in line],
            [one.seconds for _, one in line],
            color=colours[name],
            linewidth=2,
            label=name,
        )
    for name, colour in colours.items():
        points = [point for point in measured if point.method == name]
        axis.plot(
            [point.bandwidth for point in points],
            [point.seconds for point in points],
            "o",
            color=colour,
            markeredgecolor="black",
            label=f"{name}, measured" if points else None,
        )
    link, crossing = 8 * plan.cluster.link.bytes_per_second, plan.advice.crossing
    axis.axvline(link, color="black", linestyle="--", linewidth=1, label=_named("this link", link))
    if crossing:
        name = _named("data-parallel training is as fast from", crossing)
        axis.axvline(crossing, color=MARKS, linestyle=":", linewidth=1.5, label=name)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter(EngFormatter(unit="bit/s"))
    axis.yaxis.set_major_locator(FixedLocator([seconds for _, seconds in TICKS]))
    axis.yaxis.set_major_formatter(FixedFormatter([name for name, _ in TICKS]))
    axis.yaxis.set_minor_locator(NullLocator())
    # From the tick below all times to the tick above.
    low, high = axis.dataLim.intervaly
    axis.set_ylim(
        max((seconds for _, seconds in TICKS if seconds <= low), default=low),
        min((seconds for _, seconds in TICKS if seconds >= high), default=high),
    )
    axis.set_xlabel("bandwidth of the link between islands")
    axis.set_ylabel("time to the target")
    plain(axis)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(
        f"{plan.target}: each method with its best settings at each bandwidth",
        fontsize=11,
        wrap=True,
    )
    save_figure(figure, path)


def _named(what: str, bandwidth: float) -> str:
    return f"{what} {readable(bandwidth, RATES)}"
