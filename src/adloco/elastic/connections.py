"""Cuts the connections of a process group, so that no rank waits any longer for a failed one, and
lets a launcher give up its connection to a store that does not answer.

gloo notices at once that a killed rank has closed its connections, but only the ranks that talk to
it in that moment; nobody notices a stopped rank or a dead link for as long as a collective may
wait. torch 2.13 cannot abort a collective of gloo from another thread (tried: `abort` returns, and
the collective waits on). A connection from which no more can be read ends it with an error,
and gloo then closes it. It must stay writable until then: what gloo sends on a connection that is
shut down for writing too, before it notices the end, waits until the timeout: 10 of 160 cuts in
the midst of collectives ended so, and 1 of 380 for reading alone, where the other process was
killed at that moment.
"""

import fcntl
import os
import socket
import stat
import sys
from collections.abc import Collection
from pathlib import Path

FILES = Path("/dev/fd")
PROBES = 4
"""Times that the kernel asks a silent end whether it is there, before a connection is given up."""


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
    """Let nothing more be read from the connections of this process's group.

    kept: Inodes of sockets that were open before the group was made, one to the store among
        them; from `open_sockets`.
    """
    # The main thread may open new ones as soon as its own are cut.
    sockets = open_sockets()
    stores = {_peer(number) for inode, number in sockets.items() if inode in kept}
    stores = {peer for peer in stores if peer and peer[1] == int(os.environ["MASTER_PORT"])}
    for inode, number in sockets.items():
        # The group waits at the store for addresses of its ranks.
        if inode in kept or not (_peer(number) in stores or _by_gloo(number)):
            continue
        try:
            with socket.socket(fileno=os.dup(number)) as connection:
                if os.fstat(connection.fileno()).st_ino == inode:
                    connection.shutdown(socket.SHUT_RD)
        except OSError:  # Closed by its owner in the meantime.
            continue


def give_up_after(seconds: float, port: int) -> None:
    """Let this process's connections to a port end with an error if the other end does not answer
    for so long; only on Linux.

    Otherwise TCP waits up to twice as long as a link was cut, and then as long again, before it
    tries again: a launcher that was cut off for 60 s noticed it 42 s after the link was back.
    """
    if sys.platform != "linux":
        return
    probes = max(1, round(seconds / PROBES))
    options = (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),  # For an answer that does not come.
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, probes),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, probes),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES - 1),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds)),
    )
    for number in open_sockets().values():
        peer = _peer(number)
        if peer and peer[1] == port:
            with socket.socket(fileno=os.dup(number)) as connection:
                for option in options:
                    connection.setsockopt(*option)


def _peer(number: int) -> tuple[str, int] | None:
    """Address and port of the other end; None without one."""
    try:
        with socket.socket(fileno=os.dup(number)) as connection:
            name = connection.getpeername()
    except OSError:
        return None
    return (name[0], name[1]) if isinstance(name, tuple) else None


def _by_gloo(number: int) -> bool:
    """True for a connection with the marks of gloo's: child processes inherit it, and both of its
    ends have these options. Python lets no child inherit a socket, and a library has no reason to
    reuse the address of a connection that it opens.
    """
    options = (
        (socket.SOL_SOCKET, socket.SO_REUSEADDR),
        # gloo ends the process if its listening socket, which lacks this one, is shut down.
        (socket.IPPROTO_TCP, socket.TCP_NODELAY),
    )
    try:
        inherited = not fcntl.fcntl(number, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        with socket.socket(fileno=os.dup(number)) as connection:
            return inherited and all(connection.getsockopt(*option) for option in options)
    except OSError:  # Closed in the meantime, or no connection of TCP.
        return False
