"""Graphs to place at random, and the least bottleneck of any placement: by going through all of them, and by a MILP solver.

Shapes: N placements, O operators, B bundles, D devices.
"""

import math
from dataclasses import replace

import numpy as np

from girih.planner.operators import Edge, Operator, OperatorGraph, Tagging
from girih.planner.tagging.group import CodecCost, Device, HierarchicalGroup, WireCost
from girih.planner.tagging.index import Index, device_name
from girih.planner.tagging.ledger import Ledger, Load, examples_per_s


def loads(graph: OperatorGraph, tagging: Tagging, group: HierarchicalGroup) -> dict[str, Load]:
    """Device → what it does per example; the operators of a module must be on one device."""
    index = Index(graph)
    devices = index.devices(tagging)
    ledger = Ledger(index, group, [devices[bundle.operators[0]] for bundle in index.bundles])
    return {device_name(number): load for number, load in enumerate(ledger.exact_loads())}


def random_graph(rng, num_operators, *, widest=512):
    """A net of fully connected layers and operators without parameters, behind embeddings that stay on trainers."""
    operators = [
        Operator(
            name="fields",
            kind="Fields",
            output_bytes_per_example=4.0 * int(rng.integers(16, widest)),
            movable=False,
        )
    ]
    edges = []
    for number in range(1, num_operators):
        read = {max(0, number - 1 - int(rng.geometric(0.5) - 1)) for _ in range(int(rng.integers(1, 3)))}
        inputs = sum(operators[p].output_bytes_per_example for p in read) / 4
        name = f"op{number}"
        if rng.random() < 0.55:
            width = int(rng.integers(8, widest))
            module = f"module{number}"
            sharing = [o for o in operators if o.module and rng.random() < 0.05]
            operators.append(
                Operator(
                    name=name,
                    kind="Linear",
                    module=sharing[0].module if sharing else module,
                    flops_per_example=6 * inputs * width,
                    parameter_bytes=0 if sharing else int(4 * inputs * width),
                    output_bytes_per_example=4.0 * width,
                )
            )
        else:
            width = max(1, int(inputs * rng.choice([0.25, 0.5, 1.0, 1.0])))
            operators.append(
                Operator(
                    name=name,
                    kind="op",
                    flops_per_example=float(rng.integers(1, 200)) * inputs,
                    output_bytes_per_example=4.0 * width,
                )
            )
        edges += [
            Edge(
                producer=operators[p].name,
                consumer=name,
                bytes_per_example=operators[p].output_bytes_per_example,
            )
            for p in sorted(read)
        ]
    return OperatorGraph(operators=tuple(operators), edges=tuple(edges))


def random_group(rng, num_servers, tight=None):
    """Trainers and servers whose links are anything from no matter to all that matters.

    Args:
        tight: a graph for which each server has memory for half of it or a little more than all.
    """
    device = Device(flops_per_s=1e9, bytes_per_s=float(10 ** rng.uniform(6, 9)))
    codec = CodecCost(name="bfloat16", number_bytes=2, encode_s_per_byte=2e-10, decode_s_per_byte=1e-10)
    group = HierarchicalGroup(
        trainers=int(rng.integers(1, 5)),
        batch_size=128,
        trainer=device,
        servers=(device,) * num_servers,
        wire=WireCost(activations=codec, gradients=codec) if rng.random() < 0.5 else WireCost(),
        update_s_per_byte=float(rng.choice([0.0, 1e-10])),
        trainer_received_bytes=float(rng.choice([0.0, 1000.0])),
    )
    if tight is None:
        return group
    parameters = sum(operator.parameter_bytes for operator in tight.operators)
    outputs = sum(operator.output_bytes_per_example for operator in tight.operators)
    all_of_it = parameters * (1 + group.trainers) + outputs * group.trainers * group.batch_size
    server = replace(device, memory_bytes=all_of_it * float(rng.uniform(0.5, 1.1)))
    trainer = replace(device, memory_bytes=2 * outputs * group.batch_size * float(rng.uniform(0.5, 1.1)))
    return replace(group, trainer=trainer, servers=(server,) * num_servers)


def busiest_s(graph, group, placed):
    """Seconds per example of the busiest device, or of the cores that devices share."""
    index = Index(graph)
    return 1 / examples_per_s(group, Ledger(index, group, placed).exact_loads())


def by_enumeration(graph, group):
    """The least :func:`busiest_s` of all placements that fit into memory; infinite where none does. Servers must be alike.

    Placements are looked at in the order of a bound, until that of the next one is above the best.
    """
    index, placed = Index(graph), placements(graph, group)
    bound_s, memory = bounds_of(index, group, placed)
    best_s = math.inf
    for row in np.argsort(bound_s):
        if bound_s[row] >= best_s:
            break
        if memory[row] > 1:
            continue
        found = Ledger(index, group, placed[row].tolist()).exact_loads()
        if all(load.memory <= 1 for load in found):
            best_s = min(best_s, 1 / examples_per_s(group, found))
    return best_s


