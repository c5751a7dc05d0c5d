"""Builds islands on one machine: network namespaces joined by virtual links with a bandwidth, a
latency and a loss.

The process first moves to a private mount and network namespace (as root, or through a user
namespace where the kernel allows one). So names cannot collide with those of another run, and the
kernel removes everything with the last process in it, however that process ends.

There are two layouts. Where tc can limit the bandwidth and nothing else is asked for, a veth pair
joins each island to a bridge. Otherwise each island has a TUN device, and a process
(`links_pump.py`) carries the packets between them, with their latency and loss, and with the
bandwidth where the kernel lacks tbf.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

DEVICE = "wan0"
"""Name of every island's end of its link."""
PRIVATE_FOLDER = Path("/run")
"""A file system in memory that only this process and its children see."""
PARENT = "LINKS_PARENT"
"""Variable with the process id of the program that started a rank."""
NAMESPACE_FOLDER = PRIVATE_FOLDER / "netns"
TBF, NOTHING = "tc tbf", "not asked for"
PUMP = "userspace pump between TUN devices"
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

    bits_per_second: int = 0
    """Bandwidth out of an island, headers included; 0: unlimited."""
    latency_seconds: float = 0.0
    """Latency one way."""
    loss: float = 0.0
    """Probability that a packet is lost."""
    mtu: int = 1500
    """Bytes of the longest packet."""

    @property
    def burst_bytes(self) -> int:
        return max(LEAST_BURST, 2 * self.mtu, int(self.bits_per_second / 8 * BURST_SECONDS))


@dataclass(frozen=True, kw_only=True)
class Mechanisms:
    """The mechanism (`TBF`, `PUMP` or `NOTHING`) behind each property of a link."""

    bandwidth: str
    latency: str
    loss: str

    @property
    def pump(self) -> bool:
        return PUMP in asdict(self).values()


def read_counters() -> dict[str, int]:
    """The kernel's counters of the link of the island in which this process runs. As on a cable, no
    packet exceeds the MTU. `retransmitted`: TCP segments that were sent again.
    """
    (line,) = re.findall(rf"^\s*{DEVICE}:(.*)$", Path("/proc/net/dev").read_text(), re.MULTILINE)
    received, sent = (list(map(int, words)) for words in (line.split()[:8], line.split()[8:]))
    tcp = re.findall(r"^Tcp: (.*)$", Path("/proc/net/snmp").read_text(), re.MULTILINE)
    of_tcp = dict(zip(*(words.split() for words in tcp), strict=True))
    return {
        "tx_bytes": sent[0],
        "tx_packets": sent[1],
        "rx_bytes": received[0],
        "rx_packets": received[1],
        "tx_dropped": sent[3],
        "retransmitted": int(of_tcp["RetransSegs"]),
    }


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
    call("mount --make-rprivate /")
    call(f"mount -t tmpfs adloco-links {PRIVATE_FOLDER}")
    NAMESPACE_FOLDER.mkdir(exist_ok=True)
    call("ip link set lo up")


def address(island: int) -> str:
    """The IP address of an island's end of its link."""
    return f"10.77.0.{island + 1}"


