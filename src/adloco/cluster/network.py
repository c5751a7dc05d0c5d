"""The addresses by which this machine takes part in a run."""

import os
import socket
import struct
import sys

ADDRESS_REQUEST = 0x8915
"""SIOCGIFADDR of Linux."""
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LOOPBACK = "127."


def interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface, by its name; empty where it cannot be asked."""
    if sys.platform != "linux":
        return {}
    import fcntl

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(any_socket.fileno(), ADDRESS_REQUEST, request)
            except OSError:  # It has no such address.
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def gloo_address() -> str:
    """The address at which gloo listens: that of GLOO_SOCKET_IFNAME, else that to which the host
    name resolves, else the loopback. Empty if there is no such interface.
    """
    name = os.environ.get(VARIABLES[0], "").split(",")[0]
    known = interfaces()
    if name:
        return known.get(name, "")
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
    own = not known or address in known.values() or address.startswith(LOOPBACK)
    return address if own else "127.0.0.1"


def address_towards(host: str) -> str:
    """This machine's address on the way to another one; empty if there is none. Sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            any_socket.connect((host, 9))
            return str(any_socket.getsockname()[0])
    except OSError:
        return ""


def port_is_free(port: int) -> bool:
    """True if a launcher could listen at this port of this machine."""
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True
