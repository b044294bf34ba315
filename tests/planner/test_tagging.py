"""Tagging: the rules on a net like DLRM, loads by hand, and refinement against the best that any placement can do."""

import itertools
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from exact_taggings import (
    bounds_of,
    busiest_s,
    by_enumeration,
    by_milp,
    loads,
    placements,
    random_graph,
    random_group,
)

from girih.comm.codecs.tensors import ACTIVATIONS, GRADIENTS
from girih.errors import ConfigError
from girih.planner.operators import TRAINER, Edge, Operator, OperatorGraph
from girih.planner.tagging.balance import ruled
from girih.planner.tagging.components import components
from girih.planner.tagging.group import CodecCost, Device, HierarchicalGroup, WireCost
from girih.planner.tagging.index import Index
from girih.planner.tagging.ledger import Ledger, examples_per_s, utilization
from girih.planner.tagging.refine import SHARED_CORES, refine
from girih.planner.tagging.rules import RULES, TaggingRule
from girih.planner.tagging.tag import AHEAD, tag
from girih.planner.tagging.wires import CODECS, choose_wire

DEVICE = Device(flops_per_s=1e9, bytes_per_s=1e8)
PAIR = HierarchicalGroup(trainers=2, batch_size=128, trainer=DEVICE, servers=(DEVICE, DEVICE))


def linear(name, inputs, outputs):
    """A fully connected layer."""
    return Operator(
        name=name,
        kind="Linear",
        module=name,
        flops_per_example=6.0 * inputs * outputs,
        parameter_bytes=4 * inputs * outputs,
        output_bytes_per_example=4.0 * outputs,
    )


def plain(name, width, *, movable=True):
    """An operator without parameters."""
    return Operator(
        name=name,
        kind="op",
        flops_per_example=2.0 * width,
        output_bytes_per_example=4.0 * width,
        movable=movable,
    )


def graph_of(operators, *edges):
    """A graph whose edges carry what their producer gives out."""
    size = {operator.name: operator.output_bytes_per_example for operator in operators}
    return OperatorGraph(
        operators=tuple(operators),
        edges=tuple(
            Edge(producer=one, consumer=other, bytes_per_example=size[one])
            for one, other in (edge.split(">") for edge in edges)
        ),
    )


DLRM = graph_of(
    [
        plain("numeric", 13, movable=False),
        plain("fields", 26 * 16, movable=False),
        linear("bottom.0", 13, 512),
        plain("bottom.1", 512),
        linear("bottom.2", 512, 16),
        plain("bottom.3", 16),
        plain("cat", 27 * 16),
        plain("dots", 351),
        plain("cat_1", 367),
        linear("top.0", 367, 400),
        plain("top.1", 400),
        linear("top.2", 400, 400),
        plain("top.3", 400),
        linear("top.4", 400, 1),
        plain("squeeze", 1),
    ],
    *["numeric>bottom.0", "bottom.0>bottom.1", "bottom.1>bottom.2", "bottom.2>bottom.3", "bottom.3>cat"],
    *["fields>cat", "cat>dots", "dots>cat_1", "bottom.3>cat_1", "cat_1>top.0", "top.0>top.1", "top.1>top.2"],
    *["top.2>top.3", "top.3>top.4", "top.4>squeeze"],
)


def test_the_rules_keep_the_interaction_of_a_dlrm_on_trainers():
    tagged = tag(DLRM, PAIR, how="rules")
    parts = components(DLRM, tagged.tagging)
    assert [part.operators for part in parts] == [
        ("bottom.0", "bottom.1", "bottom.2"),
        ("top.0", "top.1", "top.2", "top.3", "top.4"),
    ]
    assert {part.server for part in parts} == {0, 1}
    assert {name for name, device in tagged.tagging.items() if device == TRAINER} == {
        *("numeric", "fields", "bottom.3", "cat", "dots", "cat_1", "squeeze"),
    }
    assert tagged.reasons["fields"] == "it cannot be moved"
    assert tagged.reasons["dots"].startswith("reads from trainers: most of its input is on trainers")
    assert tagged.reasons["squeeze"].startswith("feeds trainers: only trainers read from it")
    assert tagged.reasons["top.0"] == "its module has parameters, and a group has one copy of them"
    assert tagged.reasons["top.1"] == "no rule keeps it on trainers"
    assert set(tagged.reasons) == set(tagged.tagging) == {operator.name for operator in DLRM.operators}


