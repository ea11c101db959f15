"""A slow and lossy network between namespaces: forwards the packets of TUN devices by their destination address.

    slow_link.py DELAY_MS LOSS NAMESPACE...

Makes a device eth0 in each namespace, prints "ready" and forwards until it is killed. Host i has the address whose last
number is i + 1. Every packet waits DELAY_MS; a share LOSS of them is dropped.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 1, 0x1000
MOST_WAITING = 10_000  # packets, as a router's queue has an end


def open_tun(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return fd


def forward(devices: list[int], delay_s: float, loss: float) -> None:
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        left_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for fd in select.select(devices, [], [], left_s)[0]:
            packet = os.read(fd, 65536)
            version, to = packet[0] >> 4, packet[19] - 1
            if version != 4 or not 0 <= to < len(devices) or random.random() < loss or len(waiting) > MOST_WAITING:
                continue
            count += 1  # packets of one delay stay in order
            heapq.heappush(waiting, (time.monotonic() + delay_s, count, devices[to], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, device, packet = heapq.heappop(waiting)
            with contextlib.suppress(OSError):  # the link is down, or its queue is full: a lost packet
                os.write(device, packet)


def main() -> None:
    delay_s, loss, namespaces = float(sys.argv[1]) / 1e3, float(sys.argv[2]), sys.argv[3:]
    devices = []
    for index, namespace in enumerate(namespaces):
        name = f"dmktun{os.getpid() % 10000}{index}"
        devices.append(open_tun(name))
        subprocess.run(["ip", "link", "set", name, "netns", namespace, "name", "eth0"], check=True)
    print("ready", flush=True)
    forward(devices, delay_s, loss)


main()
