"""Shows when a run was interrupted and continued, and what that has cost."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from adloco.report.readable import TIMES, readable
from adloco.report.table import Table, table_by
from adloco.run.starts import Start, failure_cost

WORDS = {
    "resume": "resumed",
    "regroup": "ranks regrouped",
    "join": "ranks joined",
    "rewind": "taken back",
}
"""Kinds of starts after the first, and of rewinds, in words."""


def interruption_cards(starts: Sequence[Start], seconds: float) -> list[tuple[str, str]]:
    """Cards with a run's losses at its interruptions; none if it lost nothing.

    seconds: Of training that counts.
    """
    cost = failure_cost(starts, seconds)
    cards = [
        ("interruptions", f"{cost['interruptions']:,}"),
        ("tokens repeated", f"{cost['tokens_repeated']:,}"),
        ("time lost", readable(cost["seconds_lost"], TIMES)),
        ("goodput", f"{cost['goodput']:.1%}"),
    ]
    return cards if cost["interruptions"] else []


def interruption_table(starts: Sequence[Start]) -> Table:
    """A table of the starts after the first, and of rewinds."""
    columns: dict[str, Callable[[Start], str]] = {
        "start": _what,
        "time (UTC)": lambda start: f"{datetime.fromtimestamp(start.time, UTC):%Y-%m-%d %H:%M:%S}",
        "after round": lambda start: f"{start.round:,}",
        "tokens repeated": lambda start: f"{start.tokens_repeated:,}",
        "time repeated": lambda start: readable(start.seconds_repeated, TIMES),
        "time down": lambda start: readable(start.seconds_down, TIMES),
    }
    after = [start for start in starts if start.kind in WORDS]
    note = (
        "Time repeated is what rounds that are trained again took the first time. Time down is "
        "the rest of the time in which nothing that counts was trained: lost after a failure, a "
        "pause after a stop. Goodput is the time that counts, divided by that time plus the time "
        "lost."
    )
    return table_by("Interruptions", note, columns, after)


def _what(start: Start) -> str:
    cause = "failure" if start.failed else "stop"
    return WORDS[start.kind] + ("" if start.kind == "join" else f" after a {cause}")
