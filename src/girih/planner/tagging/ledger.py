"""The load that a placement puts on each device per example, and the resulting speed of the group (HT §3.2.1).

A device has cores, memory, and a link that sends and receives at the same time. Cores and links limit the speed. The
group is as fast as its busiest device, or as the shared cores if these are busier. Memory does not limit the speed, but
it can be full. It holds the parameters with their copies (:func:`~girih.planner.tagging.group.held_copies`). For each
net, it also holds the outputs and top-k's unsent values.

For each device, the ledger sums the amounts per example that it computes, keeps, sends and receives. Each move updates
these sums. All traffic between devices is between a trainer and a server. So two sums of :data:`Bytes` per server are
enough: one for each direction. Gradients go in the opposite direction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from girih.planner.operators import Edge
from girih.planner.tagging.components import divide
from girih.planner.tagging.group import HierarchicalGroup
from girih.planner.tagging.index import Index

CPU, NETWORK, MEMORY = "cpu", "network", "memory"


@dataclass(frozen=True, slots=True)
class Load:
    """The work of one device per example of the group. For trainers, it is the mean over all of them.

    Attributes:
        cpu_s: seconds that all of its cores are busy. network_s: seconds that its link is busy, in the busier
            direction.
        sent_bytes, received_bytes: bytes on the wire.
        memory_bytes: memory in use. It does not depend on the speed.
        memory: fraction of the device's memory in use; 0 without a limit.
    """

    cpu_s: float
    network_s: float
    sent_bytes: float
    received_bytes: float
    memory_bytes: float
    memory: float

    @property
    def busy_s(self) -> float:
        """Seconds per example that the cores or the link are busy, whichever is more."""
        return max(self.cpu_s, self.network_s)


@dataclass(frozen=True, slots=True)
class Utilization:
    """Fractions of a device's cores, link and memory in use; above 1 means overload."""

    cpu: float
    network: float
    memory: float


def utilization(device_loads: Mapping[str, Load], examples_per_s: float) -> dict[str, Utilization]:
    """Returns device → its utilization at ``examples_per_s``."""
    return {
        name: Utilization(examples_per_s * load.cpu_s, examples_per_s * load.network_s, load.memory)
        for name, load in device_loads.items()
    }


def shared_s(group: HierarchicalGroup, device_loads: Sequence[Load]) -> float:
    """Returns seconds per example that the shared cores are busy: Σ core-seconds / cores, or 0 without shared cores."""
    if group.cores is None:
        return 0.0
    of_trainer, *of_servers = (
        load.cpu_s * device.cores for load, device in zip(device_loads, group.devices, strict=True)
    )
    return (group.trainers * of_trainer + sum(of_servers)) / group.cores


def examples_per_s(group: HierarchicalGroup, device_loads: Sequence[Load]) -> float:
    """Returns the maximum speed of a group: 1 / max over devices of :attr:`Load.busy_s`, and :func:`shared_s`."""
    most = max(shared_s(group, device_loads), *(load.busy_s for load in device_loads))
    return 1 / most if most else math.inf


Bytes = tuple[float, float, float]
"""Bytes per example of a tensor: in memory, on the wire, and on the wire as its gradient."""
NOTHING: Bytes = (0.0, 0.0, 0.0)


