"""Step graphs against steps computed by hand, and against the traffic of plans."""

from dataclasses import asdict, replace

import pytest

from girih.config.train import ScheduleOptions
from girih.errors import ConfigError
from girih.planner.calibration import LINKS, Calibration, Link, Overhead, Rate, StepWork
from girih.planner.facts import AccessProfile, DenseCost, Facts, GroupFacts, ModelFacts, OperatorFacts
from girih.planner.operators import Edge, Operator, OperatorGraph
from girih.planner.steps.basis import Observed, fit_overhead
from girih.planner.steps.fold import fold
from girih.planner.steps.graph import Operation, StepGraph
from girih.planner.steps.group import group_of, net_examples, timed
from girih.schema import Categorical, Numeric, Schema
from girih.strategies import BY_NAME

CORE_COUNT, BATCH = 4, 1000
# of a batch: 2,000 ids of one group of 8 numbers; 1,000 examples of 2 ids and a number
WORK = StepWork(
    lookup=Rate(1e-4, 1e-6, 1e-8),
    updates={"adagrad": Rate(2e-4, 2e-6, 2e-8)},
    example_s=1e-6,
    value_s=1e-7,
    step_s=5e-4,
    products=((64, 1e10), (256, 2e10), (1024, 4e10)),
)
LOOKUPS_S = 1e-4 + 2000 * 1e-6 + 16_000 * 1e-8  # 2.26 ms
UPDATES_S = 2 * LOOKUPS_S
READING_S = 1000 * 1e-6 + 3000 * 1e-7  # 1.3 ms
DENSE = DenseCost(
    bytes_per_example=100, memory_bytes=1e9, pass_s=1e-3, example_s=1e-6, update_s=3e-4, parameter_copies=4
)
GRAPH = OperatorGraph(
    operators=(
        Operator(name="input", kind="input", output_bytes_per_example=64, movable=False),
        Operator(name="top", kind="Linear", module="top", flops_per_example=6000, parameter_bytes=40_000, output_bytes_per_example=4),
        Operator(name="logits", kind="output", movable=False),
    ),
    edges=(
        Edge(producer="input", consumer="top", bytes_per_example=64),
        Edge(producer="top", consumer="logits", bytes_per_example=4),
    ),
)  # fmt: skip


def calibration(latency_s=1e-4, bytes_per_s=1e9, message_cpu_s=1e-5, byte_cpu_s=1e-10):
    link = Link(latency_s, bytes_per_s, (), message_cpu_s, byte_cpu_s)
    machine = {"cores": CORE_COUNT}
    return Calibration(trainers=2, machine=machine, links=dict.fromkeys(LINKS, link), work=WORK)