def test_halves_of_a_fully_connected_layer_are_computed_side_by_side():
    whole = ["x>a0", "x>a1", "a0>cat", "a1>cat", "cat>relu", "relu>b0", "relu>b1", "b0>sum", "b1>sum"]
    operators = [
        *(plain("x", 100, movable=False), linear("a0", 100, 200), linear("a1", 100, 200), plain("cat", 400)),
        *(plain("relu", 400), linear("b0", 400, 50), linear("b1", 400, 50), plain("sum", 100)),
    ]
    graph = graph_of(operators, *whole)
    tagged, none = tag(graph, PAIR, how="rules"), tag(graph, PAIR, how="none")
    assert [part.operators for part in components(graph, tagged.tagging)] == [
        ("a0",),
        ("a1",),
        ("b0",),
        ("b1",),
    ]
    assert tagged.tagging["a0"] != tagged.tagging["a1"]
    assert tagged.tagging["b0"] != tagged.tagging["b1"]
    assert tagged.reasons["cat"] == "gathers: it joins outputs that servers can compute in parallel"
    assert tagged.tagging["relu"] == TRAINER
    assert tagged.examples_per_s > none.examples_per_s


def test_two_layers_that_are_split_together_do_not_come_back_in_between():
    edges = ["x>a0", "x>a1", "a0>r0", "a1>r1", "r0>b0", "r1>b1", "b0>sum", "b1>sum"]
    operators = [
        *(plain("x", 100, movable=False), linear("a0", 100, 200), linear("a1", 100, 200), plain("r0", 200)),
        *(plain("r1", 200), linear("b0", 200, 50), linear("b1", 200, 50), plain("sum", 50)),
    ]
    graph = graph_of(operators, *edges)
    tagged = tag(graph, PAIR, how="rules")
    parts = components(graph, tagged.tagging)
    assert [part.operators for part in parts] == [("a0", "r0", "b0"), ("a1", "r1", "b1")]
    assert {part.server for part in parts} == {0, 1}


def test_a_shortcut_around_a_layer_does_not_take_its_component_apart():
    edges = ["x>a", "a>relu", "relu>b", "relu>add", "b>add", "add>c"]
    operators = [
        *(plain("x", 100, movable=False), linear("a", 100, 200), plain("relu", 200), linear("b", 200, 200)),
        *(plain("add", 200), linear("c", 200, 50)),
    ]
    graph = graph_of(operators, *edges)
    (part,) = components(graph, tag(graph, PAIR, how="rules").tagging)
    assert part.operators == ("a", "relu", "b", "add", "c")


def test_what_reads_mostly_from_servers_is_not_kept_from_them():
    operators = [
        *(plain("x", 10, movable=False), linear("a", 10, 400), plain("cat", 410), linear("b", 410, 50)),
    ]
    graph = graph_of(operators, "x>a", "x>cat", "a>cat", "cat>b")
    (part,) = components(graph, tag(graph, PAIR, how="rules").tagging)
    assert part.operators == ("a", "cat", "b")


def test_towers_on_one_output_are_computed_side_by_side():
    operators = [
        *(plain("x", 10, movable=False), linear("a", 10, 400), plain("relu", 400)),
        *(linear("click", 400, 50), linear("buy", 400, 50)),
    ]
    graph = graph_of(operators, "x>a", "a>relu", "relu>click", "relu>buy")
    tagged = tag(graph, PAIR, how="rules")
    assert tagged.reasons["relu"] == "hands out: servers can process its output in parallel"
    assert [part.operators for part in components(graph, tagged.tagging)] == [("a",), ("click",), ("buy",)]
    assert tagged.tagging["click"] != tagged.tagging["buy"]


def test_components_that_share_a_module_are_on_one_server():
    sides = ("user", "item")
    operators = [
        *(plain("x", 50, movable=False), *(linear(f"first_{side}", 50, 50) for side in sides)),
        *(replace(linear(side, 50, 50), module="tower") for side in sides),
        *(linear(f"top_{side}", 50, 9) for side in sides),
    ]
    edges = [edge for s in sides for edge in (f"x>first_{s}", f"first_{s}>{s}", f"{s}>top_{s}")]
    tagging = tag(graph_of(operators, *edges), PAIR, how="rules").tagging
    assert len({tagging[operator.name] for operator in operators[1:]}) == 1


def test_another_rule_is_one_more_in_the_list(monkeypatch):
    narrow = TaggingRule(
        "narrow", "few numbers", lambda around: around.operator.output_bytes_per_example < 2000
    )
    monkeypatch.setattr("girih.planner.tagging.rules.RULES", (*RULES, narrow))
    tagged = tag(DLRM, PAIR, how="rules")
    assert tagged.tagging["top.1"] == TRAINER
    assert tagged.reasons["top.1"] == "narrow: few numbers"
    assert tagged.tagging["bottom.1"] != TRAINER  # 2,048 bytes
    assert tagged.tagging["top.0"] != TRAINER  # it has parameters


def test_refinement_spreads_a_tower_that_is_one_component():
    group = HierarchicalGroup(trainers=3, batch_size=128, trainer=DEVICE, servers=(DEVICE,) * 3)
    rules, refined = tag(DLRM, group, how="rules"), tag(DLRM, group)
    assert refined.examples_per_s > 1.5 * rules.examples_per_s
    moved = {name for move in refined.moves for name in move.operators}
    for name in moved:
        assert "was the bottleneck" in refined.reasons[name]
    speeds = [(move.examples_per_s_before, move.examples_per_s_after) for move in refined.moves]
    assert all(before <= after * (1 + 1e-9) for before, after in speeds)
    assert [before for before, _ in speeds[1:]] == [after for _, after in speeds[:-1]]
    assert speeds[-1][1] == refined.examples_per_s
    assert refined.start == "rules"
    assert max(max(u.cpu, u.network) for u in refined.utilization.values()) == pytest.approx(1.0)


