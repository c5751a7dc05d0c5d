"""Signals that tell a process to end: Ctrl+C, SIGTERM and SIGHUP."""

import math
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SECOND_SIGNAL_SECONDS = 1.0
"""A signal that comes sooner after another one belongs to it: the terminal sends Ctrl+C to all
processes, and a launcher sends it to its ranks again.
"""
TICK_SECONDS = 0.1
UNHEARD_SECONDS = 2.0
"""Seconds that a launcher's main thread may take to pass a signal on, before a thread does."""


@dataclass(frozen=True, kw_only=True)
class LastResort:
    """Acts on a signal when the main thread cannot.

    Python calls handlers in the main thread and between two of its own instructions, so not while
    it waits in a collective for a rank that is stopped, or for a store that is cut off.
    """

    act: Callable[[int], None]
    """Called in a thread with the signal; it must end the process."""
    seconds: float
    """Seconds that the main thread may take."""
    busy: Callable[[], bool]
    """True while the main thread does what must not be cut off; such time does not count."""


@contextmanager
def told_to_end(
    act: Callable[[int], None], last_resort: LastResort | None = None
) -> Iterator[None]:
    """Call a function with each signal that tells this process to end, while the context lasts.

    A SIGHUP that is ignored, as under nohup, stays ignored. Python handles signals in the main
    thread alone; in another thread nothing is called.

    last_resort: What is done if the main thread cannot call it in time; None: nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    acted_at = [-math.inf]

    def handle(number: int, frame: FrameType | None) -> None:
        acted_at.append(time.monotonic())
        act(number)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        if last_resort is None:
            yield
        else:
            with _listening(numbers, last_resort, lambda: acted_at[-1]):
                yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _listening(
    numbers: Collection[int], last_resort: LastResort, acted_at: Callable[[], float]
) -> Iterator[None]:
    """Let a thread see each signal at once, and take the last resort if nobody acts on it.

    acted_at: Moment at which the main thread has acted on a signal last.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    over = threading.Event()

    def listen() -> None:
        for number in iter(lambda: receiver.recv(1)[0], 0):
            if number in numbers and unheard():
                last_resort.act(number)

    def unheard() -> bool:
        since, left = time.monotonic() - SECOND_SIGNAL_SECONDS, last_resort.seconds
        while left > 0 and acted_at() < since and not over.wait(TICK_SECONDS):
            left -= 0 if last_resort.busy() else TICK_SECONDS
        return acted_at() < since and not over.is_set()

    thread = threading.Thread(target=listen, daemon=True)
    # The C part of a signal's handling writes its number here, whatever the main thread does.
    before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        over.set()
        sender.send(bytes([0]))
        thread.join()
        receiver.close()
        sender.close()


@contextmanager
def signals_passed_to(
    processes: Callable[[], Iterable[subprocess.Popen[bytes]]],
    unheard: Callable[[int], None] | None = None,
) -> Iterator[list[int]]:
    """Pass signals, which are yielded as they come, to the processes that run, and kill those that
    are left at the end.

    unheard: Called in a thread with a signal that the main thread could not act on until all
        processes had ended; it must end this one. None: the main thread always can.
    """
    received: list[int] = []
    early: list[int] = []
    """Signals that the thread has passed on, and the main thread has not acted on yet."""

    def running() -> list[subprocess.Popen[bytes]]:
        return [process for process in processes() if process.poll() is None]

    def pass_on(number: int) -> None:
        received.append(number)
        for process in running():
            process.send_signal(number)

    def act(number: int) -> None:
        if number in early:  # A rank takes the same signal again for a second Ctrl+C.
            early.remove(number)
        else:
            pass_on(number)

    def act_in_thread(number: int) -> None:
        assert unheard
        early.append(number)
        pass_on(number)
        while number in early and running():
            time.sleep(TICK_SECONDS)
        if number in early:
            unheard(number)

    waiting = None
    if unheard:
        waiting = LastResort(act=act_in_thread, seconds=UNHEARD_SECONDS, busy=lambda: False)
    with told_to_end(act, waiting):
        try:
            yield received
        finally:
            for process in running():
                process.kill()
                process.wait()
