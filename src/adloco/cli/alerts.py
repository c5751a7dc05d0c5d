"""Alerts of `adloco train --notify`: a command or a URL is told what happens to a run.

They are given on the line or in the environment and never by a recipe, so that the folder of a run
cannot name a command. An address that holds a secret belongs into the environment: environment.json
in the run's folder has the line.
"""

import json
import os
import shlex
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Literal

from adloco.cli.terminal import print_error
from adloco.metrics import Record

VARIABLE = "ADLOCO_NOTIFY"
"""The environment variable that counts where the line does not say --notify."""
CALL_SECONDS = 10.0
"""Longest time of a call."""
STALL_SECONDS = 900.0
STALL_FACTOR = 3.0
"""A run stalls if a round takes so many times the longest before, and more than STALL_SECONDS."""

Event = Literal["failed", "stalled", "recovered", "stopped", "ended"]


class Alerts:
    """Tells a command or a URL what happens to a run, in threads of its own.

    Args:
        where: The command, or the http or https URL; empty: nothing is told.

    Raises:
        ValueError: The command has a quotation mark without its other half.
    """

    def __init__(self, where: str = "") -> None:
        self.about = "a run"
        """The run's folder, once it is known."""
        self._url = where if where.startswith(("http://", "https://")) else ""
        try:
            self._command = [] if self._url else shlex.split(where)
        except ValueError as error:
            raise ValueError(
                f"--notify {where!r} is no command ({error}); close the quotation marks in it"
            ) from error
        self._tells = bool(self._url or self._command)
        self._calls: list[threading.Thread] = []
        self._failed_before = False

    def __enter__(self) -> "Alerts":
        return self

    def __exit__(self, kind: object, error: BaseException | None, at: object) -> None:
        if isinstance(error, Exception):
            self.failed(str(error))
        self.wait()

    def tell(self, event: Event, text: str, *, anyone: bool = False) -> None:
        """Begin a call.

        Args:
            text: A sentence about the event.
            anyone: False if rank 0 alone tells it.
        """
        if not self._tells:
            return
        # Not at the top: `adloco train` refuses a bad recipe without torch.
        from adloco.distributed.launch.launcher import this_rank

        if this_rank() != 0 and not anyone:
            return
        call = threading.Thread(target=self._call, args=(event, text), daemon=True)
        self._calls.append(call)
        call.start()

    def failed(self, text: str, *, anyone: bool = False) -> None:
        """Tell that the run has failed, if no launcher of this rank does.

        anyone: As in `tell`; True for the failure of a rank, which may be rank 0.
        """
        if not _has_launcher():
            self.tell("failed", text, anyone=anyone)

    def wait(self) -> None:
        """Wait for the calls in flight, as long as one may take."""
        deadline = time.monotonic() + CALL_SECONDS
        for call in self._calls:
            call.join(max(0.0, deadline - time.monotonic()))

    def watched(self, rounds: Iterable[Record], longest: float) -> Iterator[Record]:
        """The rounds; tells if one stalls, and if it ends after all.

        longest: Seconds of the longest round so far; 0 if there is none.
        """
        left = iter(rounds)
        while self._tells:
            limit, began = max(STALL_SECONDS, STALL_FACTOR * longest), time.monotonic()
            told = f"no round has ended for {limit:,.0f} s"
            timer = threading.Timer(limit, self.tell, ("stalled", told))
            timer.daemon = True
            timer.start()
            try:
                record = next(left, None)
            finally:
                timer.cancel()
            if record is None:
                return
            seconds = time.monotonic() - began
            if seconds > limit:
                self.tell("recovered", f"round {record['round']} has ended after {seconds:,.0f} s")
            longest = max(longest, seconds)
            yield record
        yield from left

    def _call(self, event: Event, text: str) -> None:
        message = {"event": event, "run": self.about, "host": socket.gethostname()}
        message["text"] = f"adloco: {self.about} on {message['host']} has {event}: {text}"
        try:
            if self._url:
                body, form = json.dumps(message).encode(), {"Content-Type": "application/json"}
                request = urllib.request.Request(self._url, data=body, headers=form)
                urllib.request.urlopen(request, timeout=CALL_SECONDS).close()
            else:
                subprocess.run(
                    self._command,
                    input=f"{message['text']}\n".encode(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=CALL_SECONDS,
                    check=True,
                )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            if not self._failed_before:
                self._failed_before = True
                print_error(f"--notify cannot be called ({error}); later failures are not shown")


def _has_launcher() -> bool:
    """True for a rank that `adloco train --ranks` has started, which tells of failures."""
    kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return kept and "TORCHELASTIC_RUN_ID" not in os.environ  # torchrun sets both.
