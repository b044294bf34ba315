"""An operator graph: plain values both ways, and what it refuses."""

import json

import pytest

from girih.errors import ConfigError
from girih.planner.operators import Edge, Operator, OperatorGraph, server_name


def test_a_graph_is_json_both_ways():
    graph = OperatorGraph(
        operators=(
            Operator(name="fields", kind="Fields", output_bytes_per_example=64.0, movable=False),
            Operator(name="top", kind="Linear", module="top", parameter_bytes=68, seconds_per_example=1e-6),
        ),
        edges=(Edge(producer="fields", consumer="top", bytes_per_example=64.0),),
    )
    assert OperatorGraph.from_dict(json.loads(json.dumps(graph.to_dict()))) == graph
    assert server_name(3) == "server 3"


def test_a_value_of_another_type_is_named():
    mapping = {"operators": [{"name": "a", "kind": "Linear", "parameter_bytes": -1}], "edges": []}
    with pytest.raises(
        ConfigError, match=r"^operator graph operators\[0\] parameter_bytes = -1: expected an integer"
    ):
        OperatorGraph.from_dict(mapping)


@pytest.mark.parametrize(
    ("names", "edge", "message"),
    [
        ("aba", None, "'a' occurs twice; expected different names"),
        ("ab", ("a", "c"), "an edge from 'a' to 'c'; there is no operator 'c'"),
        ("ab", ("b", "a"), "'a' reads from 'b', which comes later; expected operators in the order"),
    ],
)
def test_what_is_no_graph_is_refused(names, edge, message):
    edges = (Edge(producer=edge[0], consumer=edge[1], bytes_per_example=4.0),) if edge else ()
    with pytest.raises(ConfigError, match=message):
        OperatorGraph(operators=tuple(Operator(name=name, kind="Linear") for name in names), edges=edges)