class Ledger:
    """Sums per device. Device 0 is the trainers.

    The sums treat a server as one component, even if paths return to it. :meth:`move` ignores the traffic that dividing
    the component would add. :meth:`exact_loads` includes it. So :meth:`least_loads` are never above the exact loads.

    Attributes:
        compute_s: core-seconds of operators per example.
        parameter_bytes: bytes of parameters, each parameter once.
        output_bytes: bytes of operators' outputs per example.
        to_bytes, from_bytes: bytes to and from each server. A tensor counts once for each exchange that needs it.
        members: number of bundles on each device.
    """

    def __init__(self, index: Index, group: HierarchicalGroup, placed: Sequence[int]) -> None:
        self._index, self._group, self._sizes = index, group, _sizes(index, group)
        self.placed = list(placed)
        self.devices = [self.placed[bundle] for bundle in index.bundle_of]
        num = len(group.devices)
        self.compute_s = [0.0] * num
        self.parameter_bytes = [0] * num
        self.output_bytes = [0.0] * num
        self.to_bytes, self.from_bytes = [NOTHING] * num, [NOTHING] * num
        self.members = [0] * num
        self.bundle_s = [
            [
                sum(_seconds(index, number, device.flops_per_s) for number in bundle.operators)
                for bundle in index.bundles
            ]
            for device in group.devices
        ]
        self._bundle_output = [
            sum(index.operators[number].output_bytes_per_example for number in bundle.operators)
            for bundle in index.bundles
        ]
        self._touched = [
            sorted({*bundle.operators, *(p for number in bundle.operators for p in index.producers[number])})
            for bundle in index.bundles
        ]
        for bundle, device in enumerate(self.placed):
            self._place(bundle, device, 1)
        for producer in range(len(self.devices)):
            self._flow(producer, 1)

    def exact_loads(self) -> list[Load]:
        """Returns the load of each device, after components are divided as needed."""
        return self._loads(*self._divided())

    def least_loads(self) -> list[Load]:
        """Returns a lower bound of :meth:`exact_loads`: the load of each device without divided components."""
        requests = [0, *(1 if count else 0 for count in self.members[1:])]
        return self._loads(self.to_bytes, self.from_bytes, requests)

    def move(self, bundle: int, device: int) -> None:
        """Places a bundle on another device."""
        touched = self._touched[bundle]
        for producer in touched:
            self._flow(producer, -1)
        self._place(bundle, self.placed[bundle], -1)
        self.placed[bundle] = device
        for number in self._index.bundles[bundle].operators:
            self.devices[number] = device
        self._place(bundle, device, 1)
        for producer in touched:
            self._flow(producer, 1)

    def _divided(self) -> tuple[list[Bytes], list[Bytes], list[int]]:
        """Returns ``to_bytes``, ``from_bytes`` and the exchanges per net's step, after components are divided as
        needed.
        """
        part_of, stages = divide(self._index, self.devices)
        exchange = [0] * len(part_of)
        servers = [0]
        known: dict[tuple[int, int], int] = {}
        for number, part in enumerate(part_of):
            if part:
                key = (self.devices[number], stages[part])
                exchange[number] = known.setdefault(key, len(servers))
                if len(servers) == exchange[number]:
                    servers.append(key[0])
        num = len(self.to_bytes)
        to_bytes, from_bytes, requests = [NOTHING] * num, [NOTHING] * num, [0] * num
        for server in servers[1:]:
            requests[server] += 1
        for producer, device in enumerate(self.devices):
            up, down = flow(self._sizes[producer], producer, part_of, exchange)
            from_bytes[device] = _sum(from_bytes[device], up)
            for each, size in down.items():
                to_bytes[servers[each]] = _sum(to_bytes[servers[each]], size)
        return to_bytes, from_bytes, requests

    def _loads(self, to_bytes: list[Bytes], from_bytes: list[Bytes], requests: list[int]) -> list[Load]:
        """Computes loads from bytes, with codecs (HT §4.2). The work of trainers is divided by their number."""
        group, loads_of = self._group, []
        forward, backward = group.wire.activations, group.wire.gradients
        to_decode = forward.decode_s_per_byte + backward.encode_s_per_byte
        to_encode = forward.encode_s_per_byte + backward.decode_s_per_byte
        all_there, all_back = (reduce(_sum, each[1:], NOTHING) for each in (to_bytes, from_bytes))
        for number, device in enumerate(group.devices):
            arrived, left, asked, share = to_bytes[number], from_bytes[number], requests[number], 1
            cpu_s = sent = received = 0.0
            if not number:
                arrived, left, asked, share = all_back, all_there, sum(requests), group.trainers
                cpu_s, sent = group.trainer_cpu_s, group.trainer_sent_bytes
                received = group.trainer_received_bytes
            out, back = left[1] + arrived[2], arrived[1] + left[2]
            parameters = self.parameter_bytes[number]
            averaged = parameters / group.average_every_examples if group.average_every_examples else 0.0
            cpu_s += self.compute_s[number] + arrived[0] * to_decode + left[0] * to_encode
            cpu_s += (parameters * group.update_s_per_byte + asked * 2 * group.request_s) / group.batch_size
            cpu_s = (cpu_s + (out + back) * group.byte_s / 2) / share / device.cores
            sent, received = ((sent + out) / share + averaged, (received + back) / share + averaged)
            kept = self.output_bytes[number] + arrived[0] + arrived[0] * backward.kept
            memory_bytes = parameters * group.held_copies(number)
            memory_bytes += kept * group.nets_on(number) * group.batch_size
            loads_of.append(
                Load(
                    cpu_s=cpu_s,
                    network_s=max(sent, received) / device.bytes_per_s if device.bytes_per_s else 0.0,
                    sent_bytes=sent,
                    received_bytes=received,
                    memory_bytes=memory_bytes,
                    memory=memory_bytes / device.memory_bytes if device.memory_bytes else 0.0,
                )
            )
        return loads_of

    def _place(self, bundle: int, device: int, sign: int) -> None:
        self.compute_s[device] += sign * self.bundle_s[device][bundle]
        self.parameter_bytes[device] += sign * self._index.bundles[bundle].parameter_bytes
        self.output_bytes[device] += sign * self._bundle_output[bundle]
        self.members[device] += sign

    def _flow(self, producer: int, sign: int) -> None:
        home = self.devices[producer]
        up, down = flow(self._sizes[producer], producer, self.devices, self.devices)
        self.from_bytes[home] = _sum(self.from_bytes[home], up, sign)
        for device, size in down.items():
            self.to_bytes[device] = _sum(self.to_bytes[device], size, sign)


