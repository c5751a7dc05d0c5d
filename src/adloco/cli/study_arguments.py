"""Arguments that the commands over many runs share."""

from adloco.cli.arguments import Parser
from adloco.errors import require


def add_study_arguments(parser: Parser, *, seeds: int) -> None:
    """Add what every command over many runs takes; `seeds` is the default of --seeds."""
    parser.add_argument(
        "--seeds",
        type=int,
        default=seeds,
        metavar="N",
        help="runs of each arm (default: %(default)s)",
    )
    parser.add_argument(
        "--parallel", type=int, default=1, metavar="N", help="runs at a time (default: 1)"
    )
    parser.add_argument(
        "--targets",
        default="",
        metavar="LOSS,...",
        help="losses to reach (default: the highest final loss of any run)",
    )
    parser.add_argument(
        "--link",
        action="append",
        default=[],
        metavar="BANDWIDTH,LATENCY",
        help="model the time on a link, for instance 100mbit,20ms; may be given again",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="compare runs with unequal data, model or budget, and mark it everywhere",
    )


def parse_targets(text: str) -> list[float]:
    """The losses in --targets.

    Raises:
        ValueError: One of them is no positive number.
    """
    try:
        targets = [float(word) for word in text.split(",") if word.strip()]
    except ValueError as error:
        raise ValueError(f"--targets must be numbers as in 1.6,1.5, got {text!r}") from error
    require(all(target > 0 for target in targets), f"--targets must be > 0, got {text!r}")
    return targets