def meeting(islands: int) -> dict[str, str]:
    """Variables by which the ranks of all islands find each other."""
    return {
        "MASTER_ADDR": address(0),
        "MASTER_PORT": "29500",
        "WORLD_SIZE": str(islands),
        "GLOO_SOCKET_IFNAME": DEVICE,
    }


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
                call("ip link add switch type bridge")
                cleanup.callback(call, "ip link del switch")
                call("ip link set switch up")
            for island in range(self.islands):
                call(f"ip netns add {namespace(island)}")
                cleanup.callback(call, f"ip netns del {namespace(island)}")
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
        ethernet = ETHERNET_HEADER * (not self.mechanisms.pump)
        return IP_HEADER + TCP_HEADER + TIMESTAMPS * timestamps + ethernet

    @property
    def congestion_control(self) -> str:
        file = "/proc/sys/net/ipv4/tcp_congestion_control"
        return call(f"ip netns exec {namespace(0)} cat {file}").strip()

    def start(
        self, island: int, command: Sequence[str], environment: Mapping[str, str], errors: BinaryIO
    ) -> "subprocess.Popen[bytes]":
        """Start a command in an island, in a session of its own so that the terminal's Ctrl+C
        reaches only this program.
        """
        words = ["ip", "netns", "exec", namespace(island), *command]
        return subprocess.Popen(words, start_new_session=True, env=environment, stderr=errors)

    def run_ranks(self, command: Sequence[str]) -> None:
        """Run a command on every island until all have ended, or one has failed.

        Raises:
            RuntimeError: A rank failed, or the process that carries packets ended.
        """
        common = os.environ | meeting(self.islands) | {"LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
        common[PARENT] = str(os.getpid())
        ranks = [
            self.start(rank, command, common | {"RANK": str(rank)}, sys.stderr.buffer)
            for rank in range(self.islands)
        ]
        try:
            while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
                if self._pump and self._pump.poll() is not None:
                    raise RuntimeError("the process that carries packets has ended")
                time.sleep(0.05)
        finally:
            for rank in ranks:
                stop(rank)
        if any(codes):
            raise RuntimeError("a rank failed; see above")

    def _add_device(self, island: int) -> None:
        name, mtu = namespace(island), str(self.shape.mtu)
        if self.mechanisms.pump:
            call(f"ip -n {name} tuntap add dev {DEVICE} mode tun")
            call(f"ip -n {name} link set {DEVICE} mtu {mtu} txqueuelen {TUN_QUEUE}")
            return
        port = f"port{island}"
        # One segment per buffer: otherwise the interface would count 64 KiB with one header, which
        # no cable carries as one packet.
        size = f"mtu {mtu} gso_max_segs 1"
        call(f"ip link add {DEVICE} {size} netns {name} type veth peer name {port} {size}")
        call(f"ip link set {port} master switch up")

    def _set_up(self, island: int) -> None:
        name = namespace(island)
        # No IPv6, which would send packets of its own.
        call(f"ip -n {name} link set {DEVICE} addrgenmode none")
        call(f"ip -n {name} addr add {address(island)}/24 dev {DEVICE}")
        for device in ("lo", DEVICE):
            call(f"ip -n {name} link set {device} up")
        if self.mechanisms.bandwidth == TBF:
            call(f"tc -n {name} qdisc add dev {DEVICE} root {tbf(self.shape)}")

    def _start_pump(self) -> "subprocess.Popen[bytes]":
        rate = self.shape.bits_per_second if self.mechanisms.bandwidth == PUMP else 0
        numbers = (os.getpid(), rate, self.shape.latency_seconds, self.shape.loss, QUEUE_SECONDS)
        links = [f"{namespace(island)}={address(island)}" for island in range(self.islands)]
        program = str(Path(__file__).with_name("links_pump.py"))
        command = [sys.executable, program, *map(str, numbers), *links]
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
    """Choose tc for the bandwidth where the kernel has tbf, after a try on a temporary device, and
    the pump for the rest.
    """
    call("ip link add trial type veth peer name trial-peer")
    words = f"tc qdisc add dev trial root {tbf(shape)}".split()
    try:
        use_tc = use_tc and bool(shutil.which("tc"))
        shapes = use_tc and not subprocess.run(words, capture_output=True).returncode
    finally:
        call("ip link del trial")
    return Mechanisms(
        bandwidth=(TBF if shapes else PUMP) if shape.bits_per_second else NOTHING,
        latency=PUMP if shape.latency_seconds else NOTHING,
        loss=PUMP if shape.loss else NOTHING,
    )


def tbf(shape: LinkShape) -> str:
    burst, wait = shape.burst_bytes, f"{1000 * QUEUE_SECONDS:g}ms"
    return f"tbf rate {shape.bits_per_second}bit burst {burst} latency {wait}"


def call(line: str) -> str:
    """Run a command, whose words have no blanks, and return what it prints.

    Raises:
        LinksRefusedError: It failed; the message has what it said.
    """
    words = line.split()
    try:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout
    except FileNotFoundError as error:
        raise LinksRefusedError(
            f"virtual links need the command {words[0]!r}, which is not installed."
        ) from error
    except subprocess.CalledProcessError as error:
        raise LinksRefusedError(
            f"virtual links cannot be made here: {line}: {error.stderr.strip()}"
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


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel end this process when its parent ends, even by kill -9.

    parent: Its process id; None: the one that `Network.run_ranks` names.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != (int(os.environ[PARENT]) if parent is None else parent):
        sys.exit("the process that started this one is gone")


def join_namespace(name: str) -> None:
    """Move this thread to a network namespace."""
    with (NAMESPACE_FOLDER / name).open() as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot join the network namespace {name}")
