"""Hosts that are network namespaces of this machine, joined by a bridge over links of a chosen bandwidth.

A host may also have a delay, and a bound on its processor time (``cpu_groups``): a slow host. Without netem, a process delays the packets
(``delays``). Needs root, ``ip`` and ``tc`` (iproute2).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import NoReturn

import cpu_groups
import delays

from girih.cluster.roles import HostSpec

PREFIX = f"g{os.getpid()}"
"""Of all names, so that benchmarks side by side leave each other alone."""
BRIDGE = f"{PREFIX}-br"
BURST_BYTES = 98_304
QUEUE_BYTES = 1_000_000
"""The bytes that a link holds before it drops, at any rate: a port's share of a switch's memory. With a queue of a few milliseconds (125 kB at 200 Mbit/s)
TCP lost so much of what several senders sent to one host that links stood idle for a third of the time."""
ROLES = ("loader", "embedding-worker", "embedding-server")
DELAYED_PACKETS = 100_000
"""The packets under way that a delay holds."""
LETTERS = {
    "t": "trainer", "w": "embedding-worker", "s": "embedding-server", "l": "loader", "g": "group-server",
    "d": "dense-server",
}  # fmt: skip
"""First letter of a host's name → the role that has it to itself, see :func:`apart`."""


@dataclass(frozen=True)
class Host:
    """The speed of one host.

    Attributes:
        rate: of its link in each direction, as ``tc`` writes it: ``200mbit``; None bounds nothing.
        delay_ms: of every packet that it sends, one way.
        cores: the processor time of its processes; None: all cores.
    """

    rate: str | None = None
    delay_ms: float = 0.0
    cores: float | None = None


@dataclass(frozen=True)
class Hosts:
    """What runs where, and what to count.

    Attributes:
        places: name of a host → the place of its processes.
        links: name of a host → the root's end of its link.
        groups: name of a host with ``cores`` → its control group, which bounds nothing yet, see :meth:`limits`.
        cores: name of such a host → its cores.
        relay: the pid of the process that delays packets; None if the kernel does, or if nothing is delayed.
    """

    places: dict[str, HostSpec]
    links: dict[str, str]
    groups: dict[str, cpu_groups.CpuGroup] = field(default_factory=dict)
    cores: dict[str, float] = field(default_factory=dict)
    relay: int | None = None

    def limits(self, *, lifted: bool = False) -> dict[str, str]:
        """File → content that bounds all hosts to their cores, or lifts the bounds. Processes start without bounds."""
        return {
            file: text
            for name, cores in self.cores.items()
            for file, text in self.groups[name].limit(None if lifted else cores).items()
        }


