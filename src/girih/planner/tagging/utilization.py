"""The load that a placement puts on each device per example, and the examples per second that the group can do (HT §3.2.1).

A device is used by its cores, by its link, which sends and receives side by side, and by its memory. Cores and link bound the speed: the group
is as fast as its busiest device, or as the cores that devices share, whichever are busier. Memory is full or not; it does not bound a speed. It has parameters, with what is kept beside them
(:func:`~girih.planner.tagging.group.held_copies`), and for the examples of each net's batch what operators give out and what top-k leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from girih.planner.operators import OperatorGraph, Tagging
from girih.planner.tagging.components import divide
from girih.planner.tagging.group import Device, HierarchicalGroup
from girih.planner.tagging.index import Index, device_name
from girih.planner.tagging.ledger import Bytes, Ledger

CPU, NETWORK, MEMORY = "cpu", "network", "memory"


@dataclass(frozen=True, slots=True)
class Load:
    """The work of one device for an example of the group; of trainers, the mean over them.

    Attributes:
        cpu_s: seconds that all of its cores are busy. network_s: seconds that its link is, in its busier direction.
        sent_bytes, received_bytes: on the wire.
        memory_bytes: in all, whatever the speed. memory: the share of the device's that it is; 0 where nothing bounds it.
    """

    cpu_s: float
    network_s: float
    sent_bytes: float
    received_bytes: float
    memory_bytes: float
    memory: float

    @property
    def busy_s(self) -> float:
        """Seconds per example that the busier of cores and link takes."""
        return max(self.cpu_s, self.network_s)


@dataclass(frozen=True, slots=True)
class Utilization:
    """Shares of a device's cores, link and memory that are in use; above 1 is more than there is."""

    cpu: float
    network: float
    memory: float


def loads(graph: OperatorGraph, tagging: Tagging, group: HierarchicalGroup) -> dict[str, Load]:
    """Device → what it does per example; the operators of a module must be on one device."""
    index = Index(graph)
    devices = index.devices(tagging)
    ledger = Ledger(index, group, [devices[bundle.operators[0]] for bundle in index.bundles])
    return {device_name(number): load for number, load in enumerate(exact_loads(index, group, ledger))}


def utilization(device_loads: Mapping[str, Load], examples_per_s: float) -> dict[str, Utilization]:
    """Returns device → its utilization at ``examples_per_s``."""
    return {
        name: Utilization(examples_per_s * load.cpu_s, examples_per_s * load.network_s, load.memory)
        for name, load in device_loads.items()
    }


def shared_s(group: HierarchicalGroup, device_loads: Sequence[Load]) -> float:
    """Seconds per example that the cores which devices share are busy: Σ core-seconds / cores; 0 where each has its own."""
    if group.cores is None:
        return 0.0
    of_trainer, *of_servers = (
        load.cpu_s * device.cores for load, device in zip(device_loads, group.devices, strict=True)
    )
    return (group.trainers * of_trainer + sum(of_servers)) / group.cores


def examples_per_s(group: HierarchicalGroup, device_loads: Sequence[Load]) -> float:
    """The most examples per second of a group: 1 / max over devices of :attr:`Load.busy_s`, and :func:`shared_s`."""
    most = max(shared_s(group, device_loads), *(load.busy_s for load in device_loads))
    return 1 / most if most else math.inf


def exact_loads(index: Index, group: HierarchicalGroup, ledger: Ledger) -> list[Load]:
    """The load of each device, with components divided as they will be."""
    return _loads(group, ledger, *ledger.exact(divide(index, ledger.devices)))


def least_loads(group: HierarchicalGroup, ledger: Ledger) -> list[Load]:
    """The load of each device, where no component had to be divided: never more than :func:`exact_loads`."""
    return _loads(group, ledger, ledger.to_bytes, ledger.from_bytes, ledger.requests)


def _loads(
    group: HierarchicalGroup,
    ledger: Ledger,
    to_bytes: list[Bytes],
    from_bytes: list[Bytes],
    requests: list[int],
) -> list[Load]:
    """Bytes and codecs by (HT §4.2); what trainers do is divided by their number."""
    forward, backward = group.wire.activations, group.wire.gradients
    device_loads = []
    of_trainers = [group.trainer_cpu_s, group.trainer_sent_bytes, group.trainer_received_bytes, 0.0]
    for number, server in enumerate(group.servers, start=1):
        there, there_packed, there_returned = to_bytes[number]
        back, back_packed, back_returned = from_bytes[number]
        sent, received = back_packed + there_returned, there_packed + back_returned
        parameters = ledger.parameter_bytes[number]
        moved_s = (sent + received) * group.byte_s / 2
        asked_s = requests[number] * 2 * group.request_s / group.batch_size + moved_s
        cpu_s = (
            ledger.compute_s[number]
            + there * (forward.decode_s_per_byte + backward.encode_s_per_byte)
            + back * (forward.encode_s_per_byte + backward.decode_s_per_byte)
            + parameters * group.update_s_per_byte / group.batch_size
            + asked_s
        )
        averaged = parameters / group.average_every_examples if group.average_every_examples else 0.0
        each_example = ledger.output_bytes[number] + there + there * backward.kept
        kept = each_example * group.nets_on(number) * group.batch_size
        memory = parameters * group.held_copies(number) + kept
        device_loads.append(_load(server, cpu_s, sent + averaged, received + averaged, memory))
        of_trainers[0] += asked_s
        of_trainers[0] += there * (forward.encode_s_per_byte + backward.decode_s_per_byte)
        of_trainers[0] += back * (forward.decode_s_per_byte + backward.encode_s_per_byte)
        of_trainers[1] += received
        of_trainers[2] += sent
        of_trainers[3] += back + back * backward.kept
    cpu_s, sent, received, kept = of_trainers
    parameters = ledger.parameter_bytes[0]
    averaged = parameters / group.average_every_examples if group.average_every_examples else 0.0
    cpu_s += ledger.compute_s[0] + parameters * group.update_s_per_byte / group.batch_size
    memory = (
        parameters * group.held_copies(0) + (ledger.output_bytes[0] + kept) * group.nets * group.batch_size
    )
    each = group.trainers
    trainer = _load(group.trainer, cpu_s / each, sent / each + averaged, received / each + averaged, memory)
    return [trainer, *device_loads]


def _load(device: Device, cpu_s: float, sent: float, received: float, memory_bytes: float) -> Load:
    return Load(
        cpu_s=cpu_s / device.cores,
        network_s=max(sent, received) / device.bytes_per_s if device.bytes_per_s else 0.0,
        sent_bytes=sent,
        received_bytes=received,
        memory_bytes=memory_bytes,
        memory=memory_bytes / device.memory_bytes if device.memory_bytes else 0.0,
    )
