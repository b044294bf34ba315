"""The cost model against steps computed by hand; what holds of it whatever the numbers are."""

from dataclasses import asdict, replace

import pytest

from girih.config.train import ScheduleOptions
from girih.planner.calibration import LINKS, Calibration, Link, Overhead, Rate, StepWork
from girih.planner.facts import AccessProfile, DenseCost, Facts, GroupFacts, ModelFacts
from girih.planner.operators import Edge, Operator, OperatorGraph
from girih.planner.speed.group import group_of, net_examples, timed
from girih.planner.speed.step import CORES, PATH, Basis, Observed, StepCost, fit_overhead, predict
from girih.schema import Categorical, Numeric, Schema
from girih.strategies import BY_NAME
from girih.strategies.strategy import price

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


def speed(name, **changed):
    return price(STRATEGIES[name], facts(STRATEGIES[name].trainers, **changed))


def test_a_step_waits_for_its_busiest_resource_and_for_the_steps_ahead_of_it_there():
    cost = StepCost(
        examples=100,
        work_s={"a": 0.2, "b": 0.4},
        path_s={"a": 0.5, "c": 0.1},
        busy_s={"link": 0.25},
        in_flight=2,
    )
    assert cost.seconds(2) == pytest.approx({CORES: 0.3, "link": 0.25, PATH: 0.3})
    assert predict(cost, 4).bound == PATH
    assert predict(cost, 4).samples_per_s == pytest.approx(100 / ((0.6 + 0.25) / 2))
    assert predict(replace(cost, in_flight=1), 4).samples_per_s == pytest.approx(100 / 0.6)
    assert predict(replace(cost, in_flight=3), 2).bound == CORES
    assert predict(replace(cost, in_flight=3), 4).bound == "link"
    assert predict(replace(cost, in_flight=3), 4).samples_per_s == pytest.approx(100 / ((0.6 + 2 * 0.25) / 3))
    assert predict(replace(cost, in_flight=1e9), 4).samples_per_s == pytest.approx(400)
    busy = replace(cost, busy_s={"a server": 0.8})
    assert predict(busy, 4).samples_per_s == pytest.approx(100 / 0.8)  # more than the path: others are ahead


def test_local_by_hand():
    found = speed("local")
    path_s = (
        (LOOKUPS_S + UPDATES_S) / 4 + 2e-3 + 3e-4 + 5e-4
    )  # rows on four threads, the pass, the update, the step
    work_s = READING_S + LOOKUPS_S + UPDATES_S + 4 * 2e-3 + 4 * 3e-4 + 5e-4
    assert found.seconds == pytest.approx({CORES: work_s / 4, PATH: path_s})
    assert found.bound == PATH
    assert found.samples_per_s == pytest.approx(BATCH / path_s)
    slow = replace(WORK, example_s=1e-5)  # 9 ms more of reading, for which nothing waits but cores
    reading = speed("local", calibration=replace(calibration(), work=slow))
    assert reading.seconds[PATH] == pytest.approx(path_s)
    assert reading.samples_per_s == pytest.approx(BATCH / ((work_s + 9e-3) / 4))


def test_synchronous_by_hand():
    """Two trainers of two threads: 500 keys of a share, half of which are the other's, 250 · 12 bytes of ids, 250 · 32 of rows each way."""
    found = speed("synchronous")
    lookups_s = LOOKUPS_S + 1e-4  # a call each
    pass_s = 1e-3 + 500e-6
    rings_s = 2 * (1e-4 + 40_000 / 2 / 1e9) + 2 * (1e-4 + 12 / 1e9)  # one bucket, and the vote
    # numbers of keys, keys, rows, gradients; and the small AllReduce before gradients are applied
    exchanged_s = 4 * 1e-4 + (3000 + 8000 + 8000) / 1e9 + 2 * (1e-4 + 12 / 1e9)
    path_s = 3 * lookups_s / 4 + pass_s + rings_s + 3e-4 + 5e-4 + exchanged_s  # one bucket: full at the end
    assert found.seconds[PATH] == pytest.approx(path_s, rel=1e-6)
    halves = replace(facts().model, last_bucket=5_000)
    beside = max(pass_s * 2 / 3 + rings_s / 2, rings_s)
    assert speed("synchronous", model=halves).seconds[PATH] == pytest.approx(
        path_s - pass_s * 2 / 3 - rings_s + beside, rel=1e-6
    )
    slow = speed("synchronous", model=halves, calibration=calibration().over(1e7)).cost.path_s
    assert slow["forward and backward"] == pytest.approx(
        pass_s / 3 + 2 * (1e-4 + 20_000 / 1e7) + 2 * (1e-4 + 12 / 1e7)
    )
    sent = 19_000 + 40_000
    wire_s = 2 * ((4 + 4) * 1e-5 + sent * 1e-10)  # 4 messages of exchanges; 2 · 1 of the ring and of the vote
    work_s = 2 * READING_S + 3 * lookups_s + 4 * pass_s + 4 * 3e-4 + 2 * 5e-4 + wire_s
    assert found.seconds[CORES] == pytest.approx(work_s / 4, rel=1e-6)
    assert found.seconds["a trainer's link"] == pytest.approx(sent / 1e9)


