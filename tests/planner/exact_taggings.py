"""Graphs to place at random, and the least bottleneck of any placement: by going through all of them, and by a MILP solver."""

import math

import numpy as np

from girih.planner.operators import Edge, Operator, OperatorGraph
from girih.planner.tagging.group import CodecCost, Device, HierarchicalGroup, WireCost
from girih.planner.tagging.index import Index
from girih.planner.tagging.ledger import Ledger
from girih.planner.tagging.utilization import exact_loads, least_loads


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


def random_group(rng, num_servers):
    """Trainers and servers whose links are anything from no matter to all that matters."""
    device = Device(flops_per_s=1e9, bytes_per_s=float(10 ** rng.uniform(6, 9)))
    codec = CodecCost(name="bfloat16", number_bytes=2, encode_s_per_byte=2e-10, decode_s_per_byte=1e-10)
    return HierarchicalGroup(
        trainers=int(rng.integers(1, 5)),
        batch_size=128,
        trainer=device,
        servers=(device,) * num_servers,
        wire=WireCost(activations=codec, gradients=codec) if rng.random() < 0.5 else WireCost(),
        update_s_per_byte=float(rng.choice([0.0, 1e-10])),
        trainer_received_bytes=float(rng.choice([0.0, 1000.0])),
    )


def busiest_s(graph, group, placed):
    """Seconds per example of the busiest device."""
    index = Index(graph)
    return max(load.busy_s for load in exact_loads(index, group, Ledger(index, group, placed)))


def by_enumeration(graph, group, known_s=math.inf):
    """The least :func:`busiest_s` of all placements, or ``known_s`` where none is below; servers must be alike.

    What is placed already computes for some time whatever comes after it, which rules out most placements unseen.
    """
    index = Index(graph)
    num_devices = len(group.devices)
    order = sorted(range(len(index.bundles)), key=lambda bundle: -index.bundles[bundle].parameter_bytes)
    ledger = Ledger(index, group, [0 if not bundle.movable else 1 for bundle in index.bundles])
    compute = [0.0] * num_devices
    cores = [group.trainer.cores * group.trainers] + [server.cores for server in group.servers]
    best = known_s

    def go_on(depth, used):
        nonlocal best
        if depth == len(order):
            if max(load.busy_s for load in least_loads(group, ledger)) < best:
                best = min(best, max(load.busy_s for load in exact_loads(index, group, ledger)))
            return
        number = order[depth]
        bundle = index.bundles[number]
        choices = (
            range(1 if bundle.parameter_bytes else 0, min(num_devices, used + 2)) if bundle.movable else (0,)
        )
        for device in choices:
            took = ledger.bundle_s[device][number] / cores[device]
            if compute[device] + took < best:
                compute[device] += took
                if ledger.placed[number] != device:
                    ledger.move(number, device)
                go_on(depth + 1, max(used, device))
                compute[device] -= took

    go_on(0, 0)
    return best


def by_milp(graph, group, *, limit_s=20.0):
    """A lower bound of :func:`busiest_s` of any placement: that of a mixed integer programme in which no component is ever cut.

    Variables: z, seconds of the busiest device; x[u, d], whether bundle u is on device d; t[p, s], whether the output of operator p
    goes to server s; f[p, s], whether it leaves server s. Codecs and what averaging sends are in the programme, memory is not.

    Returns:
        The bound, and the device of each bundle in the solver's best placement.
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
    if found.x is not None:
        placed = [
            max(range(num_devices), key=lambda device: found.x[x(bundle, device)])
            for bundle in range(num_bundles)
        ]
    return found.mip_dual_bound / scale, placed
