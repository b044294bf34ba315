"""Links with a delay on kernels without netem: a process holds each packet, and passes it on when its delay is over.

A link is a pair of TAP devices, as a pair of veth devices would be: one in the host, one on the bridge. Packets, TCP, queues and rates are those
of the kernel. Packets of up to 64 KiB pass unsegmented (``IFF_VNET_HDR``), the same as over veth. The relay runs in real time, if the
kernel permits it, and belongs to no host: no quota slows it down. Needs root and ``/dev/net/tun``.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import json
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

TUN = Path("/dev/net/tun")
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x2, 0x1000, 0x4000
OFFLOADS = 0x1 | 0x2 | 0x4
"""Checksums, and TCP segments of IPv4 and IPv6: the devices pass on packets without both."""
LARGEST_BYTES = 1 << 17
"""More than a packet and its headers."""
PRIORITY = 1
"""Of real time."""


@dataclass(frozen=True)
class Link:
    """The two ends of a link.

    Attributes:
        inner, outer: file descriptors of the host's device, and of the bridge's.
        delay_s: of packets from inner to outer. Packets of the other direction pass at once.
    """

    inner: int
    outer: int
    delay_s: float


def missing() -> str | None:
    """Why there can be no such links here; None if there can."""
    try:
        os.close(_tap(f"g{os.getpid()}-tap"))
    except OSError as error:
        return f"{TUN}: {error.strerror}"
    return None


def make(inner: str, outer: str, delay_ms: float) -> Link:
    """Makes the devices of a link. They disappear when their descriptors are closed.

    Args:
        inner, outer: names of the devices, at most 15 letters each. Both are in this process's network namespace at first.
    """
    return Link(_tap(inner), _tap(outer), delay_ms / 1e3)


@contextmanager
def relaying(links: Sequence[Link]) -> Iterator[int | None]:
    """Runs a relay for these links.

    Yields:
        The pid of the relay. None without links.
    """
    if not links:
        yield None
        return
    after = {link.inner: (link.outer, link.delay_s) for link in links}
    after |= {link.outer: (link.inner, 0.0) for link in links}
    relay = subprocess.Popen(
        [sys.executable, __file__, json.dumps(after)], stdin=subprocess.PIPE, pass_fds=tuple(after)
    )
    try:
        for device in after:
            os.close(device)
        yield relay.pid
    finally:
        relay.communicate()  # closes its standard input, which ends it


def relay(after: Mapping[int, tuple[int, float]], end: int) -> None:
    """Passes packets on, in order.

    Args:
        after: descriptor of a device → the one that gets its packets, and their delay in seconds.
        end: a descriptor that ends the relay when it can be read.
    """
    held: list[tuple[float, int, int, bytes]] = []
    order = itertools.count()
    sources = [end, *after]
    while True:
        wait_s = max(0.0, held[0][0] - time.perf_counter()) if held else None
        ready, _, _ = select.select(sources, (), (), wait_s)
        now_s = time.perf_counter()
        for source in ready:
            if source == end:
                return
            target, delay_s = after[source]
            heapq.heappush(held, (now_s + delay_s, next(order), target, os.read(source, LARGEST_BYTES)))
        while held and held[0][0] <= time.perf_counter():
            _, _, target, packet = heapq.heappop(held)
            with suppress(OSError):  # the device is down: the packet is lost
                os.write(target, packet)


def _tap(name: str) -> int:
    device = os.open(TUN, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(
            device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR)
        )
        fcntl.ioctl(device, TUNSETOFFLOAD, OFFLOADS)
    except OSError:
        os.close(device)
        raise
    return device


def _hurry() -> None:
    """Asks the kernel to run this process as soon as it is due."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    with suppress(OSError):
        Path("/proc/self/timerslack_ns").write_text("1")  # by default, waits end up to 50 µs late
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))


if __name__ == "__main__":
    _hurry()
    links = json.loads(sys.argv[1]).items()
    relay({int(device): (target, delay_s) for device, (target, delay_s) in links}, sys.stdin.fileno())
