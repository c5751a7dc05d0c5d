"""Text of `adloco plan --measured`: a fit to measured rounds, and predictions of rounds."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from adloco.cli.terminal import open_console, table_of
from adloco.errors import require

if TYPE_CHECKING:
    from adloco.cli.plan import Plan


def show_calibration(arguments: "Plan", measured: Path) -> int:
    """Fit the rounds in --measured, show the errors, and write those of --predict to --to."""
    from adloco.plan.calibration import calibrate, describe, predict
    from adloco.plan.measured_rows import read_rows, write_rows

    require(
        (arguments.predict is None) == (arguments.to is None),
        "--predict ROWS.csv and --to OUT.csv belong together; give both or neither",
    )
    calibrations = calibrate(read_rows(measured, measured=True))
    wanted = read_rows(arguments.predict, measured=False) if arguments.predict else None
    predicted = predict(calibrations, wanted.rows) if wanted else []

    console = open_console()
    for group, found in calibrations.items():
        console.print(f"{describe(group)}, {found.fitted.count} rounds", soft_wrap=True)
        unit = "s" if found.constants.measure == "round_seconds" else "steps"
        terms = {name: value for name, value in found.constants.terms.items() if value}
        said = [f"{name} {value:.4g}" for name, value in terms.items()]
        if found.constants.hidden:
            said.append(f"transfers hidden behind {found.constants.hidden:.0%} of the steps")
        if math.isfinite(found.constants.ceiling):
            said.append(f"no faster from {found.constants.ceiling / 1e6:.4g} Mbit/s on")
        console.print(f"  constants ({unit}): {', '.join(said) or 'none'}", soft_wrap=True)
        table = table_of("error of", "median", "worst", "rounds", names=1)
        errors = {
            "the fit": found.fitted,
            "each H, left out of the fit": found.held_out_steps,
            "each bandwidth, left out": found.held_out_bandwidths,
        }
        for name, each in errors.items():
            numbers = each and (f"{each.median:.1%}", f"{each.worst:.1%}", str(each.count))
            table.add_row(name, *(numbers or "---"))
        console.print(table)
    if wanted and arguments.to:
        write_rows(arguments.to, wanted, predicted)
        console.print(f"{len(predicted)} rounds predicted in {arguments.to}", soft_wrap=True)
    return 0