def missing(*, delay: bool = False, cores: bool = False) -> str | None:
    """Why there can be no such network here; None where there can.

    Args:
        delay: links have a delay. cores: hosts have a bound on processor time.
    """
    if not all(shutil.which(tool) for tool in ("ip", "tc", "nsenter")):
        return "needs ip, tc and nsenter"
    done = subprocess.run(
        ["ip", "netns", "add", f"{PREFIX}-try"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return f"network namespaces cannot be made here: {done.stderr.strip()}"
    _ip("netns", "delete", f"{PREFIX}-try")
    if delay and not has_netem() and (reason := delays.missing()) is not None:
        return f"links can have no delay here: this kernel has no netem, and {reason}"
    return cpu_groups.missing() if cores else None


@cache
def has_netem() -> bool:
    """True if the kernel can delay packets. Needs root."""
    _ip("netns", "add", f"{PREFIX}-try")
    shape = ("tc", "-n", f"{PREFIX}-try", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    done = subprocess.run(shape, capture_output=True, check=False)
    _ip("netns", "delete", f"{PREFIX}-try")
    return done.returncode == 0


@contextmanager
def network(hosts: Sequence[str] | Mapping[str, Host], rate: str | None = None) -> Iterator[Hosts]:
    """Hosts of these names (at most four letters each); all is gone afterwards, also when SIGTERM ends this process.

    Args:
        hosts: names, or name → speed. rate: that of all hosts, if ``hosts`` are names alone.
    """
    speeds = hosts if isinstance(hosts, Mapping) else dict.fromkeys(hosts, Host(rate))
    _clear()
    before = signal.signal(signal.SIGTERM, _end)
    try:
        _ip("link", "add", BRIDGE, "type", "bridge")
        _ip("link", "set", BRIDGE, "up")
        made = Hosts({}, {})
        delayed = [
            link
            for number, (name, speed) in enumerate(speeds.items())
            if (link := _add_host(made, name, speed, f"10.77.0.{number + 1}")) is not None
        ]
        with delays.relaying(delayed) as relay:
            yield replace(made, relay=relay)
    finally:
        _clear()
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def _add_host(made: Hosts, name: str, speed: Host, address: str) -> delays.Link | None:
    """Adds a host; returns its link if a relay must delay its packets."""
    host, outer, inner = f"{PREFIX}-{name}", f"{PREFIX}-o-{name}", f"{PREFIX}-i-{name}"
    _ip("netns", "add", host)
    link = None
    if speed.delay_ms and not has_netem():
        link = delays.make(inner, outer, speed.delay_ms)
        _ip("link", "set", inner, "netns", host)
    else:
        _ip("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", host)
    _ip("link", "set", outer, "master", BRIDGE, "up")
    _ip("-n", host, "address", "add", f"{address}/24", "dev", inner)
    for device in ("lo", inner):
        _ip("-n", host, "link", "set", device, "up")
    above = ["root"]
    if speed.delay_ms and link is None:
        delay = ["netem", "delay", f"{speed.delay_ms}ms", "limit", str(DELAYED_PACKETS)]
        _call("tc", "-n", host, "qdisc", "add", "dev", inner, "root", "handle", "1:", *delay)
        above = ["parent", "1:1"]
    if speed.rate is not None:
        shape = ["tbf", "rate", speed.rate, "burst", str(BURST_BYTES), "limit", str(QUEUE_BYTES)]
        _call("tc", "qdisc", "add", "dev", outer, "root", *shape)
        _call("tc", "-n", host, "qdisc", "add", "dev", inner, *above, *shape)
    enter: tuple[str, ...] = ("nsenter", f"--net=/run/netns/{host}")
    environment = {"GLOO_SOCKET_IFNAME": inner}
    if speed.cores is not None:
        made.groups[name] = group = cpu_groups.make(host)
        made.cores[name] = speed.cores
        enter = (*group.command, *enter)
        threads = str(max(1, int(speed.cores)))
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), threads)
    made.places[name] = HostSpec(enter, address, environment)
    made.links[name] = outer
    return link


@contextmanager
def nowhere() -> Iterator[Hosts]:
    """No hosts: all processes are on this machine."""
    yield Hosts({}, {})


def trainers_apart(hosts: Hosts, trainers: int) -> dict[str, HostSpec]:
    """Places of processes: trainer i on the host ``t<i>``, the other roles on ``s``."""
    if not hosts.places:
        return {}
    places = {f"trainer {rank}": hosts.places[f"t{rank}"] for rank in range(trainers)}
    return places | dict.fromkeys(ROLES, hosts.places["s"])


def names_apart(counts: Mapping[str, int]) -> list[str]:
    """Names of hosts, one a process: ``t0``, ``w0`` and so on.

    Args:
        counts: role → processes.
    """
    return [f"{letter}{index}" for letter, role in LETTERS.items() for index in range(counts.get(role, 0))]


def apart(hosts: Hosts) -> dict[str, HostSpec]:
    """Places of processes on hosts of :func:`names_apart`: each has one to itself, as in Persia's cluster."""
    return {f"{LETTERS[name[0]]} {name[1:]}": host for name, host in hosts.places.items()}


def lose(hosts: Hosts, name: str) -> None:
    """Takes the link of a host away, then ends its processes: the others receive nothing more from it, as after a power cut."""
    _ip("link", "delete", hosts.links[name])
    _kill(pids(name))


def pids(name: str) -> set[int]:
    """The processes of a host."""
    return _pids(f"{PREFIX}-{name}")


def _pids(namespace: str) -> set[int]:
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False)
    return set(map(int, listed.stdout.split()))


def _kill(processes: Iterable[int]) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _clear() -> None:
    """Ends what lives in this process's hosts, then the hosts; and those of processes that are gone."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    links = [path.name for path in Path("/sys/class/net").glob("g*-*")]
    for link in (name for name in links if _ours(name) and not name.endswith("-br")):
        subprocess.run(["ip", "link", "delete", link], capture_output=True, check=False)
    for host in (line.split()[0] for line in listed.splitlines() if line.strip()):
        if _ours(host):
            _kill(_pids(host))
            _ip("netns", "delete", host)
    cpu_groups.remove_all(_ours)
    for bridge in (name for name in links if _ours(name) and name.endswith("-br")):
        subprocess.run(["ip", "link", "delete", bridge], capture_output=True, check=False)


def _ours(name: str) -> bool:
    """Whether a name was given by this process, or by one that is gone."""
    found = re.match(r"g(\d+)-", name)
    return found is not None and (found[1] == str(os.getpid()) or not Path("/proc", found[1]).exists())


def _ip(*words: str) -> None:
    _call("ip", *words)


def _call(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
