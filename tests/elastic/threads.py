"""Calls that run at the same time, each in a thread that stands for a process."""

import threading
from collections.abc import Callable
from typing import Any

from adloco.errors import RankFailureError


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """The results of the calls, each made in a thread of its own; an error is returned too."""
    found: list[Any] = [None] * len(calls)

    def call(number: int) -> None:
        try:
            found[number] = calls[number]()
        except (RankFailureError, ValueError) as error:
            found[number] = error

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found
