"""Starts the ranks of an arm of bench_peers.py, and ends them as soon as one fails.

    python peer_launch.py RANKS ARM FOLDER

It may run in a network namespace of its own.
"""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = Path(__file__).absolute().with_name("peer_arms.py")


def main() -> int:
    ranks, arguments = int(sys.argv[1]), sys.argv[2:]
    # The loopback of a new namespace is down.
    subprocess.run(["ip", "link", "set", "lo", "up"], capture_output=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]
    while None in (codes := [process.poll() for process in processes]) and not any(codes):
        time.sleep(0.05)
    for process in processes:
        process.kill()
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