def placements(graph, group):
    """All of them, int64[N, B], but those that differ by the names of servers alone."""
    index, num_devices = Index(graph), len(group.devices)
    choices = [
        range(1 if bundle.parameter_bytes else 0, num_devices) if bundle.movable else (0,)
        for bundle in index.bundles
    ]
    placed = np.stack([each.ravel() for each in np.meshgrid(*choices, indexing="ij")], axis=1)
    used = np.maximum.accumulate(placed, axis=1)  # a server may come once those before it have
    return placed[(placed[:, 0] <= 1) & (placed[:, 1:] <= used[:, :-1] + 1).all(axis=1)]


def bounds_of(index, group, placed):
    """Seconds per example of the busiest device, and the share of the fullest one's memory, float64[N] each, if no component is ever cut.

    Args:
        placed: int64[N, B].
    """
    of = placed[:, index.bundle_of]  # [N, O]
    operators, forward, backward = index.operators, group.wire.activations, group.wire.gradients
    sizes = [operator.output_bytes_per_example for operator in operators]
    there, back = (np.zeros((len(placed), len(group.devices))) for _ in range(2))  # of servers
    for producer, readers in enumerate(index.consumers):
        home, up = of[:, producer], np.zeros(len(placed)) + (0 if readers else sizes[producer])
        for device in range(len(group.devices)):
            needs = [np.where(of[:, c] == device, edge.bytes_per_example, 0.0) for c, edge in readers.items()]
            down = np.where(home == device, 0.0, np.max(needs, axis=0, initial=0.0)) if needs else 0.0
            up = np.maximum(up, down)
            there[:, device] += down
        back[np.arange(len(placed)), home] += up
    there[:, 0] = back[:, 0] = 0.0
    at_trainer = there * (forward.encode_s_per_byte + backward.decode_s_per_byte)
    at_trainer += back * (forward.decode_s_per_byte + backward.encode_s_per_byte)
    at_server = there * (forward.decode_s_per_byte + backward.encode_s_per_byte)
    at_server += back * (forward.encode_s_per_byte + backward.decode_s_per_byte)
    down, up = (
        (one * forward.number_bytes + other * backward.number_bytes) / 4
        for one, other in ((there, back), (back, there))
    )
    busy_s, memory = [], []
    for number, device in enumerate(group.devices):
        here = of == number
        seconds = [
            o.flops_per_example / device.flops_per_s
            if o.seconds_per_example is None
            else o.seconds_per_example
            for o in operators
        ]
        parameters = here @ np.array([o.parameter_bytes for o in operators])
        cpu_s = here @ np.array(seconds) + parameters * group.update_s_per_byte / group.batch_size
        in_flight, share = group.batch_size * group.nets, 1
        if number:
            in_flight *= group.trainers
            cpu_s, linked = cpu_s + at_server[:, number], np.maximum(down[:, number], up[:, number])
            crossing, gradients = there[:, number], group.nets * group.trainers
        else:
            share = group.trainers
            cpu_s, crossing = cpu_s + at_trainer.sum(axis=1) + group.trainer_cpu_s, back.sum(axis=1)
            linked = np.maximum(
                down.sum(axis=1) + group.trainer_sent_bytes, up.sum(axis=1) + group.trainer_received_bytes
            )
            gradients = group.nets
        busy_s.append(np.maximum(cpu_s / device.cores, linked / (device.bytes_per_s or math.inf)) / share)
        kept = (here @ np.array(sizes) + crossing * (1 + backward.kept)) * in_flight
        held = max(2.0, group.parameter_copies) - 1 + gradients
        memory.append((parameters * held + kept) / (device.memory_bytes or math.inf))
    return np.max(busy_s, axis=0), np.max(memory, axis=0)


