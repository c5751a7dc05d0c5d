"""Carries IP packets between the TUN devices of several islands: latency, loss and, where the
kernel has no tbf, a token bucket.

A packet that an island sends waits its turn at the bucket (and is dropped if that takes longer than
the queue allows), then for the latency, and is written to the device whose address it bears.
Devices without offloads hand over packets as they would go over a cable. `links_network` starts it.
"""

import argparse
import fcntl
import os
import random
import select
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass, field

from links_network import DEVICE, die_with_parent, join_namespace

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
AT_ONCE, LONGEST_PACKET = 64, 65536


@dataclass
class Lane:
    """Packets on their way from one island, in order."""

    device: int
    free_at: float = 0.0
    """When the bucket has passed all packets so far."""
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    """When each arrives, and the packet."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--link",
        action="append",
        required=True,
        help="NAMESPACE=ADDRESS of an island with a TUN device",
    )
    parser.add_argument(
        "--parent", type=int, required=True, help="process id; the pump ends with it"
    )
    parser.add_argument("--rate", type=int, default=0, help="bits per second; 0: no bucket")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds")
    parser.add_argument("--loss", type=float, default=0.0, help="probability")
    parser.add_argument(
        "--queue", type=float, default=0.1, help="seconds that a packet may wait at the bucket"
    )
    known = parser.parse_args()
    die_with_parent(known.parent)
    lanes: dict[bytes, Lane] = {}
    for link in known.link:
        name, _, address = link.partition("=")
        join_namespace(name)
        lanes[socket.inet_aton(address)] = Lane(open_tun())
    print("ready", flush=True)
    carry(lanes, known.rate, known.delay, known.loss, known.queue)


def open_tun() -> int:
    """The device of the namespace in which this thread is; the descriptor stays with it."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    return device


def carry(lanes: dict[bytes, Lane], rate: int, delay: float, loss: float, queue: float) -> None:
    """Forever."""
    draw, poll = random.Random(0), select.epoll()
    by_device = {lane.device: lane for lane in lanes.values()}
    for device in by_device:
        poll.register(device, select.EPOLLIN)
    while True:
        due = min((lane.waiting[0][0] for lane in by_device.values() if lane.waiting), default=None)
        ready = poll.poll(-1 if due is None else max(0.0, due - time.monotonic()))
        for device, _ in ready:
            lane = by_device[device]
            for packet in read_packets(device):
                now = time.monotonic()
                if loss and draw.random() < loss:
                    continue
                if rate:
                    if lane.free_at - now > queue:
                        continue
                    now = lane.free_at = max(now, lane.free_at) + 8 * len(packet) / rate
                lane.waiting.append((now + delay, packet))
        deliver(lanes)


def read_packets(device: int) -> list[bytes]:
    """Those that wait at the device, up to a number that keeps the others from waiting."""
    packets: list[bytes] = []
    while len(packets) < AT_ONCE:
        try:
            packets.append(os.read(device, LONGEST_PACKET))
        except BlockingIOError:
            break
    return packets


def deliver(lanes: dict[bytes, Lane]) -> None:
    """Write every packet whose time has come to its destination; those for nobody (multicast, other
    versions of IP) are dropped.
    """
    now = time.monotonic()
    for lane in lanes.values():
        while lane.waiting and lane.waiting[0][0] <= now:
            packet = lane.waiting.popleft()[1]
            to = lanes.get(packet[16:20]) if packet[0] >> 4 == 4 else None
            if to:
                os.write(to.device, packet)


if __name__ == "__main__":
    main()