_OperatorOutput = tuple[Bytes, Mapping[int, Bytes]]
"""The bytes of an output as a whole, and the bytes that each consumer reads of it."""


def flow(
    output: _OperatorOutput, producer: int, part: Sequence[int], exchange: Sequence[int]
) -> tuple[Bytes, dict[int, Bytes]]:
    """Returns the bytes that an operator's output adds to traffic: up to the trainer, and down to each exchange that
    reads it.

    An output without readers is the output of the net. It goes to the trainer, for the loss.

    Args:
        part: for each operator, its component, or 0 on trainers.
        exchange: for each operator, the exchange of its component, or 0 on trainers.
    """
    home, (whole, readers) = part[producer], output
    up = NOTHING if readers else whole
    down: dict[int, Bytes] = {}
    for consumer, size in readers.items():
        if part[consumer] != home:
            up = max(up, size)
            if exchange[consumer]:
                down[exchange[consumer]] = max(down.get(exchange[consumer], NOTHING), size)
    return (up if home else NOTHING), down


def _sizes(index: Index, group: HierarchicalGroup) -> list[_OperatorOutput]:
    """Returns the bytes of each operator's output, by reader, in a message of one net's batch."""
    transfers: list[_OperatorOutput] = []
    for operator, readers in zip(index.operators, index.consumers, strict=True):
        whole = Edge(producer=operator.name, consumer="", bytes_per_example=operator.output_bytes_per_example)
        sizes = {consumer: _bytes(edge, group) for consumer, edge in readers.items()}
        transfers.append((_bytes(whole, group), sizes))
    return transfers


def _bytes(edge: Edge, group: HierarchicalGroup) -> Bytes:
    forward, backward = group.wire.activations, group.wire.gradients
    sent = forward.sent_bytes(edge, group.batch_size)
    return edge.bytes_per_example, sent, backward.sent_bytes(edge, group.batch_size)


def _sum(one: Bytes, other: Bytes, sign: int = 1) -> Bytes:
    return one[0] + sign * other[0], one[1] + sign * other[1], one[2] + sign * other[2]


def _seconds(index: Index, number: int, flops_per_s: float) -> float:
    operator = index.operators[number]
    if operator.seconds_per_example is not None:
        return operator.seconds_per_example
    return operator.flops_per_example / flops_per_s