def test_a_chain_parts_where_it_is_narrow():
    widths = [100, 1000, 1000, 4, 1000, 1000, 1]
    layers = [linear(f"l{n}", one, other) for n, (one, other) in enumerate(pairwise(widths))]
    names = ["x", *(layer.name for layer in layers)]
    graph = graph_of(
        [plain("x", 100, movable=False), *layers], *(f"{one}>{other}" for one, other in pairwise(names))
    )
    slow = replace(DEVICE, bytes_per_s=1e5)
    tagged = tag(graph, replace(PAIR, trainer=slow, servers=(slow, slow)))
    assert [part.operators for part in components(graph, tagged.tagging)] == [
        ("l0", "l1", "l2"),
        ("l3", "l4", "l5"),
    ]
    assert len(tagged.moves) == 1  # no layer by itself would have been worth the way


def test_another_start_is_taken_where_it_comes_out_ahead():
    rng = np.random.default_rng(20)
    graph, group = random_graph(rng, int(rng.integers(3, 10))), random_group(rng, 2)
    index, tagged = Index(graph), tag(graph, group)
    placed, _ = refine(index, group, ruled(index, group).placed, itertools.count())
    assert tagged.start != "rules"
    assert 1 / busiest_s(graph, group, placed) * AHEAD < tagged.examples_per_s


def test_a_search_that_has_spent_its_effort_leaves_the_start_as_it_is():
    tagged = tag(DLRM, PAIR, effort=0)
    assert not tagged.moves
    assert tagged.tagging == tag(DLRM, PAIR, how="rules").tagging


def test_without_rules_operators_are_dealt_in_turn():
    tagged = tag(DLRM, PAIR, how="none")
    movable = [operator.name for operator in DLRM.operators if operator.movable]
    assert [tagged.tagging[name] for name in movable[:3]] == ["server 0", "server 1", "server 0"]
    assert tagged.tagging["fields"] == TRAINER
    assert not tagged.moves


def test_a_group_without_servers_has_all_on_its_trainers():
    tagged = tag(DLRM, replace(PAIR, servers=()))
    assert set(tagged.tagging.values()) == {TRAINER}
    flops = sum(operator.flops_per_example for operator in DLRM.operators)
    assert tagged.examples_per_s == pytest.approx(2 * 1e9 / flops)  # each trainer has examples of its own


def test_loads_by_hand():
    graph = graph_of(
        [plain("x", 10, movable=False), linear("l", 10, 5), linear("m", 10, 3), plain("y", 8)],
        *["x>l", "x>m", "l>y", "m>y"],
    )
    half = CodecCost(name="half", number_bytes=2, encode_s_per_byte=1e-6, decode_s_per_byte=2e-6)
    full = CodecCost(name="full", number_bytes=4, encode_s_per_byte=3e-6, decode_s_per_byte=4e-6)
    group = HierarchicalGroup(
        trainers=2,
        nets=3,
        batch_size=100,
        trainer=Device(flops_per_s=1e6, bytes_per_s=1e3, memory_bytes=1e5),
        servers=(Device(cores=2, flops_per_s=1e6, bytes_per_s=1e3, memory_bytes=1e5), DEVICE),
        wire=WireCost(activations=half, gradients=full),
        trainer_cpu_s=1e-3,
        trainer_sent_bytes=7.0,
        trainer_received_bytes=11.0,
        parameter_copies=4,
        update_s_per_byte=1e-5,
        request_s=1e-2,
        byte_s=1e-4,
        average_every_examples=50,
    )
    tagging = {"x": TRAINER, "l": "server 0", "m": "server 0", "y": TRAINER}
    found = loads(graph, tagging, group)
    there, back, parameters = 40, 32, 200 + 120  # l and m are one exchange: x goes there once
    server, trainer, idle = found["server 0"], found[TRAINER], found["server 1"]
    requests_s = 2 * 1e-2 / 100  # two components of one stage are one exchange, forward and backward
    bytes_s = 1.5 * (there + back) * 1e-4 / 2  # half of a float forward, all of it backward
    assert server.sent_bytes == pytest.approx(back * 0.5 + there * 1.0 + parameters / 50)
    assert server.received_bytes == pytest.approx(there * 0.5 + back * 1.0 + parameters / 50)
    codecs_s = there * (2e-6 + 3e-6) + back * (1e-6 + 4e-6)
    assert server.cpu_s == pytest.approx(
        ((300 + 180) / 1e6 + codecs_s + parameters * 1e-5 / 100 + requests_s + bytes_s) / 2
    )
    assert server.network_s == pytest.approx(server.sent_bytes / 1e3)
    copies = (
        1 + 2 + 2 * 3 + 4
    )  # itself, Adam's state, a gradient of each net of each trainer, and what averaging keeps
    assert server.memory_bytes == pytest.approx(parameters * copies + (20 + 12 + 40) * 2 * 3 * 100)
    assert server.memory == pytest.approx(server.memory_bytes / 1e5)
    assert trainer.sent_bytes == pytest.approx((there * 0.5 + back * 1.0 + 7) / 2)
    assert trainer.received_bytes == pytest.approx((back * 0.5 + there * 1.0 + 11) / 2)
    codecs_s = there * (1e-6 + 4e-6) + back * (2e-6 + 3e-6)
    assert trainer.cpu_s == pytest.approx((36 / 1e6 + codecs_s + requests_s + bytes_s + 1e-3) / 2)
    assert trainer.memory_bytes == pytest.approx((40 + 32 + 32) * 3 * 100)
    assert (idle.cpu_s, idle.sent_bytes, idle.memory) == (0, 0, 0)
    used = utilization(found, 10.0)["server 0"]
    assert (used.cpu, used.network, used.memory) == pytest.approx(
        (10 * server.cpu_s, 10 * server.network_s, server.memory)
    )
    assert examples_per_s(PAIR, list(found.values())) == pytest.approx(
        1 / max(load.busy_s for load in found.values())
    )


