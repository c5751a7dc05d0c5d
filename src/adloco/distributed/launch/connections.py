"""Cuts the connections of a process group, so that no rank waits any longer for a lost one.

gloo notices at once that a killed rank has closed its connections, but only the ranks that talk to
it in that moment; nobody notices a stopped rank or a dead link for as long as a collective may
wait. torch 2.13 cannot abort a collective of gloo from another thread (tried: `abort` returns, and
the collective goes on waiting). A connection from which no more can be read ends it with an error,
and gloo then closes it. It must stay writable until then: what gloo sends on a connection that is
shut down for writing too, before it notices the end, waits until the timeout: 10 of 160 cuts in
the midst of collectives ended so, and 1 of 380 for reading alone, where the other process was
killed at that moment.
"""

import os
import socket
import stat
from collections.abc import Collection
from pathlib import Path

FILES = Path("/dev/fd")


def open_sockets() -> dict[int, int]:
    """The file descriptor of each open socket of this process, by its inode."""
    found = {}
    for file in FILES.iterdir():
        number = int(file.name)
        try:
            status = os.fstat(number)
        except OSError:  # The one by which the folder was read.
            continue
        if stat.S_ISSOCK(status.st_mode):
            found[status.st_ino] = number
    return found


def cut_connections(kept: Collection[int]) -> None:
    """Let nothing more be read from all network connections that this process has now, but some.

    Args:
        kept: Inodes of sockets that are left alone; from `open_sockets`.
    """
    # The main thread may open new ones as soon as its own are cut.
    for inode, number in open_sockets().items():
        if inode in kept:
            continue
        try:
            with socket.socket(fileno=os.dup(number)) as connection:
                if os.fstat(connection.fileno()).st_ino == inode:
                    _cut(connection)
        except OSError:  # Closed by its owner in the meantime, or not connected.
            continue


def _cut(connection: socket.socket) -> None:
    network = connection.family in (socket.AF_INET, socket.AF_INET6)
    listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    # gloo ends the process if its listening socket is shut down.
    if network and not listens:
        connection.shutdown(socket.SHUT_RD)
