"""Describes a group of trainers and group servers, and the work of its net in a step.

The description follows from the facts about the machine and the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from girih.planner.facts import DenseCost, Facts
from girih.planner.operators import OperatorGraph, Tagging
from girih.planner.tagging.components import components
from girih.planner.tagging.group import Device, HierarchicalGroup, WireCost
from girih.planner.tagging.tag import Tagged, tag
from girih.planner.tagging.wires import codec_of
from girih.planner.traffic import NOMINAL


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The work and the messages of one step of a net, spread over the devices of its group.

    Attributes:
        trainer_s: core-seconds of the net's trainer. servers_s: core-seconds of each server.
        sent_bytes, received_bytes: bytes between the trainer and the servers.
        latency_s: seconds of the messages' latency, in sequence.
        busiest: number of the server with the most bytes.
    """

    trainer_s: float
    servers_s: tuple[float, ...]
    sent_bytes: float
    received_bytes: float
    latency_s: float
    busiest: int


def group_of(graph: OperatorGraph, facts: Facts, options: Mapping[str, Any]) -> HierarchicalGroup:
    """Returns the group that ``[strategy]`` describes, with calibrated speeds, or nominal speeds without a calibration.

    If the pass was not measured (:func:`timed`), girih assumes the speed of the calibrated matrix products. A device
    can use the machine's cores that its nets keep busy; on a server, each net has one thread. All devices share the
    cores of the machines.

    Args:
        options: options of :class:`girih.strategies.hierarchical.Hierarchical`, by name.
    """
    calibration, dense, examples = facts.calibration, facts.dense_cost, net_examples(facts, options)
    trainers, servers = options["trainers_per_group"], options["servers_per_group"]
    link = None if calibration is None else calibration.links[options["transport"]]
    of_machine = math.inf if calibration is None else calibration.cores / calibration.machines
    nets = options["nets"]
    device = Device(
        cores=1.0 if calibration is None else min(of_machine, nets * max(1, facts.threads // nets)),
        flops_per_s=NOMINAL.flops_per_s
        if calibration is None or calibration.work is None
        else calibration.work.flops_per_s,
        bytes_per_s=NOMINAL.bytes_per_s if link is None else link.bytes_per_s,
        memory_bytes=_process_bytes(facts, options),
    )
    server = replace(device, cores=1.0 if calibration is None else min(of_machine, nets * trainers))
    parameter_bytes = sum(operator.parameter_bytes for operator in graph.operators)
    moved_s = (
        0.0
        if dense is None or not parameter_bytes
        else dense.update_s * _busy(facts, dense) / parameter_bytes
    )
    averaged = options["groups"] > 1
    return HierarchicalGroup(
        trainers=trainers,
        nets=nets,
        batch_size=examples,
        trainer=device,
        servers=(server,) * servers,
        cores=None if calibration is None else calibration.cores / options["groups"],
        wire=WireCost(
            activations=codec_of(options["wire_activations"], calibration),
            gradients=codec_of(options["wire_dense_gradients"], calibration),
        ),
        parameter_copies=1.0 if dense is None else max(1.0, dense.parameter_copies),
        update_s_per_byte=moved_s,
        request_s=0.0 if link is None else link.message_cpu_s,
        byte_s=0.0 if link is None else link.byte_cpu_s,
        average_every_examples=(options["average_every_steps"] * examples * trainers if averaged else None),
    )


def net_examples(facts: Facts, options: Mapping[str, Any]) -> int:
    """Returns the number of examples in one net's step."""
    trainers: int = options["groups"] * options["trainers_per_group"]
    return max(1, (facts.batch_size or 1) // trainers)


def _process_bytes(facts: Facts, options: Mapping[str, Any]) -> float | None:
    """Returns the memory that a process of a group can use; None means no limit."""
    processes = options["groups"] * (options["trainers_per_group"] + options["servers_per_group"])
    machines = 1 if facts.calibration is None else facts.calibration.machines
    memory = facts.memory_bytes
    if memory is None and facts.dense_cost is not None:
        memory = facts.dense_cost.memory_bytes
    return None if not memory else memory * machines / processes


def tagged(
    graph: OperatorGraph, facts: Facts, options: Mapping[str, Any], tagging: Tagging | None = None
) -> Tagged:
    """Assigns each operator of a net to a device. If ``tagging`` is given, keeps it.

    Raises:
        ConfigError: the net does not fit into the memory of the group, or ``tagging`` does not fit the net.
    """
    net = timed(graph, facts, net_examples(facts, options))
    return tag(net, group_of(graph, facts, options), how=options["tagging"], tagging=tagging)


def timed(graph: OperatorGraph, facts: Facts, examples: int) -> OperatorGraph:
    """Returns the graph with core-seconds for each operator. Without a measured pass, the graph is unchanged.

    The measurement of the whole net has two parts. The time per example is divided over operators by their
    floating-point operations. The fixed time is divided evenly.

    Args:
        examples: number of examples in one net's step.
    """
    dense, computing = facts.dense_cost, [each for each in graph.operators if each.flops_per_example]
    if dense is None or not computing or not dense.seconds(examples):
        return graph
    busy, flops = _busy(facts, dense), sum(each.flops_per_example for each in computing)
    call_s = busy * dense.pass_s / len(computing) / examples
    flop_s = busy * dense.example_s / flops
    operators = (
        replace(each, seconds_per_example=call_s + each.flops_per_example * flop_s)
        if each.flops_per_example
        else each
        for each in graph.operators
    )
    return replace(graph, operators=tuple(operators))


def spread(graph: OperatorGraph, tagged_net: Tagged, facts: Facts, options: Mapping[str, Any]) -> Spread:
    """Predicts the work of a net's step from the tagged net.

    Each exchange of a net has 4 messages: there and back, in the forward and in the backward pass. All bytes pass the
    link of the net's trainer, one message after the other.
    """
    trainers, group = options["trainers_per_group"], group_of(graph, facts, options)
    of_group = net_examples(facts, options) * trainers  # examples in one step of a group
    loads = tagged_net.loads
    cores_s = [
        load.cpu_s * of_group * device.cores
        for load, device in zip(loads.values(), group.devices, strict=True)
    ]
    first, *servers = loads.values()
    calibration = facts.calibration
    latency_s = 0.0 if calibration is None else calibration.links[options["transport"]].latency_s
    stages = len({each.stage for each in components(graph, tagged_net.tagging)})
    return Spread(
        trainer_s=cores_s[0],
        servers_s=tuple(each / trainers for each in cores_s[1:]),
        sent_bytes=first.sent_bytes * of_group,
        received_bytes=first.received_bytes * of_group,
        latency_s=4 * stages * latency_s,
        busiest=max(range(len(servers)), key=lambda number: servers[number].network_s),
    )


def _busy(facts: Facts, dense: DenseCost) -> float:
    """Returns the number of a trainer's threads that its pass keeps busy."""
    return min(facts.threads, dense.busy_threads or facts.threads)