@pytest.mark.parametrize(("codec", "left"), [("topk", 2), ("bfloat16", 0)])
def test_what_topk_leaves_out_is_kept_where_it_is_sent_from(codec, left):
    """Twice, while a step is under way: with and without what that leaves out."""
    graph = graph_of([plain("x", 10, movable=False), linear("l", 10, 5)], "x>l")
    wire = WireCost(gradients=CodecCost(name=codec))
    group = replace(PAIR, nets=3, batch_size=100, wire=wire, parameter_copies=4)
    found = loads(graph, {"x": TRAINER, "l": "server 0"}, group)
    copies = 1 + 2 + 2 * 3
    assert found["server 0"].memory_bytes == 200 * copies + (20 + 40 + left * 40) * 2 * 3 * 100
    assert found[TRAINER].memory_bytes == (40 + 20 + left * 20) * 3 * 100


def test_replicas_have_gradients_of_their_own_nets():
    graph = graph_of([plain("x", 10, movable=False), linear("l", 10, 5)], "x>l")
    group = replace(PAIR, servers=(), nets=3, batch_size=100, parameter_copies=4)
    (trainer,) = loads(graph, {"x": TRAINER, "l": TRAINER}, group).values()
    assert trainer.memory_bytes == 200 * (1 + 2 + 3) + (40 + 20) * 3 * 100


def test_what_goes_from_server_to_server_passes_through_the_trainer():
    graph = graph_of([plain("x", 10, movable=False), linear("l", 10, 5), linear("m", 5, 3)], "x>l", "l>m")
    found = loads(graph, {"x": TRAINER, "l": "server 0", "m": "server 1"}, PAIR)
    assert found["server 0"].received_bytes == 40 + 20  # x, and the gradient of l's output
    assert found["server 1"].received_bytes == 20 + 12
    assert found[TRAINER].received_bytes == (20 + 12 + 40 + 20) / 2


def test_devices_that_share_cores_are_as_fast_as_all_of_them_together():
    """150 and 90 operations on a server each, of 1,000 a second; two cores for both, which take one each at most."""
    one, other = replace(linear("l", 5, 5), module="l"), linear("m", 5, 3)
    graph = graph_of([plain("x", 5, movable=False), one, other], "x>l", "x>m")
    device = Device(flops_per_s=1e3)
    tagging = {"x": TRAINER, "l": "server 0", "m": "server 1"}
    on_trainers = 10  # twice five, whichever trainer does it
    for cores, busy in ((None, 150), (2.0, 150), (1.0, 150 + 90 + on_trainers)):
        group = replace(PAIR, trainer=device, servers=(device, device), cores=cores)
        found = loads(graph, tagging, group)
        assert examples_per_s(group, list(found.values())) == pytest.approx(1e3 / busy)
        tagged = tag(graph, group, tagging=tagging)
        assert tagged.examples_per_s == pytest.approx(1e3 / busy)
        assert tagged.shared_cores == (
            None if cores is None else pytest.approx((150 + 90 + 10) / cores / busy)
        )


def test_a_move_that_relieves_the_shared_cores_says_so():
    """Requests take the cores of all; one server has all of them at once, and no device is as busy as all together."""
    graph = graph_of([plain("x", 5, movable=False), linear("l", 5, 5), linear("m", 5, 3)], "x>l", "x>m")
    device = Device(flops_per_s=1e3, cores=2)
    group = replace(PAIR, trainer=device, servers=(device, device), cores=1.0, request_s=1.0)
    tagged = tag(graph, group)
    assert tagged.tagging["l"] == tagged.tagging["m"]
    (move,) = tagged.moves
    assert move.bottleneck == SHARED_CORES
    assert "while the shared cores were the bottleneck" in tagged.reasons[move.operators[0]]
    assert tagged.shared_cores == pytest.approx(1)