def test_steps_under_way_divide_the_path_and_nothing_else():
    deep = price(BY_NAME["hybrid"](trainers=2, staleness=3), facts(2))
    flat = speed("hybrid, τ = 0")
    assert deep.seconds[PATH] == pytest.approx(flat.seconds[PATH] / 4)
    assert deep.seconds[CORES] == flat.seconds[CORES]
    assert deep.samples_per_s > flat.samples_per_s


def test_nets_of_a_trainer_share_its_threads_and_wait_for_each_other_as_steps_under_way():
    """Two trainers of two threads, four cores: a net of two has a thread, and its pass takes twice as long."""
    for nets, threads in ((1, 2), (2, 1), (4, 1)):
        found = price(BY_NAME["hierarchical"](groups=2, nets=nets), facts(2))
        assert found.cost.path_s["forward and backward"] == pytest.approx(DENSE.seconds(500) * 2 / threads)
        assert found.cost.in_flight == nets


def test_a_group_servers_part_has_one_thread_whatever_its_trainers_have():
    """Two trainers of two threads; 3,000 of 8,000 operations are the trainers'. A pass of 1.5 ms takes 3 ms of one thread.

    With one net 0.5625 ms are on two threads and 1.875 ms on one, with two nets all 3 ms are on one, as of a copy of each trainer.
    """
    mixed = Operator(name="mix", kind="dots", flops_per_example=3000, output_bytes_per_example=4)
    layer = replace(GRAPH.operators[1], flops_per_example=5000)
    graph = OperatorGraph(
        operators=(GRAPH.operators[0], mixed, layer, GRAPH.operators[2]),
        edges=(
            Edge(producer="input", consumer="mix", bytes_per_example=64),
            Edge(producer="mix", consumer="top", bytes_per_example=4),
            Edge(producer="top", consumer="logits", bytes_per_example=4),
        ),
    )
    tagging = {"input": "trainer", "mix": "trainer", "top": "server 0", "logits": "trainer"}
    # there and back forward, and backward, with 100 µs each; 4 bytes four times over, of 500 examples
    exchanges_s = 4e-4 + 4 * 4 * 500 / 1e9
    dense = replace(DENSE, pass_s=0.0, example_s=3e-6)
    for nets, pass_s in ((1, 0.5625e-3 + 1.875e-3), (2, 3e-3)):
        strategy = BY_NAME["hierarchical"](trainers_per_group=2, servers_per_group=1, nets=nets)
        found = price(strategy, facts(2, graph=graph, tagging=tagging, dense_cost=dense))
        assert found.cost.path_s["forward and backward"] == pytest.approx(pass_s + exchanges_s)
    copies = price(BY_NAME["hierarchical"](groups=2, nets=2), facts(2, dense_cost=dense))
    assert copies.cost.path_s["forward and backward"] == pytest.approx(3e-3)


def test_groups_average_a_copy_each_and_their_trainers_send_none_of_it():
    """Two groups of two trainers and two servers: 40,000 bytes go there and back for each group, in every tenth step."""
    strategy = BY_NAME["hierarchical"](groups=2, trainers_per_group=2, servers_per_group=2)
    four = facts(4)
    found = price(strategy, four)
    # each of four servers asks the dense server and is answered: 8 messages, 160,000 bytes, in ten steps
    assert found.cost.work_s["averaging"] == pytest.approx(0.8 * 1e-5 + 16_000 * 1e-10)
    assert found.seconds["a dense server's link"] == pytest.approx(8_000 / 1e9)
    assert found.seconds["a trainer's link"] == pytest.approx(250 * 64 / 1e9)  # pooled rows
    # the layer's server: 250 · 2 examples of 64 bytes there and 4 of gradients, and a tenth of its parameters
    busier = [found.seconds.get(f"server {server}'s link", 0.0) for server in (0, 1)]
    assert max(busier) == pytest.approx((500 * 68 + 4_000) / 1e9)
    copies = price(BY_NAME["hierarchical"](groups=4), four)
    assert copies.cost.work_s["averaging"] == pytest.approx(0.8 * 1e-5 + 32_000 * 1e-10)
    assert copies.seconds["a dense server's link"] == pytest.approx(16_000 / 1e9)
    assert copies.seconds["a trainer's link"] == pytest.approx((250 * 64 + 4_000) / 1e9)


