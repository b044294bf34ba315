"""The device and the stage of each node of a tagged graph.

A net begins and ends on the trainer. Its nodes have levels: even ones on the trainer, odd ones on servers, and each crossing
goes up. All that servers do at one level is a stage: it is ready when the trainer's level before is done. The stages are
those that the planner counts bytes by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from girih.dense.graph.building import OUTPUT
from girih.dense.graph.facts import free_nodes, is_movable, name_of, owners_of
from girih.dense.graph.runnable import RunnableGraph
from girih.errors import ConfigError, nearest
from girih.planner.operators import TRAINER, OperatorGraph, Tagging, server_name
from girih.planner.tagging.components import components as tagging_components

Server = int | None
"""A server's number; None on the trainer."""


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """A node's server and level."""

    server: Server
    level: int


def placed(net: RunnableGraph, tagging: Tagging, graph: OperatorGraph) -> dict[fx.Node, PlacedNode]:
    """Returns where each node runs, and when; free ones are not in it, since they are copied to whatever reads them.

    Args:
        graph: facts of the same net.

    Raises:
        ConfigError: the tagging lacks an operator or has one that is unknown, names no device, moves what has to stay on
            trainers, or tears apart operators of one module.
    """
    servers = _servers(net, tagging)
    stage_of = {
        name: each.stage
        for each in tagging_components(graph, {name: _name(server) for name, server in servers.items()})
        for name in each.operators
    }
    free = free_nodes(net.graph)
    found: dict[fx.Node, PlacedNode] = {}
    for node in net.graph.nodes:
        if node in free:
            continue
        before = [found[each] for each in node.all_input_nodes if each not in free]
        if node.meta.get("glue"):
            found[node] = before[0]
            continue
        name = str(name_of(node))
        server = servers.get(name)
        if server is None:
            level = max([0, *(each.level + (each.server is not None) for each in before)])
        else:
            level = 2 * stage_of[name] + 1
        found[node] = PlacedNode(server, level)
    return found


def components(nodes: Mapping[fx.Node, PlacedNode], net: RunnableGraph) -> list[list[fx.Node]]:
    """The nodes of servers as connected components of one server and level, each in the graph's order.

    Nodes that read the same parameter count as connected, so that it is in one place; so do those that read the same value from
    elsewhere, so that it travels once.
    """
    parents: dict[fx.Node, fx.Node] = {
        node: node for node, where in nodes.items() if where.server is not None
    }

    def root(node: fx.Node) -> fx.Node:
        while parents[node] is not node:
            node = parents[node]
        return node

    readers: dict[tuple[PlacedNode, fx.Node], fx.Node] = {}
    arriving: dict[tuple[PlacedNode, fx.Node], fx.Node] = {}
    for node in parents:
        for each in node.all_input_nodes:
            if nodes.get(each) == nodes[node]:
                parents[root(node)] = root(each)
            elif each in nodes:
                parents[root(node)] = root(arriving.setdefault((nodes[node], each), node))
            for parameter in _parameters_behind(each, nodes):
                parents[root(node)] = root(readers.setdefault((nodes[node], parameter), node))
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in parents:
        found.setdefault(root(node), []).append(node)
    return list(found.values())


def _parameters_behind(node: fx.Node, nodes: Mapping[fx.Node, PlacedNode]) -> set[fx.Node]:
    """The attributes that a free node follows from, itself included."""
    if node in nodes:
        return set()
    if node.op == "get_attr":
        return {node} if node.target != "training" else set()
    return set[fx.Node]().union(*(_parameters_behind(each, nodes) for each in node.all_input_nodes))


def _name(server: Server) -> str:
    return TRAINER if server is None else server_name(server)


def _servers(net: RunnableGraph, tagging: Tagging) -> dict[str, Server]:
    nodes = {name: node for node in net.graph.nodes if (name := name_of(node)) is not None}
    for name in tagging:
        if name not in nodes:
            raise ConfigError(f"tagging: {name!r} is no operator of this net{nearest(name, nodes)}")
    found: dict[str, Server] = {}
    for name, node in nodes.items():
        if name not in tagging and name != OUTPUT:
            raise ConfigError(
                f"tagging: no device for operator {name!r}; expected one for each operator of the net"
            )
        device = tagging.get(name, TRAINER)
        found[name] = _server_of(name, device)
        if found[name] is not None and not is_movable(net, node):
            raise ConfigError(f"tagging: {name!r} on {device!r}; it has to stay on the trainer")
    devices: dict[str, str] = {}
    for node, owner in owners_of(net).items():
        name = str(name_of(node))
        if name in tagging and devices.setdefault(owner, tagging[name]) != tagging[name]:
            raise ConfigError(
                f"tagging: operators of {owner!r} on {devices[owner]!r} and, as {name!r}, on {tagging[name]!r}; expected those"
                " that use the same parameters on one device"
            )
    return found


def _server_of(name: str, device: str) -> Server:
    number = device.removeprefix("server ")
    if device == TRAINER:
        return None
    if not number.isdecimal() or device != server_name(int(number)):
        raise ConfigError(f"tagging: {name!r} on {device!r}; expected 'trainer' or 'server 0' and so on")
    return int(number)