def facts(trainers=1, **changed):
    features = [Categorical(name="a", dim=8), Categorical(name="b", dim=8), Numeric(name="x")]
    tables = {"a": 800.0, "b": 200.0}
    known = {
        "schema": Schema(features, labels="click"),
        "model": ModelFacts(name="DNN", num_parameters=10_000),
        "groups": (
            GroupFacts(
                name="all", tables=("a", "b"), dim=8, output_vectors=2, output_numbers=16, optimizer="adagrad"
            ),
        ),
        "num_trainers": trainers,
        "seed": 1,
        "batch_size": BATCH,
        "schedule": ScheduleOptions(),
        "profile": AccessProfile(
            rows=tables,
            rows_of_share={name: count / trainers for name, count in tables.items()},
            widths={"a": 8, "b": 8},
            ids=2000.0,
            ids_of_tables={"a": 1000.0, "b": 1000.0},
        ),
        "dense_cost": DENSE,
        "calibration": calibration(),
        "threads": max(1, CORE_COUNT // trainers),
        "graph": GRAPH,
    }
    return Facts(**(known | changed))


STRATEGIES = {
    "local": BY_NAME["local"](),
    "synchronous": BY_NAME["synchronous"](trainers=2),
    "hybrid": BY_NAME["hybrid"](trainers=2),
    "hybrid, τ = 0": BY_NAME["hybrid"](trainers=2, staleness=0),
    "asynchronous": BY_NAME["asynchronous"](trainers=2),
    "replicas": BY_NAME["hierarchical"](groups=2, nets=2),
    "groups": BY_NAME["hierarchical"](trainers_per_group=2, servers_per_group=2, nets=2),
}
DISTRIBUTED = [name for name in STRATEGIES if name != "local"]


def graph_of(name, **changed):
    return STRATEGIES[name].step_graph(facts(STRATEGIES[name].trainers, **changed))


def folded(name, **changed):
    return fold(graph_of(name, **changed), CORE_COUNT)


def operation(graph, name):
    return next(each for each in graph.operations if each.name == name)


def test_local_by_hand():
    found = folded("local")
    assert found.path_s == pytest.approx(
        {
            "lookups": LOOKUPS_S / 4,
            "forward and backward": 2e-3,
            "row updates": UPDATES_S / 4,
            "dense update": 3e-4,
            "step": 5e-4,
        }
    )
    assert found.work_s == pytest.approx(
        {
            "reading": READING_S,
            "lookups": LOOKUPS_S,
            "forward and backward": 4 * 2e-3,
            "row updates": UPDATES_S,
            "dense update": 4 * 3e-4,
            "step": 5e-4,
        }
    )


def test_synchronous_by_hand():
    """Two trainers of two threads: 500 keys of a share, half of which are the other's, 250 · 12 bytes of ids, 250 · 32 of rows each way.

    Keys travel ahead. The path has the rows, the vote before gradients, and the gradients.
    """
    found = folded("synchronous")
    lookups_s = LOOKUPS_S + 1e-4  # a call each
    rings_s = 2 * (1e-4 + 40_000 / 2 / 1e9) + 2 * (1e-4 + 12 / 1e9)  # one bucket, and the vote
    exchanged_s = 2 * 1e-4 + (8000 + 8000) / 1e9 + 2 * (1e-4 + 12 / 1e9)
    assert sum(found.path_s.values()) == pytest.approx(
        3 * lookups_s / 4 + 1.5e-3 + rings_s + 3e-4 + 5e-4 + exchanged_s, rel=1e-6
    )
    # messages of a trainer: 2 of keys, rows, gradients; 2 of the ring, and of two votes. A byte costs at any link the same
    sent = 19_000 + 40_000 + 2 * 24
    assert found.work_s["messages"] == pytest.approx(2 * (10 * 1e-5 + sent * 1e-10))
    assert found.work_s["reading"] == pytest.approx(2 * READING_S)
    assert found.work_s["lookups"] == pytest.approx(lookups_s)


def test_exchanges_are_in_turns_unless_trainers_have_just_agreed():
    """gloo's AllToAll sends in turns. Its AllReduce does not, and neither do trainers that begin at the same moment."""
    turns = {each.name: each.in_turns for each in graph_of("synchronous").operations if each.to}
    assert turns == {
        "keys": True, "rows 0": True, "last ring": False, "vote": False, "agreement": False, "row gradients": False,
    }  # fmt: skip
    operators = (OperatorFacts(name="deep", aggregation="sum", columns=64),)
    model = replace(facts().model, operators=operators, upper_parameters=6_000)
    split, replicated = (
        BY_NAME["substitution"](trainers=2, dense=dense).step_graph(facts(2, model=model))
        for dense in ("split", "replicated")
    )
    assert operation(split, "sums").in_turns
    assert operation(split, "gradients of sums").in_turns
    assert not operation(split, "shared gradients").in_turns
    assert not operation(replicated, "sums").in_turns


def test_rings_of_early_buckets_run_beside_the_backward_pass_and_the_last_one_does_not():
    """Half of the parameters are in the last bucket: its gradients are there at the end, the others after two thirds."""
    halves = replace(facts().model, last_bucket=5_000)
    pass_s, half_s, vote_s = 1.5e-3, 2 * 1e-4 + 20_000 / 1e7, 2 * (1e-4 + 12 / 1e7)
    slow = folded("synchronous", model=halves, calibration=calibration().over(1e7)).path_s
    # at 10 MB/s the early ring outlasts the pass: 2/3 of it, then two rings
    exchanged_s = 2 * 1e-4 + 16_000 / 1e7
    assert slow["forward and backward"] == pytest.approx(pass_s * 2 / 3)
    assert slow["messages"] == pytest.approx(2 * half_s + 2 * vote_s + exchanged_s)
    fast = folded("synchronous", model=halves, calibration=calibration(latency_s=0.0)).path_s
    assert fast["forward and backward"] == pytest.approx(pass_s)
    assert fast["messages"] == pytest.approx((20_000 + 2 * 24 + 16_000) / 1e9)


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_bytes_are_the_plans_traffic(name):
    plan = STRATEGIES[name].plan(facts(STRATEGIES[name].trainers))
    planned = {kind: size for kind, size in plan.predicted["bytes"].items() if size}
    assert graph_of(name).sent_bytes() == pytest.approx(planned)


@pytest.mark.parametrize("dense", ["split", "replicated"])
@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_bytes_of_substitution_are_the_plans_traffic(dense, wire):
    operators = (
        OperatorFacts(name="deep", aggregation="sum", columns=64),
        OperatorFacts(name="fields", aggregation="concat", columns=16),
    )
    model = replace(facts().model, operators=operators, upper_parameters=6_000, optimizer="torch.optim.Adam")
    strategy = BY_NAME["substitution"](trainers=2, dense=dense, wire_partials=wire)
    known = facts(2, model=model)
    planned = {kind: size for kind, size in strategy.plan(known).predicted["bytes"].items() if size}
    assert strategy.step_graph(known).sent_bytes() == pytest.approx(planned)


def test_substitution_computes_operators_in_parts_and_the_rest_on_each_trainer():
    """Of 10,000 parameters 4,000 belong to operators: passes of 1,000 examples for 6 of 10, of 500 for 4."""
    model = replace(facts().model, upper_parameters=6_000)
    found = fold(BY_NAME["substitution"](trainers=2).step_graph(facts(2, model=model)), CORE_COUNT)
    assert found.path_s["forward and backward"] == pytest.approx(DENSE.seconds(500 + 0.6 * 500))
    assert found.work_s["forward and backward"] == pytest.approx(2 * 2 * DENSE.seconds(800))


def test_served_work_is_that_of_one_process_with_more_calls_and_messages():
    """Rows of 32 bytes, keys of 12; 500 keys and 1,000 ids of a share, 16 numbers of an example pooled."""
    rows, keys, ids, pooled = 500 * 32, 500 * 12, 1000 * 8, 500 * 64
    found = folded("asynchronous")
    assert found.work_s["lookups"] == pytest.approx(LOOKUPS_S + 1e-4)
    assert found.work_s["row updates"] == pytest.approx(UPDATES_S + 2e-4)
    assert found.work_s["dense update"] == pytest.approx(2 * 2 * 3e-4)
    assert found.work_s["parameters"] == pytest.approx(2 * (2 * 1e-5 + 80_000 * 1e-10))
    sent = ids + keys + 2 * rows + 2 * pooled + 500 * 8  # and numbers and labels from the loader
    assert found.work_s["messages"] == pytest.approx(2 * (10 * 1e-5 + sent * 1e-10))


def test_steps_in_flight_are_those_that_may_be_read_ahead():
    assert [graph_of(name).in_flight for name in ("hybrid", "hybrid, τ = 0", "replicas", "local")] == [
        5,
        1,
        2,
        1,
    ]


def test_nets_of_a_trainer_share_its_threads():
    for nets, threads in ((1, 2), (2, 1), (4, 1)):
        graph = BY_NAME["hierarchical"](groups=2, nets=nets).step_graph(facts(2))
        assert operation(graph, "pass").threads == threads
        assert operation(graph, "pass").core_s == pytest.approx(2 * DENSE.seconds(500))


def test_group_servers_compute_their_operators_with_one_thread():
    """All of the net is on one server: a third forward, two thirds backward. A byte of exchanges costs both ends."""
    tagging = {"input": "trainer", "top": "server 0", "logits": "trainer"}
    graph = graph_of("groups", tagging=tagging)
    forward, backward = (operation(graph, f"{name}, server 0") for name in ("forward", "backward"))
    assert backward.core_s == pytest.approx(2 * forward.core_s)
    assert forward.threads == 1
    work = forward.core_s + backward.core_s
    assert work == pytest.approx(2 * DENSE.seconds(500), rel=0.5)
    assert work >= 2 * DENSE.seconds(500)
    moved = [
        operation(graph, f"{name}, {way}").sent_bytes
        for name in ("forward", "backward")
        for way in ("there", "back")
    ]
    assert sum(moved) == pytest.approx(500 * 2 * (64 + 4))


def test_clipping_on_group_servers_is_a_round_trip():
    base, clipped = folded("groups"), folded("groups", clips=True)
    assert sum(clipped.path_s.values()) == pytest.approx(sum(base.path_s.values()) + 2 * 1e-4 + 4e-5)
    assert clipped.work_s["norms"] == pytest.approx(
        2 * 2 * 2 * 1e-5
    )  # two trainers ask two servers, which answer


def test_averaging_is_in_the_background():
    """Each of two copies of 40,000 bytes goes there and back in every tenth step. No step waits for it."""
    graph = graph_of("replicas")
    assert folded("replicas").work_s["averaging"] == pytest.approx(0.4 * 1e-5 + 16_000 * 1e-10)
    assert "corrections" not in graph.last
    assert "averaging" not in folded("replicas").path_s


@pytest.mark.parametrize("name", list(STRATEGIES))
@pytest.mark.parametrize(
    "unknown",
    [
        {"calibration": None},
        {"calibration": replace(calibration(), work=None)},
        {"profile": None},
        {"dense_cost": None},
        {"batch_size": None},
        {"device": "cuda"},
        {"compile": True},
    ],
    ids=lambda each: next(iter(each)),
)
def test_nothing_is_guessed(name, unknown):
    assert graph_of(name, **unknown) is None


def test_group_servers_need_the_graph_and_others_do_not():
    assert graph_of("groups", graph=None) is None
    assert graph_of("replicas", graph=None) is not None


def test_overheads_are_of_a_share_and_of_a_way():
    """Two trainers: 3 ms of a core and 1 µs an id of each one's 1,000 ids; 1 ms more on the clock."""
    overhead = Overhead(Rate(3e-3, 1e-6, 0.0), Rate(5e-3, 0.0, 0.0))
    known = replace(calibration(), overheads={"hierarchical": overhead})
    assert folded("groups", calibration=known) == folded("groups")
    base, found = folded("replicas"), folded("replicas", calibration=known)
    assert found.work_s == pytest.approx({**base.work_s, "overhead": 2 * (3e-3 + 1e-3)})
    waits = operation(graph_of("replicas", calibration=known), "other waits")
    assert waits.delay_s == pytest.approx(1e-3)


def test_a_graph_refuses_unknown_operations_and_roles():
    first = Operation(name="a", term="x", role="trainer")
    with pytest.raises(ConfigError, match=r"'b' after .*'c'"):
        StepGraph(
            examples=1, roles={"trainer": 1}, operations=(first, replace(first, name="b", after=("c",)))
        )
    with pytest.raises(ConfigError, match=r"no role .*'loader'"):
        StepGraph(examples=1, roles={"trainer": 1}, operations=(replace(first, role="loader"),))


def test_bytes_of_averaging_are_a_trainers_part_of_its_groups_copy():
    """80,000 bytes there and back of a copy, in every tenth step: of one trainer, or of two that share it."""
    four = facts(4)
    copies = BY_NAME["hierarchical"](groups=4).plan(four).predicted["bytes"]["dense"]
    shared = BY_NAME["hierarchical"](groups=2, trainers_per_group=2, servers_per_group=2).plan(four)
    assert copies == pytest.approx(8_000)
    assert shared.predicted["bytes"]["dense"] == pytest.approx(4_000)


def test_devices_of_groups_take_the_cores_of_their_machine_that_their_nets_keep_busy():
    """One net of a trainer, with one of its threads or two; the nets of both trainers on a server, a thread each. Groups share cores evenly, their
    devices do not."""
    options = asdict(BY_NAME["hierarchical"](groups=2, trainers_per_group=2, servers_per_group=2))
    known = facts(4, memory_bytes=8e9)
    spread = replace(known, calibration=known.calibration.spread(8))
    groups = [group_of(GRAPH, each, options) for each in (known, spread)]
    assert [[device.cores for device in group.devices] for group in groups] == [[1, 2, 2]] * 2
    assert [group.cores for group in groups] == [CORE_COUNT / 2, 8 * CORE_COUNT / 2]
    assert [group.trainer.memory_bytes for group in groups] == [1e9, 8e9]
    many = group_of(GRAPH, known, options | {"nets": 8})
    assert [device.cores for device in many.devices] == [CORE_COUNT] * 3


def test_an_overhead_is_what_is_observed_beyond_the_parts():
    seen = {"trainers": 2, "work_s": 0.010, "path_s": 0.004}
    few = Observed(ids=100, cpu_s=0.014, step_s=0.007, **seen)
    many = Observed(ids=1100, cpu_s=0.034, step_s=0.004, **seen)  # on the clock, no more than its parts
    found = fit_overhead(few, many)
    assert (found.work.call_s, found.work.id_s) == pytest.approx((1e-3, 1e-5))
    assert found.path.id_s == 0.0
    assert found.path.call_s == pytest.approx(0.003)


def test_a_group_has_the_speeds_of_its_machine():
    """A pass of 500 examples takes 1.5 ms of two threads: 6,000 operations an example."""
    known = facts(2)
    options = {
        "groups": 1, "trainers_per_group": 2, "servers_per_group": 2, "nets": 2, "transport": "tcp", "average_every_steps": 10,
        "wire_activations": "float32", "wire_dense_gradients": "float32",
    }  # fmt: skip
    group = group_of(GRAPH, known, options)
    assert group.batch_size == 500
    assert group.trainer.flops_per_s == 2e10  # the middle of the calibrated products
    (top,) = [
        each for each in timed(GRAPH, known, net_examples(known, options)).operators if each.flops_per_example
    ]
    assert top.seconds_per_example == pytest.approx(
        1.5e-3 * 2 / 500
    )  # all of the pass: the only one that computes
    assert group.trainer.cores == 2.0  # of its two nets, a thread each
    assert group.cores == 4.0
    assert group.trainer.memory_bytes == 1e9 / 4
    assert group.trainer.bytes_per_s == 1e9
    assert group.parameter_copies == 4
    assert group.update_s_per_byte == pytest.approx(3e-4 * 2 / 40_000)
    assert (group.request_s, group.byte_s) == (1e-5, 1e-10)
    assert group.average_every_examples is None
    two = group_of(GRAPH, known, options | {"groups": 2})
    assert two.average_every_examples == 10 * 250 * 2


def test_operators_share_a_pass():
    """1 ms a pass and 1 µs an example, of two threads that are busy: halves of the first, and by 1 : 3 of the second."""
    one, other = (
        Operator(name=name, kind="Linear", module=name, flops_per_example=flops, output_bytes_per_example=4)
        for name, flops in (("one", 1000.0), ("other", 3000.0))
    )
    graph = OperatorGraph(operators=(GRAPH.operators[0], one, other), edges=())
    found = timed(graph, facts(threads=2, dense_cost=DENSE), 100)
    times = [each.seconds_per_example for each in found.operators]
    assert times == [None, pytest.approx(2 * (5e-6 + 2.5e-7)), pytest.approx(2 * (5e-6 + 7.5e-7))]
    assert sum(times[1:]) * 100 == pytest.approx(2 * DENSE.seconds(100))
    assert timed(graph, facts(threads=2, dense_cost=None), 100) == graph