def test_bytes_of_averaging_are_a_trainers_part_of_its_groups_copy():
    """80,000 bytes there and back of a copy, in every tenth step: of one trainer, or of two that share it."""
    four = facts(4)
    copies = BY_NAME["hierarchical"](groups=4).plan(four).predicted["bytes"]["dense"]
    shared = BY_NAME["hierarchical"](groups=2, trainers_per_group=2, servers_per_group=2).plan(four)
    assert copies == pytest.approx(8_000)
    assert shared.predicted["bytes"]["dense"] == pytest.approx(4_000)


@pytest.mark.parametrize("gbit", [1, 10])
@pytest.mark.parametrize("size", [1, 2, 6])
def test_more_groups_on_as_many_more_machines_are_faster_and_never_by_more_than_their_number(size, gbit):
    """Nothing is shared but what grows with the groups: 512 examples for each trainer, and a server of each kind for it."""
    speeds = []
    for groups in (2, 4, 6, 8, 10):
        trainers, machines = groups * size, 2 * groups * size
        served = {"embedding_servers": trainers, "embedding_workers": trainers, "loaders": trainers}
        strategy = BY_NAME["hierarchical"](
            groups=groups,
            trainers_per_group=size,
            servers_per_group=size,
            nets=4,
            dense_servers=groups,
            **served,
        )
        base, share = facts(trainers).profile, 512 / BATCH
        profile = replace(
            base,
            rows_of_share={name: share * count for name, count in base.rows.items()},
            ids=share * trainers * base.ids,
            ids_of_tables={name: share * trainers * count for name, count in base.ids_of_tables.items()},
        )
        known = calibration().over(gbit * 1e9 / 8).spread(machines)
        priced = facts(
            trainers, batch_size=512 * trainers, profile=profile, calibration=known, threads=CORE_COUNT
        )
        speeds.append(price(strategy, priced).samples_per_s)
    assert speeds == sorted(speeds)
    assert all(speed <= times * speeds[0] * (1 + 1e-9) for times, speed in enumerate(speeds, start=1))


def test_trainers_in_step_pass_a_workers_link_one_behind_the_other():
    """Four trainers: of one worker five halves of a trainer's own messages, of two workers three, of four or more no more than its own."""
    base, four = speed("hybrid").cost.path_s["messages"], facts(4)
    each = [
        price(BY_NAME["hybrid"](trainers=4, embedding_workers=workers), four).cost.path_s["messages"]
        for workers in (1, 2, 4, 8)
    ]
    free = price(BY_NAME["asynchronous"](trainers=4), four).cost.path_s["messages"]
    assert each == pytest.approx([free * 5 / 2, free * 3 / 2, free, free])
    assert base == pytest.approx(speed("asynchronous").cost.path_s["messages"] * 3 / 2)


def test_more_machines_share_the_work_and_a_trainer_on_its_own_waits_for_no_core():
    """Four trainers of four threads: on one machine of four cores a pass takes four times as long as on four."""
    four = facts(4, threads=4)
    one = price(BY_NAME["asynchronous"](trainers=4), four)
    apart = price(BY_NAME["asynchronous"](trainers=4), replace(four, calibration=four.calibration.spread(4)))
    assert apart.seconds[CORES] == pytest.approx(one.seconds[CORES] / 4)
    assert one.cost.path_s["forward and backward"] == pytest.approx(4 * DENSE.seconds(250))
    assert apart.cost.path_s["forward and backward"] == pytest.approx(DENSE.seconds(250))
    assert apart.samples_per_s > one.samples_per_s
    assert calibration().spread(1) == calibration()


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


def test_substitution_computes_operators_in_parts_and_the_rest_on_each_trainer():
    """Of 10,000 parameters 4,000 belong to operators: passes of 1,000 examples for 6 of 10, of 500 for 4."""
    model = replace(facts().model, upper_parameters=6_000)
    strategy = BY_NAME["substitution"](trainers=2)
    found = price(strategy, facts(2, model=model))
    own = DENSE.seconds(500 + 0.6 * 500)
    rings_s = found.cost.path_s["forward and backward"] - own
    assert 0 < rings_s < own / 2
    whole = price(strategy, facts(2, model=replace(model, upper_parameters=10_000)))
    assert whole.cost.work_s["forward and backward"] == pytest.approx(2 * 2 * DENSE.seconds(1000))
    assert found.cost.work_s["forward and backward"] == pytest.approx(2 * 2 * own)


