"""The options of a run that live in lab/: what they are, and what they say of rounds."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from adloco.discovery import lab_classes
from adloco.metric import Metric

if TYPE_CHECKING:
    from adloco.algorithms.stage import Option
    from adloco.rules.failure_signs import Sign


def options() -> Mapping[str, "type[Option]"]:
    """The options that lab/ has, by key; none if it was removed."""
    return lab_classes("option")


def signs_of_options() -> list[Callable[[Mapping[str, Any]], "Iterator[Sign]"]]:
    """The functions by which options warn of a round."""
    return [option.signs for option in options().values()]


def option_metrics() -> dict[str, Metric]:
    """The numbers that options add to the report of a worker, by name."""
    found = [metric for option in options().values() for metric in option.worker_metrics]
    return {metric.name: metric for metric in found}


def unmeasured() -> dict[str, Any]:
    """Values of these numbers in a report where no stage measures them."""
    return {name: 0 if metric.always else None for name, metric in option_metrics().items()}
