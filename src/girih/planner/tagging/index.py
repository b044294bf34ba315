"""An operator graph with numbered operators: their readers, their producers, and the operators that move together.

Operators are numbered in the graph's order. Device 0 is the trainers. Device 1 + s is server s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from girih.errors import ConfigError, nearest
from girih.planner.operators import TRAINER, Edge, OperatorGraph, Tagging, server_name


@dataclass(frozen=True, slots=True)
class Bundle:
    """Operators that are placed together: all operators of one module, or one operator without a module.

    Attributes:
        operators: their numbers.
        parameter_bytes: bytes of all their parameters. The graph counts a shared parameter with one operator.
        movable: whether all of them can be moved.
    """

    operators: tuple[int, ...]
    parameter_bytes: int
    movable: bool


class Index:
    """The lookups of a graph for tagging.

    Attributes:
        consumers: for each operator, consumer → the edge to it. If there are several edges, the edge with the most
            bytes.
        producers: for each operator, its producers in order.
        bundles: the bundles, in the order of their first operators.
        bundle_of: the bundle number of each operator.
    """

    def __init__(self, graph: OperatorGraph) -> None:
        self.graph = graph
        self.operators = graph.operators
        numbers = {operator.name: number for number, operator in enumerate(graph.operators)}
        self.consumers: list[dict[int, Edge]] = [{} for _ in numbers]
        for edge in graph.edges:
            readers, consumer = self.consumers[numbers[edge.producer]], numbers[edge.consumer]
            if edge.bytes_per_example >= readers.get(consumer, edge).bytes_per_example:
                readers[consumer] = edge
        self.producers: list[list[int]] = [[] for _ in numbers]
        for producer, readers in enumerate(self.consumers):
            for consumer in readers:
                self.producers[consumer].append(producer)
        self._before: list[int] = []  # for each operator, a bit for each operator that it needs
        for needed in self.producers:
            before = 0
            for producer in needed:
                before |= self._before[producer] | 1 << producer
            self._before.append(before)
        members: dict[str, list[int]] = {}
        for number, operator in enumerate(graph.operators):
            members.setdefault(f"module {operator.module}" if operator.module else f"{number}", []).append(
                number
            )
        self.bundles = tuple(self._bundle(numbers) for numbers in members.values())
        self.bundle_of = [0] * len(graph.operators)
        for bundle, each in enumerate(self.bundles):
            for number in each.operators:
                self.bundle_of[number] = bundle

    def _bundle(self, numbers: Sequence[int]) -> Bundle:
        operators = [self.operators[number] for number in numbers]
        return Bundle(
            operators=tuple(numbers),
            parameter_bytes=sum(operator.parameter_bytes for operator in operators),
            movable=all(operator.movable for operator in operators),
        )

    def are_independent(self, numbers: Sequence[int]) -> bool:
        """Returns whether there are several operators, and none of them needs the output of another one."""
        together = sum(1 << number for number in numbers)
        return len(numbers) > 1 and not any(self._before[number] & together for number in numbers)

    def names(self, bundle: int) -> tuple[str, ...]:
        """Returns the names of a bundle's operators."""
        return tuple(self.operators[number].name for number in self.bundles[bundle].operators)

    def tagging(self, placed: Sequence[int]) -> dict[str, str]:
        """Returns operator → device, from the device of each bundle."""
        return {
            operator.name: device_name(placed[bundle])
            for operator, bundle in zip(self.operators, self.bundle_of, strict=True)
        }

    def placed(self, tagging: Tagging, num_devices: int | None = None) -> list[int]:
        """Returns the device of each bundle, from a tagging of the same graph.

        Args:
            num_devices: number of devices in the group; None accepts any number of servers.

        Raises:
            ConfigError: the tagging is for another graph, or for a group of another size.
        """
        names = {operator.name for operator in self.operators}
        count = 1 + len(names) if num_devices is None else num_devices
        devices = [device_name(device) for device in range(count)]
        expected = (
            "'trainer' or 'server 0' and so on" if num_devices is None else f"one of {', '.join(devices)}"
        )
        for name in (*tagging, *names):
            if name not in names:
                raise ConfigError(f"tagging: {name!r} is not an operator of the model{nearest(name, names)}")
            if (device := tagging.get(name, "no device")) not in devices:
                raise ConfigError(f"tagging: {name!r} on {device!r}; expected {expected}")
        placed = []
        for number, bundle in enumerate(self.bundles):
            names_by_device = {tagging[name]: name for name in self.names(number)}
            if len(names_by_device) > 1:
                torn = " and ".join(f"{name!r} on {device!r}" for device, name in names_by_device.items())
                raise ConfigError(f"tagging: {torn}; expected operators of one module on one device")
            ((device, name),) = names_by_device.items()
            if device != TRAINER and not bundle.movable:
                raise ConfigError(f"tagging: {name!r} on {device!r}; it must stay on the trainer")
            placed.append(device_number(device))
        return placed

    def devices(self, tagging: Tagging) -> list[int]:
        """Returns the device number of each operator."""
        return [device_number(tagging[operator.name]) for operator in self.operators]


def device_name(device: int) -> str:
    """Returns the name of a device in a tagging."""
    return server_name(device - 1) if device else TRAINER


def device_number(name: str) -> int:
    """Inverts :func:`device_name`."""
    return 0 if name == TRAINER else 1 + int(name.removeprefix(server_name(0)[:-1]))
