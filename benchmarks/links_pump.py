"""Carries IP packets between the TUN devices of several islands: latency, loss and, where the
kernel has no tbf, a token bucket.

A packet that an island sends waits for its turn at the bucket (and is dropped if that takes longer
than the queue allows), then for the latency; then it is written to the device that has its
destination address. The devices have no offloads, so packets are as long as on a cable.
`links_network` starts this program:

    python links_pump.py PARENT BITS_PER_SECOND DELAY LOSS QUEUE NAMESPACE=ADDRESS ...
"""

import fcntl
import os
import random
import select
import socket
import struct
import sys
import time
from collections import deque
from dataclasses import dataclass, field

from links_network import DEVICE, die_with_parent, join_namespace

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
AT_ONCE, LONGEST_PACKET = 64, 65536


@dataclass
class Lane:
    """Packets in flight from one island, in order."""

    device: int
    free_at: float = 0.0
    """Time at which the bucket has passed all packets so far."""
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    """(time of arrival, packet) of each."""


def main() -> None:
    parent, rate, *numbers = sys.argv[1:6]
    die_with_parent(int(parent))
    lanes: dict[bytes, Lane] = {}
    for link in sys.argv[6:]:
        name, _, address = link.partition("=")
        join_namespace(name)
        lanes[socket.inet_aton(address)] = Lane(open_tun())
    print("ready", flush=True)
    carry(lanes, int(rate), *map(float, numbers))


def open_tun() -> int:
    """Open the TUN device of this thread's namespace.

    The descriptor keeps working after the thread moves to another namespace.
    """
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    return device


def carry(lanes: dict[bytes, Lane], rate: int, delay: float, loss: float, queue: float) -> None:
    """Carry packets between the lanes until the process is ended.

    Args:
        lanes: The lane of each island, by its packed address.
        rate: Bits per second; 0 for no bucket.
        delay: Seconds of latency.
        loss: Probability that a packet is lost.
        queue: Seconds that a packet may wait at the bucket.
    """
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
    """Read packets that wait at a device, at most AT_ONCE so that other devices get their turn."""
    packets: list[bytes] = []
    while len(packets) < AT_ONCE:
        try:
            packets.append(os.read(device, LONGEST_PACKET))
        except BlockingIOError:
            break
    return packets


def deliver(lanes: dict[bytes, Lane]) -> None:
    """Write every packet whose time has come to its destination. Packets without one (multicast,
    other versions of IP) are dropped.
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
