"""Builds islands on one machine: network namespaces joined by virtual links with a bandwidth, a
latency and a loss.

The process first moves to a private mount and network namespace (as root, or through a user
namespace where the kernel allows one). So names cannot collide with those of another run, and the
kernel removes everything with the last process in it, however that process ends.

There are two layouts. If tc can do all that is asked for, a veth pair joins each island to a
bridge, with tbf (bandwidth) on the island's end and netem (latency, loss) on the bridge's. If the
kernel lacks netem or tbf, each island has a TUN device, and a process (`links_pump.py`) carries the
packets between them and does what tc cannot. (The kernel on which this was written has no netem, so
the layout with netem has not been run yet.)
"""

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO

DEVICE = "wan0"
"""Name of every island's end of its link."""
PRIVATE_FOLDER = Path("/run")
"""A file system in memory that only this process and its children see."""
NAMESPACE_FOLDER = PRIVATE_FOLDER / "netns"
TBF, NETEM, PUMP, NOTHING = (
    "tc tbf",
    "tc netem",
    "userspace pump between TUN devices",
    "not asked for",
)
IP_HEADER, TCP_HEADER, TIMESTAMPS, ETHERNET_HEADER = 20, 20, 12, 14
QUEUE_SECONDS, BURST_SECONDS, LEAST_BURST = 0.1, 0.005, 16_000
"""The time that a packet may wait for a link before it is dropped; the length of a burst at the
link's rate; and the smallest burst in bytes.
"""
TUN_QUEUE = 10_000
"""Packets that may wait for the pump: so many that a busy processor loses none."""
DRAIN_SECONDS = 60.0
UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET, PR_SET_PDEATHSIG = 0x00020000, 0x10000000, 0x40000000, 1


class LinksRefusedError(Exception):
    """This machine does not allow the virtual links; the message is one sentence."""


@dataclass(frozen=True, kw_only=True)
class LinkShape:
    """The properties of the link from any island to any other."""

    bits_per_second: int
    """Bandwidth out of an island, headers included; 0: unlimited."""
    latency_seconds: float
    """Latency one way."""
    loss: float
    """Probability that a packet is lost."""
    mtu: int
    """Bytes of the longest packet."""

    @property
    def delays(self) -> bool:
        return self.latency_seconds > 0 or self.loss > 0

    @property
    def burst_bytes(self) -> int:
        return max(LEAST_BURST, 2 * self.mtu, int(self.bits_per_second / 8 * BURST_SECONDS))


@dataclass(frozen=True, kw_only=True)
class Mechanisms:
    """The mechanism (`TBF`, `NETEM`, `PUMP` or `NOTHING`) behind each property of a link."""

    bandwidth: str
    latency: str
    loss: str

    @property
    def pump(self) -> bool:
        return PUMP in asdict(self).values()


@dataclass(frozen=True, kw_only=True)
class Counters:
    """The kernel's counters of an island's link. As on a cable, no packet exceeds the MTU."""

    tx_bytes: int
    tx_packets: int
    rx_bytes: int
    rx_packets: int
    tx_dropped: int
    retransmitted: int
    """TCP segments that were sent again."""

    def __sub__(self, before: "Counters") -> "Counters":
        return Counters(
            **{
                field.name: getattr(self, field.name) - getattr(before, field.name)
                for field in fields(self)
            }
        )

    @staticmethod
    def read() -> "Counters":
        """Read the counters of the island in which this process runs."""
        (line,) = re.findall(
            rf"^\s*{DEVICE}:(.*)$", Path("/proc/net/dev").read_text(), re.MULTILINE
        )
        rx_bytes, rx_packets, *_, tx_bytes, tx_packets, _, tx_dropped = [
            int(word) for word in line.split()
        ][:12]
        names, values = (
            words.split()[1:]
            for words in Path("/proc/net/snmp").read_text().splitlines()
            if words.startswith("Tcp:")
        )
        retransmitted = int(dict(zip(names, values, strict=True))["RetransSegs"])
        return Counters(
            tx_bytes=tx_bytes,
            tx_packets=tx_packets,
            rx_bytes=rx_bytes,
            rx_packets=rx_packets,
            tx_dropped=tx_dropped,
            retransmitted=retransmitted,
        )


def parse_bandwidth(text: str) -> int:
    """Bits per second from text such as 10mbit or 2.5gbit, as tc writes them."""
    found = re.fullmatch(r"([0-9.]+)([kmg]?bit)", text.strip().lower())
    if not found:
        raise ValueError(
            f"bandwidth must be a number and one of {', '.join(UNITS)}, "
            f"for instance 10mbit (0bit: unlimited), got {text!r}"
        )
    return int(float(found[1]) * UNITS[found[2]])


