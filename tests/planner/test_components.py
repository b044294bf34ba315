"""Components of a tagged graph: connected, convex, in stages that can run one after the other."""

import numpy as np
import pytest
from exact_taggings import random_graph

from girih.planner.operators import TRAINER, Edge, Operator, OperatorGraph, server_name
from girih.planner.tagging.components import components


def graph_of(edges):
    """Operators "a", "b", … with edges as in "ab"."""
    names = sorted(set("".join(edges)))
    return OperatorGraph(
        operators=tuple(Operator(name=name, kind="op") for name in names),
        edges=tuple(Edge(producer=one, consumer=other, bytes_per_example=4.0) for one, other in edges),
    )


def found(edges, **servers):
    """Operators of each component with its server and stage; who is not named is on trainers."""
    graph = graph_of(edges)
    tagging = {
        o.name: server_name(servers[o.name]) if o.name in servers else TRAINER for o in graph.operators
    }
    return [("".join(each.operators), each.server, each.stage) for each in components(graph, tagging)]


def test_a_chain_on_one_server_is_one_component():
    assert found(["ab", "bc", "cd"], b=0, c=0) == [("bc", 0, 0)]


def test_components_of_one_stage_run_side_by_side():
    assert found(["ab", "ac", "bd", "cd", "de"], b=0, c=1, e=0) == [("b", 0, 0), ("c", 1, 0), ("e", 0, 1)]


def test_a_path_through_a_trainer_cuts_a_component():
    assert found(["ab", "bc", "cd", "bd"], b=0, d=0) == [("b", 0, 0), ("d", 0, 1)]


def test_a_path_through_another_server_cuts_a_component():
    assert found(["ab", "bc", "cd", "bd"], b=0, c=1, d=0) == [("b", 0, 0), ("c", 1, 1), ("d", 0, 2)]


def test_what_waits_for_another_server_is_joined_with_what_need_not():
    # b could run beside c, and its output then goes up and down again; it waits, and d reads it in place
    assert found(["ab", "ac", "bd", "cd"], b=0, c=1, d=0) == [("c", 1, 0), ("bd", 0, 1)]


def reachable(graph, sources):
    """Operators that some path leads to."""
    seen = set()
    for edge in graph.edges:
        if edge.producer in seen or edge.producer in sources:
            seen.add(edge.consumer)
    return seen


@pytest.mark.parametrize("seed", range(60))
def test_random_placements(seed):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, int(rng.integers(3, 25)))
    devices = [TRAINER, server_name(0), server_name(1)]
    tagging = {operator.name: devices[int(rng.integers(0, 3))] for operator in graph.operators}
    parts = components(graph, tagging)
    of = {name: part for part in parts for name in part.operators}
    assert sorted(of) == sorted(name for name, device in tagging.items() if device != TRAINER)
    assert sum(len(part.operators) for part in parts) == len(of)
    readers = sorted(graph.edges, key=lambda edge: [o.name for o in graph.operators].index(edge.producer))
    graph = OperatorGraph(operators=graph.operators, edges=tuple(readers))
    stage = {}  # exchanges that must be over before an operator of trainers can run, or its component's stage
    for operator in graph.operators:
        name = operator.name
        read = [edge.producer for edge in graph.edges if edge.consumer == name]
        if name in of:
            stage[name] = of[name].stage
            assert tagging[name] == server_name(of[name].server)
        else:
            stage[name] = max((stage[p] + (p in of) for p in read), default=0)
        for producer in read:
            if of.get(producer) is not of.get(name) or name not in of:
                assert stage[producer] + (producer in of) <= stage[name]
    for part in parts:
        inside = set(part.operators)
        outside = reachable(graph, inside) - inside
        assert not reachable(graph, outside) & inside, "a path leaves the component and comes back"
        connected, waiting = {part.operators[0]}, [part.operators[0]]
        for name in waiting:
            near = {e.producer for e in graph.edges if e.consumer == name}
            near |= {e.consumer for e in graph.edges if e.producer == name}
            new = (near & inside) - connected
            connected |= new
            waiting += new
        assert connected == inside