def test_a_measured_operator_takes_what_was_measured():
    measured = replace(linear("l", 10, 5), seconds_per_example=0.25)
    graph = graph_of([plain("x", 10, movable=False), measured], "x>l")
    found = loads(graph, {"x": TRAINER, "l": "server 1"}, PAIR)
    assert found["server 1"].cpu_s == pytest.approx(0.25)


def delivered(graph, tagging, num_servers):
    """Bytes to and from each server, gone through component by component."""
    parts = components(graph, tagging)
    of = {name: part for part in parts for name in part.operators}
    size = {operator.name: operator.output_bytes_per_example for operator in graph.operators}
    there, back = np.zeros(num_servers), np.zeros(num_servers)
    needed = {
        (edge.producer, of[edge.consumer].server, of[edge.consumer].stage)
        for edge in graph.edges
        if edge.consumer in of and of.get(edge.producer) is not of[edge.consumer]
    }
    for producer, server, _ in needed:
        there[server] += size[producer]
    for name, part in of.items():
        readers = [edge.consumer for edge in graph.edges if edge.producer == name]
        if not readers or any(of.get(reader) is not part for reader in readers):
            back[part.server] += size[name]
    return there, back


@pytest.mark.parametrize("seed", range(20))
def test_books_kept_move_by_move_are_those_of_a_fresh_placement(seed):
    rng = np.random.default_rng(seed)
    graph, group = random_graph(rng, 20), replace(random_group(rng, 3), wire=WireCost())
    index = Index(graph)
    ledger = Ledger(index, group, [0] * len(index.bundles))
    for _ in range(60):
        ledger.move(int(rng.integers(len(index.bundles))), int(rng.integers(4)))
    fresh = Ledger(index, group, ledger.placed)
    exact = ledger.exact_loads()
    for one, other, bound in zip(exact, fresh.exact_loads(), ledger.least_loads(), strict=True):
        assert one.busy_s == pytest.approx(other.busy_s)
        assert bound.busy_s <= one.busy_s * (1 + 1e-9)
    there, back = delivered(graph, index.tagging(ledger.placed), 3)
    for server, load in enumerate(exact[1:]):
        assert load.received_bytes == pytest.approx(there[server] + back[server])


@pytest.mark.parametrize(("tight", "cores"), [(False, None), (True, None), (False, 1.5)])
@pytest.mark.parametrize("seed", range(40))
def test_refinement_is_near_the_best_placement_of_a_small_graph(seed, tight, cores):
    """Where three or more devices share a core and a half, the least work of all together may be the best."""
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, int(rng.integers(3, 13)))
    group = replace(random_group(rng, 2, tight=graph if tight else None), cores=cores)
    index, best_s = Index(graph), by_enumeration(graph, group)
    if math.isinf(best_s):
        with pytest.raises(
            ConfigError,
            match=r"does not fit into memory|servers of a group have|no placement was found that fits",
        ):
            tag(graph, group)
        return
    refined = tag(graph, group)
    assert best_s * (1 - 1e-9) <= 1 / refined.examples_per_s <= 1.25 * best_s
    assert all(used.memory <= 1 for used in refined.utilization.values())
    if not tight:
        assert refined.examples_per_s >= tag(graph, group, how="rules").examples_per_s * (1 - 1e-9)
    for bundle, facts in enumerate(index.bundles):
        places = {refined.tagging[name] for name in index.names(bundle)}
        assert len(places) == 1
        assert (TRAINER in places) <= (not facts.parameter_bytes)
        assert facts.movable or places == {TRAINER}


@pytest.mark.parametrize("seed", range(3))
def test_bounds_of_all_placements_at_once_are_those_of_each(seed):
    rng = np.random.default_rng(seed)
    graph = random_graph(rng, 7)
    group = replace(random_group(rng, 2, tight=graph), nets=2)
    index, placed = Index(graph), placements(graph, group)
    busy_s, memory = bounds_of(index, group, placed)
    for row in rng.integers(len(placed), size=20):
        found = Ledger(index, group, placed[row].tolist()).least_loads()
        assert busy_s[row] == pytest.approx(max(load.busy_s for load in found))
        assert memory[row] == pytest.approx(max(load.memory for load in found))


@pytest.mark.parametrize(
    ("seed", "tight"), [(3, False), (5, False), (7, False), (5, True), (7, True)]
)  # 3 in tight memory: see docs/planning.md
def test_refinement_is_near_the_bound_of_a_solver_on_a_larger_graph(seed, tight):
    rng = np.random.default_rng(1000 + seed)
    graph, num_servers = random_graph(rng, int(rng.integers(20, 41))), int(rng.integers(2, 4))
    group = random_group(rng, num_servers, tight=graph if tight else None)
    bound_s, placed = by_milp(graph, group)
    assert bound_s <= busiest_s(graph, group, placed) <= 1.05 * bound_s  # the bound is no empty one
    assert (1 - 1e-3) * bound_s <= 1 / tag(graph, group).examples_per_s <= 1.2 * bound_s