def test_links_of_servers_by_hand():
    """Rows of 32 bytes, keys of 12; 500 keys and 1,000 ids of a share, 16 numbers of an example pooled."""
    found = speed("hybrid")
    rows, keys, ids, pooled = 500 * 32, 500 * 12, 1000 * 8, 500 * 64
    assert found.seconds["an embedding server's link"] == pytest.approx(2 * (rows + keys) / 1e9)
    assert found.seconds["an embedding worker's link"] == pytest.approx(
        2 * max(ids + rows + pooled, pooled + rows + keys) / 1e9
    )
    assert found.seconds["a trainer's link"] == pytest.approx((pooled + 40_000) / 1e9)
    parameters = 3 * 40_000  # of four trainers, the three that are not beside the dense server
    four = price(BY_NAME["asynchronous"](trainers=4), facts(4))
    assert four.seconds["a trainer's link"] == pytest.approx((250 * 64 + parameters) / 1e9)
    assert four.seconds["the dense server"] == pytest.approx(4 * (3e-4 + 1e-4 + 40_000 / 1e9))
    slow = price(STRATEGIES["hybrid"], facts(2, calibration=calibration().over(1e6)))
    assert slow.bound == "an embedding worker's link"
    busiest, steps = 2 * (ids + rows + pooled) / 1e6, slow.cost.in_flight
    alone = sum(slow.cost.path_s.values())
    assert slow.samples_per_s == pytest.approx(BATCH / ((alone + (steps - 1) * busiest) / steps))


def test_a_net_too_small_for_all_threads_leaves_the_others_cores():
    base, lazy = speed("local"), speed("local", dense_cost=replace(DENSE, busy_threads=1.5))
    assert lazy.seconds[PATH] == base.seconds[PATH]
    assert lazy.seconds[CORES] == pytest.approx(base.seconds[CORES] - 2.5 * (2e-3 + 3e-4) / 4)


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_better_machines_are_never_slower(name):
    base = speed(name).samples_per_s
    for better in (
        calibration(bytes_per_s=1e10),
        calibration(latency_s=1e-5),
        calibration(message_cpu_s=0.0),
        calibration(byte_cpu_s=0.0),
        replace(calibration(), work=replace(WORK, lookup=Rate(0, 0, 0), step_s=0.0, example_s=0.0)),
    ):
        assert speed(name, calibration=better).samples_per_s >= base * (1 - 1e-9)
    worse = [speed(name, calibration=calibration().over(rate)).samples_per_s for rate in (1e8, 1e7, 1e6, 1e5)]
    assert worse == sorted(worse, reverse=True)
    assert worse[-1] < base / 10


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
    assert speed(name, **unknown) is None


def test_group_servers_need_the_graph_and_others_do_not():
    assert speed("groups", graph=None) is None
    assert speed("replicas", graph=None) is not None


def test_clipping_on_group_servers_is_a_round_trip():
    base, clipped = speed("groups"), speed("groups", clips=True)
    assert sum(clipped.cost.path_s.values()) == pytest.approx(sum(base.cost.path_s.values()) + 2 * 1e-4)
    messages = 2 * 2 * 2  # two trainers ask two servers, which answer
    assert sum(clipped.cost.work_s.values()) == pytest.approx(
        sum(base.cost.work_s.values()) + messages * 1e-5
    )
    assert speed("hybrid", clips=True).samples_per_s == speed("hybrid").samples_per_s


def test_codecs_of_a_plan_are_priced():
    base = speed("groups")
    halved = speed("groups", wire={"activations": "bfloat16", "dense_gradients": "bfloat16"})
    for name in ("trainer's link", "server 0's link"):
        if base.seconds[name]:
            assert halved.seconds[name] == pytest.approx(base.seconds[name] / 2)
    assert base.seconds["trainer's link"] > 0


def test_overheads_are_of_a_share_and_of_a_way():
    """Two trainers: 3 ms of a core and 1 µs an id of each one's 1,000 ids; 2 ms on the clock."""
    overhead = Overhead(Rate(3e-3, 1e-6, 0.0), Rate(2e-3, 0.0, 0.0))
    known = replace(calibration(), overheads={"hierarchical, group servers": overhead})
    assert speed("replicas", calibration=known) == speed("replicas")
    base, found = speed("groups").cost, speed("groups", calibration=known).cost
    assert found.work_s == {**base.work_s, "overhead": pytest.approx(2 * (3e-3 + 1e-3))}
    assert found.path_s == {**base.path_s, "overhead": pytest.approx(2e-3)}


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


def test_more_trainers_than_cores_share_them():
    """Passes of eight trainers on four cores take twice as long each, and so the path."""
    many = Basis.of(facts(8))
    assert many.crowd == 2
    assert many.pass_s(125) == pytest.approx(2 * (1e-3 + 125e-6))
    assert many.parallel == 4
