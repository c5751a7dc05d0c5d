"""Signals that tell a process to end: Ctrl+C, SIGTERM and SIGHUP."""

import signal
import subprocess
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def told_to_end(act: Callable[[int], None]) -> Iterator[None]:
    """Call a function with each signal that tells this process to end, while the context lasts.

    A SIGHUP that is ignored, as under nohup, stays ignored.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        act(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signals_passed_to(
    processes: Callable[[], Iterable[subprocess.Popen[bytes]]],
    spared: Callable[[], Collection[subprocess.Popen[bytes]]] = lambda: (),
) -> Iterator[list[int]]:
    """Pass signals to the processes that run, and kill those that are left at the end.

    Args:
        processes: The processes that have been started so far.
        spared: Those of them that get no signals.

    Yields:
        The signals that came.
    """
    received: list[int] = []

    def running() -> list[subprocess.Popen[bytes]]:
        return [process for process in processes() if process.poll() is None]

    def pass_on(number: int) -> None:
        received.append(number)
        for process in running():
            if process not in spared():
                process.send_signal(number)

    with told_to_end(pass_on):
        try:
            yield received
        finally:
            for process in running():
                process.kill()
                process.wait()
