"""What `adloco plan --measured` does: a fit to measured rounds, and rounds that it predicts."""

import math
from argparse import Namespace
from typing import TYPE_CHECKING

from rich.table import Table

from adloco.cli.terminal import open_console
from adloco.errors import require

if TYPE_CHECKING:
    from adloco.plan.calibration import Errors


def show_calibration(arguments: Namespace) -> int:
    """Fit the rounds in --measured, show the errors, and write those of --predict to --to."""
    from adloco.plan.calibration import calibrate, describe, predict
    from adloco.plan.measured_rows import read_rows, write_rows

    require(
        (arguments.predict is None) == (arguments.to is None),
        "--predict ROWS.csv and --to OUT.csv belong together; give both or neither",
    )
    calibrations = calibrate(read_rows(arguments.measured, measured=True))
    wanted = read_rows(arguments.predict, measured=False) if arguments.predict else None
    predicted = predict(calibrations, wanted.rows) if wanted else []

    console = open_console()
    for group, found in calibrations.items():
        console.print(f"{describe(group)}, {found.fitted.count} rounds", soft_wrap=True)
        unit = "s" if found.constants.measure == "round_seconds" else "steps"
        terms = {name: value for name, value in found.constants.terms.items() if value}
        said = [f"{name} {value:.4g}" for name, value in terms.items()]
        if math.isfinite(found.constants.ceiling):
            said.append(f"no faster from {found.constants.ceiling / 1e6:.4g} Mbit/s on")
        console.print(f"  constants ({unit}): {', '.join(said) or 'none'}", soft_wrap=True)
        table = Table(box=None)
        for column in ("error of", "median", "worst", "rounds"):
            table.add_column(column, justify="left" if column == "error of" else "right")
        _add(table, "the fit", found.fitted)
        _add(table, "each H, left out of the fit", found.held_out_steps)
        _add(table, "each bandwidth, left out", found.held_out_bandwidths)
        console.print(table)
    if wanted:
        write_rows(arguments.to, wanted, predicted)
        console.print(f"{len(predicted)} rounds predicted in {arguments.to}", soft_wrap=True)
    return 0


def _add(table: Table, name: str, errors: "Errors | None") -> None:
    if errors is None:
        table.add_row(name, "-", "-", "-")
    else:
        table.add_row(name, f"{errors.median:.1%}", f"{errors.worst:.1%}", str(errors.count))
