"""Islands as network namespaces on one machine, joined by shaped virtual links, in namespaces of
this process's own.

The process moves to a private mount and network namespace first (as root, or through a user
namespace where the kernel lets anyone make one). So names cannot collide with those of another run,
and the kernel takes everything back with the last process in it, however that process ends.

Two layouts. Where tc can do all that is asked for: a veth pair from each island to a bridge, with
tbf (bandwidth) on the island's end and netem (latency, loss) on the bridge's. Where the kernel
lacks netem or tbf: a TUN device in each island, and a process that carries packets between them
(`links_pump.py`) and does what tc cannot. (The kernel on which this was written has no netem, so
that branch has not been run yet.)
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
"""In memory, and seen by this process and those that it starts only."""
NAMESPACE_FOLDER = PRIVATE_FOLDER / "netns"
TBF, NETEM, PUMP, NOTHING = (
    "tc tbf",
    "tc netem",
    "userspace pump between TUN devices",
    "not asked for",
)
IP_HEADER, TCP_HEADER, TIMESTAMPS, ETHERNET_HEADER = 20, 20, 12, 14
QUEUE_SECONDS, BURST_SECONDS, LEAST_BURST = 0.1, 0.005, 16_000
"""What waits for a link before it is dropped, and what may pass at once (at least so many bytes).
"""
TUN_QUEUE = 10_000
"""Packets that wait for the pump, so that none is lost to a busy processor."""
DRAIN_SECONDS = 60.0
UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET, PR_SET_PDEATHSIG = 0x00020000, 0x10000000, 0x40000000, 1


class LinksRefusedError(Exception):
    """This machine does not allow the virtual links; the message is one sentence."""


@dataclass(frozen=True, kw_only=True)
class LinkShape:
    """What every link is like, from an island to any other."""

    bits_per_second: int
    """Of what leaves an island, headers included; 0: as fast as it goes."""
    latency_seconds: float
    """One way."""
    loss: float
    """Probability that a packet is lost."""
    mtu: int

    @property
    def delays(self) -> bool:
        return self.latency_seconds > 0 or self.loss > 0

    @property
    def burst_bytes(self) -> int:
        return max(LEAST_BURST, 2 * self.mtu, int(self.bits_per_second / 8 * BURST_SECONDS))


@dataclass(frozen=True, kw_only=True)
class Mechanisms:
    """What does the shaping."""

    bandwidth: str
    latency: str
    loss: str

    @property
    def pump(self) -> bool:
        return PUMP in asdict(self).values()


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What the kernel has counted on an island's link; in packets as they go over the cable (no
    packet is longer than the MTU).
    """

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
        """Those of the island in which this process lives."""
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
    """Bits per second of 10mbit, 2.5gbit and the like, as tc spells them."""
    found = re.fullmatch(r"([0-9.]+)([kmg]?bit)", text.strip().lower())
    if not found:
        raise ValueError(
            f"bandwidth must be a number and one of {', '.join(UNITS)}, "
            f"for instance 10mbit (0bit: unlimited), got {text!r}"
        )
    return int(float(found[1]) * UNITS[found[2]])


def enter_private_namespaces() -> None:
    """This process, and all that it starts, sees only its own network interfaces and namespaces
    from here on; LinksRefusedError if it may not.
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
    """Of an island's end of its link."""
    return f"10.77.0.{island + 1}"


def namespace(island: int) -> str:
    return f"island{island}"


class Network:
    """Islands with a shaped link each, for as long as the context lasts."""

    def __init__(self, islands: int, shape: LinkShape, *, use_tc: bool = True) -> None:
        """use_tc: False does everything in the pump, as on a kernel without tbf and netem."""
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
        """Of a packet that carries TCP data, as the interface counts it."""
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
        """The command as a process in the island, in a session of its own so that the terminal's
        Ctrl+C reaches only this program.
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
        # One segment per buffer: otherwise the interface would count 64 KiB with one header, and no
        # cable has such packets.
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
        call(
            "ip", "-n", name, "link", "set", DEVICE, "addrgenmode", "none"
        )  # No IPv6, which would send packets of its own.
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
    """tc for what the kernel offers of it, and the pump for the rest; tried on a device that is
    removed again.
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
    """What the command prints; LinksRefusedError with the command and its message if it fails."""
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
    """End it now and wait until it has."""
    if process.poll() is None:
        process.kill()
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream:
            stream.close()


def wait_until_sent() -> None:
    """Until all TCP data of this island has been acknowledged."""
    deadline = time.monotonic() + DRAIN_SECONDS
    while time.monotonic() < deadline and unsent_bytes():
        time.sleep(0.01)


def unsent_bytes() -> int:
    """In the send queues of all connections of this island."""
    rows = [
        row.split()
        for file in ("tcp", "tcp6")
        if (path := Path("/proc/net") / file).exists()
        for row in path.read_text().splitlines()[1:]
    ]
    return sum(int(row[4].partition(":")[0], 16) for row in rows)


def die_with_parent(parent: int) -> None:
    """For a process that was just started: the kernel ends it when its parent (this process id)
    ends, even by kill -9.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that started this one is gone")


def join_namespace(name: str) -> None:
    """This thread is in that network namespace from here on."""
    with (NAMESPACE_FOLDER / name).open() as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot join the network namespace {name}")