@pytest.mark.parametrize("tight", [False, True])
def test_enumeration_and_solver_agree(tight):
    rng = np.random.default_rng(4)
    for _ in range(3):
        graph = random_graph(rng, 8)
        group = random_group(rng, 2, tight=graph if tight else None)
        bound_s, placed = by_milp(graph, group)
        best_s = by_enumeration(graph, group)
        assert bound_s <= best_s * (1 + 1e-3)
        if placed is not None and busiest_s(graph, group, placed) <= bound_s * 1.001:
            assert best_s == pytest.approx(bound_s, rel=2e-3)


def test_the_longest_components_come_first_and_bytes_balance():
    sizes = [30, 7, 25, 9, 12, 3]
    operators = [plain("x", 4, movable=False), *(linear(f"l{n}", 4, size) for n, size in enumerate(sizes))]
    graph = graph_of(operators, *(f"x>l{n}" for n in range(len(sizes))))
    start = ruled(Index(graph), PAIR)
    shares = [sum(s for s, place in zip(sizes, start.placed[1:], strict=True) if place == d) for d in (1, 2)]
    assert sorted(shares) == [42, 44]  # 30, 9, 3 and 25, 12, 7


def test_a_component_goes_where_there_is_memory_for_it():
    graph = graph_of([plain("x", 4, movable=False), linear("a", 4, 30), linear("b", 4, 7)], "x>a", "x>b")
    small = replace(
        DEVICE, memory_bytes=(1 + 2) * 4 * 4 * 10
    )  # with a gradient of each of two trainers' nets
    start = ruled(Index(graph), replace(PAIR, servers=(small, DEVICE)))
    assert start.placed[1:] == [2, 1]


def test_operators_of_one_module_are_on_one_server():
    towers = [linear("user", 50, 50), linear("item", 50, 50)]
    shared = [replace(tower, module="tower") for tower in towers]
    graph = graph_of([plain("x", 50, movable=False), *shared], "x>user", "x>item")
    for how in ("none", "rules", "refined"):
        tagged = tag(graph, PAIR, how=how)
        assert tagged.tagging["user"] == tagged.tagging["item"] != TRAINER
    apart = graph_of([plain("x", 50, movable=False), *towers], "x>user", "x>item")
    assert tag(apart, PAIR).tagging["user"] != tag(apart, PAIR).tagging["item"]


def test_a_tagging_that_is_given_is_kept_and_priced():
    given = dict.fromkeys(tag(DLRM, PAIR).tagging, TRAINER) | {"bottom.0": "server 1", "top.0": "server 0"}
    kept = tag(DLRM, PAIR, tagging=given)
    assert kept.tagging == given
    assert not kept.moves
    assert kept.examples_per_s == examples_per_s(PAIR, list(loads(DLRM, given, PAIR).values()))


def test_a_tagging_that_tears_a_module_apart_is_refused():
    shared = [replace(linear(name, 50, 50), module="tower") for name in ("user", "item")]
    graph = graph_of([plain("x", 50, movable=False), *shared], "x>user", "x>item")
    torn = {"x": TRAINER, "user": "server 0", "item": "server 1"}
    with pytest.raises(
        ConfigError, match="'user' on 'server 0' and 'item' on 'server 1'; expected operators of"
    ):
        tag(graph, PAIR, tagging=torn)


def memory(size):
    """A group whose servers have so many bytes."""
    server = replace(DEVICE, memory_bytes=size)
    return replace(PAIR, trainers=1, batch_size=1, servers=(server, server), parameter_copies=4)


