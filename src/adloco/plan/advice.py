"""The advice that follows from predictions: which candidate, why, and from which bandwidth on
data-parallel training is as fast.
"""

import math
import operator
from collections.abc import Callable, Sequence

from adloco.distributed.wire.wire_format import bytes_per_value
from adloco.errors import require
from adloco.plan.prediction import Prediction

CLOSE = 1.05
"""Candidates that take at most so much longer than the fastest count as equally fast."""
FREE_BITS = 4.0
"""Bits a value from which on more of them did not lower a loss."""
DEPARTURES = (
    "has more inner steps between syncs",
    "sends fewer bits a value",
    "syncs in more fragments",
    "has fragments in flight for more steps",
)
"""How a candidate departs further from training that syncs in every step, by the numbers of
`_departure`."""
Predictor = Callable[[float], list[Prediction]]
"""Bandwidth in bits/s -> predictions on a link of that bandwidth."""
LOWEST, HIGHEST = 1e4, 1e13
"""Bandwidths in bits/s between which the crossing is searched."""


def by_method(predictions: Sequence[Prediction], within: float = CLOSE) -> dict[str, Prediction]:
    """The choice of each method, in the order of the methods."""
    of_name: dict[str, list[Prediction]] = {}
    for one in predictions:
        if one.reachable:
            of_name.setdefault(one.candidate.name, []).append(one)
    return {name: choose(found, within) for name, found in of_name.items()}


def choose(predictions: Sequence[Prediction], within: float = CLOSE) -> Prediction:
    """The candidate that departs least from plain training among those that are about as fast as
    the fastest: the lowest H, four bits a value or more (more gain nothing: docs/results.md), the
    fewest fragments and the least time in flight; of those alike, the one that sends least. If
    losses are predicted, none is chosen that another one beats in both loss and time.

    Raises:
        ValueError: No candidate reaches the target.
    """
    reachable = [found for found in predictions if found.reachable]
    require(
        bool(reachable),
        "no candidate reaches the target; give a higher --target-loss, or runs of other methods",
    )
    fastest = min(found.seconds for found in reachable)
    return min(
        (
            found
            for found in reachable
            if found.seconds <= within * fastest
            and not any(_beats(other, found) for other in reachable)
        ),
        key=lambda found: (*_departure(found), found.bytes_sent, found.seconds),
    )


def _beats(one: Prediction, other: Prediction) -> bool:
    """True if one is no slower and its predicted loss is lower, by more than rounding."""
    if one.loss is None or other.loss is None:
        return False
    return one.seconds <= other.seconds and one.loss < (1 - 1e-6) * other.loss


def _departure(found: Prediction) -> tuple[float, ...]:
    recipe = found.candidate.recipe
    if recipe.data_parallel or not recipe.syncs:
        return (0, -FREE_BITS, 1, 0)
    streaming = recipe.streaming
    bits = 8 * bytes_per_value(recipe.wire_format)
    return (recipe.mean_sync_every, -min(bits, FREE_BITS), streaming.fragments, streaming.tau)


def pareto(predictions: Sequence[Prediction]) -> list[Prediction]:
    """The predictions that no other beats in seconds, bytes, tokens and loss (if it is predicted)
    at once, by rising seconds; of equal ones the first.
    """

    def costs(one: Prediction) -> tuple[float, ...]:
        return (one.seconds, one.bytes_sent, one.tokens, one.loss or 0.0)

    front: list[Prediction] = []
    for one in sorted((found for found in predictions if found.reachable), key=costs):
        if not any(all(map(operator.le, costs(other), costs(one))) for other in front):
            front.append(one)
    return front


def find_crossing(on_bandwidth: Predictor) -> float | None:
    """The bandwidth in bits/s from which on data-parallel training is as fast as the fastest
    candidate that syncs; 0 if it is on every link, infinite if it is on none, None without one of
    the two.
    """

    def parallel_is_slower(bandwidth: float) -> bool:
        seconds = {True: math.inf, False: math.inf}
        for one in on_bandwidth(bandwidth):
            kind = one.candidate.recipe.data_parallel
            seconds[kind] = min(seconds[kind], one.seconds)
        return seconds[True] > CLOSE * seconds[False]

    low, high = LOWEST, HIGHEST
    if len({one.candidate.recipe.data_parallel for one in on_bandwidth(high)}) == 1:
        return None
    if parallel_is_slower(high):
        return math.inf
    if not parallel_is_slower(low):
        return 0.0
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if parallel_is_slower(middle) else (low, middle)
    return high


def reasons_for(chosen: Prediction, predictions: Sequence[Prediction]) -> list[str]:
    """Sentences on how the chosen candidate stands beside the others."""
    spent = chosen.round
    said = [
        f"It computes for {spent.utilisation:.0%} of its time; "
        f"{spent.transfer / spent.total:.0%} are transfers, {spent.waiting / spent.total:.0%} "
        f"waiting for the slowest worker, {spent.lost / spent.total:.0%} lost to failures."
    ]
    for name, other in by_method(predictions).items():
        if name != chosen.candidate.name:
            said.append(
                f"{other.candidate.label} takes {_times(other.seconds / chosen.seconds)} long"
                f"{_more_bytes(other.bytes_sent, chosen.bytes_sent)}; "
                f"{other.round.transfer / other.round.total:.0%} of its time are transfers, "
                f"{other.round.waiting / other.round.total:.0%} waiting."
            )
    fastest = min((one for one in predictions if one.reachable), key=lambda one: one.seconds)
    if chosen.seconds > 1.0005 * fastest.seconds:
        further = map(operator.gt, _departure(fastest), _departure(chosen))
        words = [word for word, more in zip(DEPARTURES, further, strict=True) if more]
        said.append(
            f"{fastest.candidate.label} is {chosen.seconds / fastest.seconds - 1:.1%} faster, but "
            f"{' and '.join(words) or 'sends more bytes'}."  # Of those alike the least was chosen.
        )
    return said


def _more_bytes(other: float, own: float) -> str:
    """What a candidate sends beside the chosen one, as the end of a sentence; empty if nothing."""
    if own:
        return f" and sends {_times(other / own)} many bytes"
    return f" and sends {other:.3g} bytes, where this one sends none" if other else ""


def _times(ratio: float) -> str:
    number = f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"
    return "as" if number == "1" else f"{number} times as"
