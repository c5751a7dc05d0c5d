"""`adloco`, which is also `python -m adloco`."""

import atexit
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path


def main() -> int:
    """Run the command line and return its exit code.

    Ctrl+C while its modules are imported ends it as quietly as any later one, and one that comes
    while Python ends changes nothing any more.
    """
    try:
        if _others_compute():
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from adloco.cli.main import main as run

        code = run()
        # Last, so that it is called first: before what libraries do at exit.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
        return code
    except KeyboardInterrupt:
        sys.stderr.write("adloco: interrupted\n")
        return 130


def _others_compute() -> bool:
    """True if other processes keep half of the cores busy or more; False where Linux does not say.

    OpenMP's threads then have to sleep while they wait for one another, which torch must be told
    before it is imported. Otherwise they spin in the time of those that they wait for: a run of
    two workers took three times as long beside other work. On an idle machine spinning is faster,
    twice with the default model and one worker.
    """
    running = []
    with suppress(OSError, ValueError, IndexError):
        for _ in range(5):
            both = Path("/proc/loadavg").read_text().split()[3]  # Runnable / all.
            running.append(int(both.split("/")[0]) - 1)
            time.sleep(0.003)
    return len(running) == 5 and sorted(running)[2] >= max(1, (os.cpu_count() or 1) / 2)


if __name__ == "__main__":
    sys.exit(main())
