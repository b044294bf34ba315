"""The books of a placement: what each device computes, keeps, sends and receives per example, changed move by move.

All that goes between devices goes between a trainer and a server, so that two sums of :data:`Bytes` say it for each server: to it, and
from it. Their gradients come back the other way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from girih.planner.operators import Edge
from girih.planner.tagging.components import Division
from girih.planner.tagging.group import HierarchicalGroup
from girih.planner.tagging.index import Index

Bytes = tuple[float, float, float]
"""Bytes per example of a tensor: in memory, on the wire as the codec of activations writes it, and its gradient's on the wire."""
NOTHING: Bytes = (0.0, 0.0, 0.0)


class Ledger:
    """Sums per device; 0 is the trainers.

    A server counts as one component here, whatever path leads back to it: what a division adds is not in the books of
    :meth:`move`, and is in those of :meth:`exact`. So the first are never above the second.

    Attributes:
        compute_s: core-seconds of operators per example.
        parameter_bytes: once each. output_bytes: of operators, per example.
        to_bytes, from_bytes: to and from each server, once for each exchange that a tensor is needed in.
        requests: exchanges with each server in a net's step.
    """

    def __init__(self, index: Index, group: HierarchicalGroup, placed: Sequence[int]) -> None:
        self._index, self._sizes = index, _sizes(index, group)
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

    @property
    def requests(self) -> list[int]:
        """One exchange with each server that has anything to do."""
        return [0, *(1 if count else 0 for count in self.members[1:])]

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

    def exact(self, division: Division) -> tuple[list[Bytes], list[Bytes], list[int]]:
        """``to_bytes``, ``from_bytes`` and ``requests`` where components are what they are."""
        exchange = [0] * len(division.part)
        servers = [0]
        known: dict[tuple[int, int], int] = {}
        for number, part in enumerate(division.part):
            if part:
                key = (self.devices[number], division.stages[part])
                exchange[number] = known.setdefault(key, len(servers))
                if len(servers) == exchange[number]:
                    servers.append(key[0])
        num = len(self.to_bytes)
        to_bytes, from_bytes, requests = [NOTHING] * num, [NOTHING] * num, [0] * num
        for server in servers[1:]:
            requests[server] += 1
        for producer, device in enumerate(self.devices):
            up, down = flow(self._sizes[producer], producer, division.part, exchange)
            from_bytes[device] = _sum(from_bytes[device], up)
            for each, size in down.items():
                to_bytes[servers[each]] = _sum(to_bytes[servers[each]], size)
        return to_bytes, from_bytes, requests

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


@dataclass(frozen=True, slots=True)
class _OperatorOutput:
    """The tensors of an operator: ``readers`` has each consumer's, ``unread`` is the whole output where there is none."""

    unread: Bytes
    readers: Mapping[int, Bytes]


def flow(
    output: _OperatorOutput, producer: int, part: Sequence[int], exchange: Sequence[int]
) -> tuple[Bytes, dict[int, Bytes]]:
    """Bytes of an operator's output that go up to the trainer, and down to each exchange that needs it.

    An output that nobody reads is the net's, and a trainer has its loss.

    Args:
        part: of each operator, its component, or 0 on trainers.
        exchange: of each operator, the exchange that its component takes part in, or 0 on trainers.
    """
    home = part[producer]
    up = NOTHING if output.readers else output.unread
    down: dict[int, Bytes] = {}
    for consumer, size in output.readers.items():
        if part[consumer] != home:
            up = max(up, size)
            if exchange[consumer]:
                down[exchange[consumer]] = max(down.get(exchange[consumer], NOTHING), size)
    return (up if home else NOTHING), down


def _sizes(index: Index, group: HierarchicalGroup) -> list[_OperatorOutput]:
    """The bytes of each operator's output, by its readers, in a message of one net's batch."""
    transfers = []
    for operator, readers in zip(index.operators, index.consumers, strict=True):
        whole = Edge(producer=operator.name, consumer="", bytes_per_example=operator.output_bytes_per_example)
        sizes = {consumer: _bytes(edge, group) for consumer, edge in readers.items()}
        transfers.append(_OperatorOutput(_bytes(whole, group), sizes))
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