def by_milp(graph, group, *, limit_s=20.0):
    """A lower bound of :func:`busiest_s` of any placement by devices that have cores of their own: that of a mixed integer programme in which no component is ever cut.

    Variables: z, seconds of the busiest device; x[u, d], whether bundle u is on device d; t[p, s], whether the output of operator p
    goes to server s; f[p, s], whether it leaves server s. Codecs and memory are in the programme.

    Returns:
        The bound, and the device of each bundle in the solver's best placement; infinite and None where nothing fits into memory.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    index = Index(graph)
    ledger = Ledger(index, group, [0] * len(index.bundles))
    num_bundles, num_servers, num_ops = len(index.bundles), len(group.servers), len(index.operators)
    num_devices = num_servers + 1

    def x(bundle, device):
        return 1 + bundle * num_devices + device

    def t(producer, server):
        return 1 + num_bundles * num_devices + producer * num_servers + server - 1

    def f(producer, server):
        return t(num_ops + producer, server)

    size = 1 + num_bundles * num_devices + 2 * num_ops * num_servers
    rows, low, high = [], [], []

    def row(entries, least, most):
        line = np.zeros(size)
        for column, value in entries:
            line[column] += value
        rows.append(line)
        low.append(least)
        high.append(most)

    lowest, highest = np.zeros(size), np.ones(size)
    highest[0] = np.inf
    for number, bundle in enumerate(index.bundles):
        row([(x(number, device), 1.0) for device in range(num_devices)], 1, 1)
        if not bundle.movable:
            lowest[x(number, 0)] = 1
        elif bundle.parameter_bytes:
            highest[x(number, 0)] = 0
    sizes = [operator.output_bytes_per_example for operator in index.operators]
    for producer, readers in enumerate(index.consumers):
        home = index.bundle_of[producer]
        for server in range(1, num_devices):
            for consumer in readers:
                there = index.bundle_of[consumer]
                row([(t(producer, server), 1.0), (x(there, server), -1.0), (x(home, server), 1.0)], 0, np.inf)
                row([(f(producer, server), 1.0), (x(home, server), -1.0), (x(there, server), 1.0)], 0, np.inf)
            if not readers:
                row([(f(producer, server), 1.0), (x(home, server), -1.0)], 0, np.inf)
    forward, backward = group.wire.activations, group.wire.gradients
    update = group.update_s_per_byte / group.batch_size
    scale = 1e6  # microseconds: rows of numbers near 1
    pairs = [(producer, server) for producer in range(num_ops) for server in range(1, num_devices)]
    for device in range(num_devices):
        facts = group.devices[device]
        share = group.trainers if device == 0 else 1
        own = [(p, s) for p, s in pairs if device in (0, s)]
        at_sender = forward.encode_s_per_byte + backward.decode_s_per_byte
        at_receiver = forward.decode_s_per_byte + backward.encode_s_per_byte
        sent, returned = (at_sender, at_receiver) if device == 0 else (at_receiver, at_sender)
        cpu = [
            (
                x(bundle, device),
                ledger.bundle_s[device][bundle] + index.bundles[bundle].parameter_bytes * update,
            )
            for bundle in range(num_bundles)
        ]
        cpu += [(t(p, s), sizes[p] * sent) for p, s in own] + [(f(p, s), sizes[p] * returned) for p, s in own]
        weight = scale / facts.cores / share
        row(
            [(0, -1.0)] + [(c, v * weight) for c, v in cpu],
            -np.inf,
            -group.trainer_cpu_s * weight if device == 0 else 0,
        )
        if facts.bytes_per_s:
            weight = scale / facts.bytes_per_s / share
            for one, other, extra in (
                (forward.number_bytes / 4, backward.number_bytes / 4, group.trainer_sent_bytes),
                (backward.number_bytes / 4, forward.number_bytes / 4, group.trainer_received_bytes),
            ):
                moved = [(t(p, s), sizes[p] * one * weight) for p, s in own]
                moved += [(f(p, s), sizes[p] * other * weight) for p, s in own]
                row([(0, -1.0), *moved], -np.inf, -extra * weight if device == 0 else 0)
        if facts.memory_bytes:
            nets = group.nets * (1 if device == 0 else group.trainers)
            held = max(2.0, group.parameter_copies) - 1 + nets
            kept = [
                (
                    x(number, device),
                    bundle.parameter_bytes * held
                    + sum(sizes[o] for o in bundle.operators) * nets * group.batch_size,
                )
                for number, bundle in enumerate(index.bundles)
            ]
            crossing = (1 + backward.kept) * nets * group.batch_size
            kept += [((f if device == 0 else t)(p, s), sizes[p] * crossing) for p, s in own]
            row([(c, v / facts.memory_bytes) for c, v in kept], -np.inf, 1)
    integral = np.zeros(size)
    integral[1 : 1 + num_bundles * num_devices] = 1
    found = milp(
        c=np.eye(size)[0],
        constraints=LinearConstraint(np.array(rows), low, high),
        bounds=Bounds(lowest, highest),
        integrality=integral,
        options={"time_limit": limit_s, "mip_rel_gap": 1e-4},
    )
    placed = None
    if found.status == 2:  # infeasible
        return math.inf, placed
    if found.x is not None:
        placed = [
            max(range(num_devices), key=lambda device: found.x[x(bundle, device)])
            for bundle in range(num_bundles)
        ]
    return found.mip_dual_bound / scale, placed