def enter_private_namespaces() -> None:
    """Move this process to private namespaces, so that it and its children see no other network
    interfaces.

    Raises:
        LinksRefusedError: The system does not allow it.
    """
    if sys.platform != "linux":
        raise LinksRefusedError("virtual links need Linux with network namespaces.")
    libc, ids = ctypes.CDLL(None, use_errno=True), (os.getuid(), os.getgid())
    own_user = CLONE_NEWUSER if ids[0] != 0 else 0
    if libc.unshare(own_user | CLONE_NEWNS | CLONE_NEWNET) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise LinksRefusedError(
            f"network namespaces cannot be made here ({reason}); "
            "run it as root, or where user namespaces are allowed."
        )
    if own_user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {ids[0]} 1")
        Path("/proc/self/gid_map").write_text(f"0 {ids[1]} 1")
    call("mount", "--make-rprivate", "/")
    call("mount", "-t", "tmpfs", "adloco-links", PRIVATE_FOLDER)
    NAMESPACE_FOLDER.mkdir(exist_ok=True)
    call("ip", "link", "set", "lo", "up")


def address(island: int) -> str:
    """The IP address of an island's end of its link."""
    return f"10.77.0.{island + 1}"


def namespace(island: int) -> str:
    return f"island{island}"


class Network:
    """Islands with a shaped link each, which exist while the context lasts.

    Args:
        islands: Number of islands.
        shape: Properties of every link.
        use_tc: False does everything in the pump, as on a kernel without tbf and netem.
    """

    def __init__(self, islands: int, shape: LinkShape, *, use_tc: bool = True) -> None:
        self.islands, self.shape = islands, shape
        self.mechanisms = choose_mechanisms(shape, use_tc=use_tc)
        self._cleanup = ExitStack()
        self._pump: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Network":
        with ExitStack() as cleanup:
            if not self.mechanisms.pump:
                call("ip", "link", "add", "switch", "type", "bridge")
                cleanup.callback(call, "ip", "link", "del", "switch")
                call("ip", "link", "set", "switch", "up")
            for island in range(self.islands):
                call("ip", "netns", "add", namespace(island))
                cleanup.callback(call, "ip", "netns", "del", namespace(island))
                self._add_device(island)
                self._set_up(island)
            if self.mechanisms.pump:
                self._pump = self._start_pump()
                cleanup.callback(stop, self._pump)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    @property
    def header_bytes(self) -> int:
        """Bytes of the headers of a packet with TCP data, as far as the interface counts them."""
        timestamps = Path("/proc/sys/net/ipv4/tcp_timestamps").read_text().strip() != "0"
        return (
            IP_HEADER
            + TCP_HEADER
            + TIMESTAMPS * timestamps
            + ETHERNET_HEADER * (not self.mechanisms.pump)
        )

    @property
    def congestion_control(self) -> str:
        return call(
            "ip", "netns", "exec", namespace(0), "cat", "/proc/sys/net/ipv4/tcp_congestion_control"
        ).strip()

    @property
    def works(self) -> bool:
        """False once the process that carries the packets has ended."""
        return self._pump is None or self._pump.poll() is None

    def start(
        self, island: int, command: Sequence[str], environment: Mapping[str, str], errors: BinaryIO
    ) -> "subprocess.Popen[bytes]":
        """Start a command in an island, in a session of its own so that the terminal's Ctrl+C
        reaches only this program.
        """
        words = ["ip", "netns", "exec", namespace(island), *command]
        return subprocess.Popen(words, start_new_session=True, env=environment, stderr=errors)

    def _add_device(self, island: int) -> None:
        name, mtu = namespace(island), str(self.shape.mtu)
        if self.mechanisms.pump:
            call("ip", "-n", name, "tuntap", "add", "dev", DEVICE, "mode", "tun")
            call("ip", "-n", name, "link", "set", DEVICE, "mtu", mtu, "txqueuelen", str(TUN_QUEUE))
            return
        port = f"port{island}"
        # One segment per buffer: otherwise the interface would count 64 KiB with one header, which
        # no cable carries as one packet.
        size = ("mtu", mtu, "gso_max_segs", "1")
        call(
            "ip",
            "link",
            "add",
            DEVICE,
            *size,
            "netns",
            name,
            "type",
            "veth",
            "peer",
            "name",
            port,
            *size,
        )
        call("ip", "link", "set", port, "master", "switch", "up")
        if self.shape.delays:
            call("tc", "qdisc", "add", "dev", port, "root", "netem", *netem_words(self.shape))

    def _set_up(self, island: int) -> None:
        name = namespace(island)
        # No IPv6, which would send packets of its own.
        call("ip", "-n", name, "link", "set", DEVICE, "addrgenmode", "none")
        call("ip", "-n", name, "addr", "add", f"{address(island)}/24", "dev", DEVICE)
        for device in ("lo", DEVICE):
            call("ip", "-n", name, "link", "set", device, "up")
        if self.mechanisms.bandwidth == TBF:
            call(
                "tc",
                "-n",
                name,
                "qdisc",
                "add",
                "dev",
                DEVICE,
                "root",
                "tbf",
                *tbf_words(self.shape),
            )

    def _start_pump(self) -> "subprocess.Popen[bytes]":
        rate = self.shape.bits_per_second if self.mechanisms.bandwidth == PUMP else 0
        links = [
            word
            for island in range(self.islands)
            for word in ("--link", f"{namespace(island)}={address(island)}")
        ]
        settings = [
            f"--rate={rate}",
            f"--delay={self.shape.latency_seconds}",
            f"--loss={self.shape.loss}",
            f"--queue={QUEUE_SECONDS}",
        ]
        program = Path(__file__).with_name("links_pump.py")
        command = [sys.executable, str(program), f"--parent={os.getpid()}", *links, *settings]
        pump = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert pump.stdout
        assert pump.stderr
        if not pump.stdout.readline():
            problem = pump.stderr.read().decode().strip().split("\n")[-1]
            raise LinksRefusedError(
                f"the process that carries packets between TUN devices could not start: {problem}"
            )
        return pump


