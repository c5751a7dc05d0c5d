"""Cuts the connections of a process group, so that no rank waits any longer for a lost one.

gloo notices at once that a killed rank has closed its connections, but only the ranks that talk to
it in that moment; nobody notices a stopped rank or a dead link for as long as a collective may
wait. torch 2.13 cannot abort a collective of gloo from another thread (tried: `abort` returns, and
the collective goes on waiting). A connection that is shut down ends it with an error.
"""

import os
import socket
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

FILES = Path("/dev/fd")


def open_sockets() -> set[int]:
    """The sockets of this process, by inode."""
    return {inode for inode, _ in _sockets()}


def cut_connections(kept: Collection[int], port: int) -> None:
    """Shut down all network connections of this process but some.

    Args:
        kept: Inodes of sockets that are left alone; from `open_sockets`.
        port: Connections to, or at, this port are left alone: those of the store.
    """
    for inode, number in _sockets():
        if inode in kept:
            continue
        try:
            with socket.socket(fileno=os.dup(number)) as connection:
                _cut(connection, port)
        except OSError:  # Closed by its owner in the meantime, or not connected.
            continue


def _cut(connection: socket.socket, port: int) -> None:
    network = connection.family in (socket.AF_INET, socket.AF_INET6)
    listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    # gloo ends the process if its listening socket is shut down.
    if not network or listens:
        return
    if port not in (connection.getsockname()[1], connection.getpeername()[1]):
        connection.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[tuple[int, int]]:
    """(inode, file descriptor) of each open socket."""
    for file in FILES.iterdir():
        number = int(file.name)
        try:
            found = os.fstat(number)
        except OSError:  # The one by which the folder was read.
            continue
        if stat.S_ISSOCK(found.st_mode):
            yield found.st_ino, number