@pytest.mark.parametrize(
    ("graph", "group", "message"),
    [
        (
            DLRM,
            memory(2.4e6),
            r"operator 'top.2' \(Linear\) does not fit into memory: its parameters take 0.00256 GB with optimizer state and the"
            r" gradient of 1 net, but a group server has 0.0024 GB; set split_fc = true",
        ),
        (
            DLRM,
            memory(2.57e6),
            r"parameters take 0.00515 GB .*, but the 2 servers of a group have 0.00514 GB; set servers_per_group to at least 3",
        ),
        (
            DLRM,
            replace(memory(4.2e6), trainers=2, nets=2),
            r"operator 'top.2' \(Linear\) does not fit into memory: its parameters take 0.00448 GB with optimizer state and the"
            r" gradients of 4 nets, but a group server has 0.0042 GB; set split_fc = true, .* or nets lower",
        ),
        (
            graph_of([replace(linear("whole", 4, 4), movable=False)]),
            PAIR,
            r"operator 'whole' \(Linear\) has parameters but must stay on trainers, and each of 2 would have a copy",
        ),
        (
            DLRM,
            replace(PAIR, trainer=replace(DEVICE, memory_bytes=5e5)),
            r"trainer would take 0.00\d+ GB, but has 0.0005 GB: operator 'cat' .* of it; set tagging = 'refined', which",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(graph, group, message):
    with pytest.raises(ConfigError, match=message):
        tag(graph, group, how="rules")


def test_what_refinement_finds_no_place_for_is_refused_by_name():
    group = replace(PAIR, trainer=replace(DEVICE, memory_bytes=1e5))
    with pytest.raises(
        ConfigError,
        match=r"operator 'fields' .* takes 0.000213 GB of it, and no placement was found that fits; set nets",
    ):
        tag(DLRM, group)


def test_a_component_that_fits_on_no_server_is_taken_apart():
    whole = tag(DLRM, replace(PAIR, trainers=1, batch_size=1), how="rules")
    assert whole.tagging["top.0"] == whole.tagging["top.2"]
    parted = tag(DLRM, memory(3.2e6), how="rules")
    assert parted.tagging["top.0"] != parted.tagging["top.2"]


def test_refinement_mends_a_placement_that_is_out_of_memory():
    operators = [plain("x", 8, movable=False), linear("a", 8, 100), linear("b", 8, 4), linear("c", 8, 3)]
    wide = replace(operators[2], output_bytes_per_example=4000.0)
    graph = graph_of([operators[0], operators[1], wide, operators[3]], "x>a", "x>b", "x>c")
    group = replace(memory(700_000), batch_size=128)
    slow = replace(group.servers[0], flops_per_s=1e6)  # a move to it is for memory alone
    group = replace(group, servers=(slow, replace(DEVICE, memory_bytes=100_000)))
    with pytest.raises(ConfigError, match=r"server 1 would take .*: operator 'b' .* set tagging = 'refined'"):
        tag(graph, group, how="rules")
    tagged = tag(graph, group)
    assert tagged.moves[0].resource == "memory"
    assert all(used.memory <= 1 for used in tagged.utilization.values())


def test_another_name_for_how_is_refused():
    with pytest.raises(ConfigError, match="tagging = 'greedy': expected one of 'refined', 'rules', 'none'"):
        tag(DLRM, PAIR, how="greedy")


PLAIN = CodecCost(name="float32")
HALF = CodecCost(name="bfloat16", number_bytes=2, encode_s_per_byte=1e-9, decode_s_per_byte=1e-9)


@pytest.mark.parametrize(("bytes_per_s", "expected"), [(1e5, "bfloat16"), (1e10, "float32")])
def test_compression_is_on_where_the_link_is_slow_and_off_where_cores_are(bytes_per_s, expected):
    device = replace(DEVICE, bytes_per_s=bytes_per_s)
    group = replace(PAIR, trainer=device, servers=(device, device), nets=1000)
    chosen = choose_wire(DLRM, group, activations=(PLAIN, HALF), gradients=(PLAIN, HALF))
    assert (chosen.wire.activations.name, chosen.wire.gradients.name) == (expected, expected)
    assert chosen.tagged.examples_per_s == pytest.approx(chosen.examples_per_s[expected, expected], rel=0.01)
    assert ("does not pay" in chosen.why) == (expected == "float32")
    off = chosen.examples_per_s["float32", "float32"]
    assert max(chosen.examples_per_s.values()) / off > 1.5 or expected == "float32"


@pytest.mark.parametrize(("nets", "compressed"), [(1, True), (2, True), (1000, False)])
def test_compression_pays_for_few_nets_though_cores_are_busier_than_links(nets, compressed):
    """A server computes for 60 µs an example, and four messages of 400 bytes take 20 µs each, two of them in each direction."""
    graph = graph_of([plain("x", 100, movable=False), linear("a", 100, 100)], "x>a")
    device = replace(DEVICE, bytes_per_s=2e7)
    group = replace(PAIR, trainer=device, servers=(device,), trainers=1, nets=nets)
    free = CodecCost(name="bfloat16", number_bytes=2)
    chosen = choose_wire(graph, group, activations=(PLAIN, free), gradients=(PLAIN, free))
    assert ("bfloat16" in (chosen.wire.gradients.name, chosen.wire.activations.name)) == compressed
    trainer, server = chosen.tagged.loads.values()
    assert server.busy_s == server.cpu_s > max(trainer.busy_s, server.network_s)
    sent_s = (trainer.sent_bytes + trainer.received_bytes) / 2e7
    steps_s = trainer.cpu_s + server.cpu_s + sent_s + (nets - 1) * server.cpu_s
    names = chosen.wire.activations.name, chosen.wire.gradients.name
    assert chosen.examples_per_s[names] == pytest.approx(nets / steps_s)


@pytest.mark.parametrize(("nets", "trainer_s"), [(1, 1e-7), (2, 2e-7)])
def test_a_part_has_one_of_its_servers_cores_and_a_net_its_share_of_the_trainers(nets, trainer_s):
    """60 µs of a server's core, 0.2 µs of a trainer's, 1,600 bytes in 80 µs; the link is busy for 40 µs."""
    graph = graph_of([plain("x", 100, movable=False), linear("a", 100, 100)], "x>a")
    device = replace(DEVICE, cores=2, bytes_per_s=2e7)
    group = replace(PAIR, trainer=device, servers=(device,), trainers=1, nets=nets)
    chosen = choose_wire(graph, group, activations=(PLAIN,), gradients=(PLAIN,))
    step_s = (trainer_s + 6e-5 + 8e-5 + (nets - 1) * 4e-5) / nets
    assert chosen.examples_per_s["float32", "float32"] == pytest.approx(1 / step_s)


@pytest.mark.parametrize(("network", "compressed"), [(1.01, False), (1.05, True)])
def test_compression_has_to_pay_by_more_than_a_percent(network, compressed):
    graph = graph_of([plain("x", 100, movable=False), linear("a", 100, 100)], "x>a")
    cpu_s = 6e4 / 1e9
    device = replace(DEVICE, bytes_per_s=800 / (network * cpu_s))
    free = CodecCost(name="bfloat16", number_bytes=2)
    group = replace(PAIR, servers=(device,))
    chosen = choose_wire(graph, group, activations=(PLAIN, free), gradients=(PLAIN, free))
    assert ("bfloat16" in (chosen.wire.gradients.name, chosen.wire.activations.name)) == compressed


def test_a_codec_that_takes_more_cycles_than_it_saves_bytes_is_left_off():
    device = replace(DEVICE, bytes_per_s=1e5)
    group = replace(PAIR, trainer=device, servers=(device, device))
    slow = replace(HALF, encode_s_per_byte=1e-4, decode_s_per_byte=1e-4)
    chosen = choose_wire(DLRM, group, activations=(PLAIN, slow), gradients=(PLAIN, slow))
    assert chosen.wire.activations.name == "float32"
    forced = choose_wire(DLRM, group, activations=(slow,), gradients=(slow,))
    assert forced.wire.activations.name == "bfloat16"
    assert forced.why.endswith("as given")
    assert forced.tagged.examples_per_s < chosen.tagged.examples_per_s


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize(
    "shape", [(1, 1), (7, 1), (128, 8), (512, 16), (13, 26, 16), (5, 1000), (512,), (0, 8)]
)
def test_the_bytes_of_a_message_are_its_codecs(name, shape):
    numbers, rows = math.prod(shape), math.prod(shape[:-1]) if math.prod(shape) else 0
    codec = {**ACTIVATIONS, **GRADIENTS}[name]
    assert CODECS[name].packed_bytes(rows, numbers) == codec.packed_bytes(shape)


@pytest.mark.parametrize(
    ("shape", "number_bytes", "int8", "bfloat16", "topk"),
    [
        (
            (512, 1),
            4,
            4,
            2,
            0.609375,
        ),  # one number and 8 bytes are more than 4: it goes as it is; 52 numbers of 512
        ((512, 8), 4, 16, 16, 4.8046875),  # 8 numbers and 8 bytes; 410 of 4,096 numbers
        ((512, 16), 4, 24, 32, 9.609375),  # 0.375 of 64; 820 of 8,192
        ((512, 26, 16), 4, 624, 832, 249.609375),  # 26 rows; 21,300 of 212,992
        ((512,), 4, 520 / 512, 2, 0.609375),  # one row of all examples
        ((512, 16), 2, 24, 32, 9.609375),  # of bfloat16, which goes as it is by bfloat16
        ((512, 16), 0, 64, 64, 64),  # whole numbers
    ],
)
def test_an_edge_takes_what_travels(shape, number_bytes, int8, bfloat16, topk):
    rows = math.prod(shape[:-1]) / 512 if len(shape) > 1 else 0
    edge = Edge(
        producer="a",
        consumer="b",
        bytes_per_example=math.prod(shape) * (number_bytes or 4) / 512,
        rows_per_example=rows,
        number_bytes=number_bytes,
    )
    expected = {"int8": int8, "bfloat16": bfloat16, "topk": topk, "float32": edge.bytes_per_example}
    assert {name: CODECS[name].sent_bytes(edge, 512) for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(("width", "expected"), [(8, "bfloat16"), (64, "int8")])
def test_int8_is_not_chosen_where_bfloat16_is_as_small_and_exacter(width, expected):
    """16 bytes either way at width 8; at 64 they are 72 and 128."""
    graph = graph_of([plain("x", width, movable=False), linear("a", width, width)], "x>a")
    device = replace(DEVICE, bytes_per_s=1e5)
    group = replace(PAIR, trainer=device, servers=(device,), nets=1)
    activations = [CODECS[name] for name in ("float32", "bfloat16", "int8")]
    chosen = choose_wire(graph, group, activations=activations, gradients=(CODECS["bfloat16"],))
    assert chosen.wire.activations.name == expected