def choose_mechanisms(shape: LinkShape, *, use_tc: bool) -> Mechanisms:
    """Choose tc where the kernel supports it, and the pump elsewhere, after a try on a temporary
    device.
    """
    call("ip", "link", "add", "trial", "type", "veth", "peer", "name", "trial-peer")
    try:
        shapes = use_tc and accepted(
            "tc", "qdisc", "add", "dev", "trial", "root", "tbf", *tbf_words(shape)
        )
        delays = use_tc and accepted(
            "tc", "qdisc", "add", "dev", "trial-peer", "root", "netem", *netem_words(shape)
        )
    finally:
        call("ip", "link", "del", "trial")
    return Mechanisms(
        bandwidth=(TBF if shapes else PUMP) if shape.bits_per_second else NOTHING,
        latency=(NETEM if delays else PUMP) if shape.latency_seconds else NOTHING,
        loss=(NETEM if delays else PUMP) if shape.loss else NOTHING,
    )


def tbf_words(shape: LinkShape) -> list[str]:
    return [
        "rate",
        f"{shape.bits_per_second}bit",
        "burst",
        str(shape.burst_bytes),
        "latency",
        f"{1000 * QUEUE_SECONDS:g}ms",
    ]


def netem_words(shape: LinkShape) -> list[str]:
    return [
        "delay",
        f"{1000 * shape.latency_seconds:g}ms",
        "loss",
        f"{100 * shape.loss:g}%",
        "limit",
        "100000",
    ]


def accepted(*words: str) -> bool:
    return (
        bool(shutil.which(words[0]))
        and subprocess.run(words, capture_output=True, check=False).returncode == 0
    )


def call(*words: str | Path) -> str:
    """Run a command and return what it prints; LinksRefusedError with its message if it fails."""
    try:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError as error:
        raise LinksRefusedError(
            f"virtual links need the command {str(words[0])!r}, which is not installed."
        ) from error
    except subprocess.CalledProcessError as error:
        raise LinksRefusedError(
            f"virtual links cannot be made here: {' '.join(map(str, words))}: "
            f"{error.stderr.strip()}"
        ) from error


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process, wait until it has ended, and close its pipes."""
    if process.poll() is None:
        process.kill()
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream:
            stream.close()


def wait_until_sent() -> None:
    """Wait until all TCP data of this island has been acknowledged, or for DRAIN_SECONDS."""
    deadline = time.monotonic() + DRAIN_SECONDS
    while time.monotonic() < deadline and unsent_bytes():
        time.sleep(0.01)


def unsent_bytes() -> int:
    """Bytes in the send queues of all TCP connections of this island."""
    rows = [
        row.split()
        for file in ("tcp", "tcp6")
        if (path := Path("/proc/net") / file).exists()
        for row in path.read_text().splitlines()[1:]
    ]
    return sum(int(row[4].partition(":")[0], 16) for row in rows)


def die_with_parent(parent: int) -> None:
    """Let the kernel end this process when its parent (this process id) ends, even by kill -9."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that started this one is gone")


def join_namespace(name: str) -> None:
    """Move this thread to a network namespace."""
    with (NAMESPACE_FOLDER / name).open() as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot join the network namespace {name}")
