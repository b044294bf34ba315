"""Simulated runs against hand computations; what holds of them whatever the numbers are."""

import json
import math
import time
from dataclasses import replace
from itertools import pairwise
from statistics import NormalDist

import pytest
from test_step_graphs import CORE_COUNT, DISTRIBUTED, STRATEGIES, calibration, facts, folded, graph_of

from girih.errors import ConfigError
from girih.planner.facts import TableFacts
from girih.planner.simulator.draws import Draws
from girih.planner.simulator.hosts import HostGroup, Hosts
from girih.planner.simulator.prediction import predict
from girih.planner.simulator.result import _speed, quantile, simulate
from girih.planner.simulator.terms import LINES_PER_S, lines_per_s
from girih.planner.steps.graph import SHARDS, Operation, StepGraph
from girih.strategies import BY_NAME
from girih.strategies.strategy import price

EXACT = {"runs": 1, "step_spread": 0.0, "run_spread": 0.0}
MACHINE = Hosts((HostGroup(count=1, cores=2, memory_gb=1, gbit=8, link_per_process=True),))


def exact(graph, hosts=MACHINE, **more):
    return simulate(graph, hosts, **EXACT, **more)


def graph(operations, trainers=1, in_flight=1, **roles):
    counts = {"trainer": trainers, **roles}
    return StepGraph(examples=trainers, roles=counts, operations=tuple(operations), in_flight=in_flight)


def work(name, core_s, after=(), role="trainer", **more):
    return Operation(name=name, term=name, role=role, core_s=core_s, after=after, **more)


def test_steps_of_a_trainer_alone_take_their_path():
    found = exact(graph([work("a", 0.3, begins=True), work("b", 0.2, ("a",))]))
    assert found.samples_per_s == pytest.approx(2.0)
    assert found.bottleneck == "one step after the other"
    assert found.utilization["cores"] == pytest.approx(0.5)


def test_trainers_share_cores():
    """Four trainers of one thread on two cores: each gets half a core."""
    found = exact(graph([work("a", 0.5, begins=True)], trainers=4))
    assert found.samples_per_s == pytest.approx(4.0)
    assert found.bottleneck == "cores"


def test_steps_in_flight_overlap_until_the_busiest_thread_is_full():
    """A server thread takes 0.2 s of a step of 0.5 s: one in flight makes 2 a second, three make 5."""
    operations = [
        work("a", 0.3, begins=True),
        work("b", 0.2, ("a",), role="embedding-worker", executor="requests"),
    ]
    hosts = Hosts((HostGroup(count=1, cores=64, memory_gb=1, gbit=8),))
    speeds = [
        exact(graph(operations, in_flight=number, **{"embedding-worker": 1}), hosts).samples_per_s
        for number in (1, 2, 3)
    ]
    assert speeds == pytest.approx([2.0, 4.0, 5.0], rel=0.02)


def test_threads_of_shards_divide_the_work_of_a_server_and_keep_the_order_of_requests():
    """A lookup of 0.4 s takes 0.1 s on four shards; with three in flight, cores of the server are full."""
    operations = [
        work("a", 0.1, begins=True),
        work("b", 0.4, ("a",), role="embedding-server", executor=SHARDS),
    ]
    hosts = Hosts(
        (
            HostGroup(count=1, cores=4, memory_gb=1, gbit=8, roles=("trainer",)),
            HostGroup(count=1, cores=4, memory_gb=1, gbit=8, roles=("embedding-server",)),
        )
    )
    alone, several = (
        exact(graph(operations, in_flight=number, **{"embedding-server": 1}), hosts) for number in (1, 3)
    )
    assert alone.samples_per_s == pytest.approx(5.0)
    assert several.samples_per_s == pytest.approx(10.0, rel=0.02)
    assert several.utilization["embedding-server: shard 3"] == pytest.approx(1.0, rel=0.05)
    slow = replace(hosts.hosts[1], cores=0.5)
    assert exact(
        graph(operations, **{"embedding-server": 1}), Hosts((hosts.hosts[0], slow))
    ).samples_per_s == pytest.approx(1 / 0.9)


def test_core_seconds_of_a_step_are_those_of_its_operations():
    """0.3 of the trainer, and 0.1 of each end of a message, for two trainers."""
    send = Operation(
        name="b", term="b", role="trainer", to="embedding-worker", core_s=0.2, sent_bytes=1.0, after=("a",)
    )
    found = exact(
        graph([work("a", 0.3, begins=True), send], trainers=2, **{"embedding-worker": 1}), steps=100
    )
    assert found.core_s == pytest.approx({"trainer": 0.8, "embedding-worker": 0.2}, rel=0.02)


def test_core_seconds_of_a_step_leave_out_what_was_read_ahead_before_it():
    """A reader is four batches ahead from the start on. A step reads one."""
    read = work("read", 0.1, executor="reader", ahead=4)
    found = exact(graph([read, work("a", 0.3, ("read",), begins=True)]), steps=12)
    assert found.core_s == pytest.approx({"trainer": 0.4})


def test_messages_share_a_receivers_link():
    """Two trainers send 0.5 GB each to one worker over 1 GB/s: 1 s together; the answers have no bytes."""
    send = Operation(name="a", term="a", role="trainer", to="embedding-worker", sent_bytes=5e8, begins=True)
    found = exact(graph([send], trainers=2, **{"embedding-worker": 1}))
    assert found.samples_per_s == pytest.approx(2.0)
    assert found.bottleneck == "embedding-worker: link in"
    both = exact(graph([send], trainers=2, **{"embedding-worker": 2}))
    assert both.samples_per_s == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("in_turns", "burst_kb", "seconds"), [(False, 0, 0.5), (True, 0, 1.0), (True, 250_000, 0.5)]
)
def test_trainers_that_send_in_turns_use_one_direction_at_a_time(in_turns, burst_kb, seconds):
    """0.5 GB each way over 1 GB/s. A token bucket of 0.25 GB serves half of each message at once."""
    hosts = Hosts(
        (HostGroup(count=1, cores=2, memory_gb=1, gbit=8, burst_kb=burst_kb, link_per_process=True),)
    )
    send = Operation(
        name="a", term="a", role="trainer", to="trainer", sent_bytes=5e8, together=True, in_turns=in_turns, begins=True
    )  # fmt: skip
    rest = work("b", 1.0, ("a",))  # tokens come back meanwhile
    found = exact(graph([send, rest], trainers=2), hosts)
    assert found.samples_per_s == pytest.approx(2 / (1.0 + seconds))


def test_processes_of_one_host_need_no_link_and_others_share_it():
    send = Operation(
        name="a",
        term="a",
        role="trainer",
        to="embedding-worker",
        sent_bytes=1e9,
        bytes_per_s=4e9,
        begins=True,
    )
    one = Hosts((HostGroup(count=1, cores=2, memory_gb=1, gbit=8),))
    assert exact(graph([send], **{"embedding-worker": 1}), one).samples_per_s == pytest.approx(4.0)
    apart = Hosts(
        (
            HostGroup(count=1, cores=2, memory_gb=1, gbit=8, delay_ms=250, roles=("trainer",)),
            HostGroup(count=1, cores=2, memory_gb=1, gbit=80, roles=("embedding-worker",)),
        )
    )
    assert exact(graph([send], **{"embedding-worker": 1}), apart).samples_per_s == pytest.approx(1 / 1.25)


def test_a_barrier_waits_for_the_slowest_trainer():
    """Hosts of one core: a trainer alone and two that share. Together, all take as long as the two."""
    hosts = Hosts((HostGroup(count=2, cores=1, memory_gb=1, gbit=8),))
    alone = [work("a", 1.0, begins=True)]
    together = [*alone, Operation(name="b", term="b", role="trainer", after=("a",), together=True)]
    assert exact(graph(alone, trainers=3), hosts, steps=30).samples_per_s == pytest.approx(2.0, rel=0.02)
    assert exact(graph(together, trainers=3), hosts).samples_per_s == pytest.approx(1.5)


def test_a_thread_that_waits_for_rows_asks_for_no_others_meanwhile():
    """The main thread holds a step from the wait to the end of its pass. With one step in flight this changes nothing."""
    known = facts(2)
    deep = BY_NAME["hybrid"](trainers=2, staleness=3).step_graph(known)
    wide = Hosts((HostGroup(count=1, cores=64, memory_gb=1, gbit=800, link_per_process=True),))
    found = exact(deep, wide)
    held = replace(deep, operations=tuple(replace(each, takes="", follows="") for each in deep.operations))
    free = tuple(replace(each, frees="") for each in held.operations)
    assert found.samples_per_s <= exact(replace(deep, operations=free), wide).samples_per_s * (1 + 1e-9)
    assert 0 < found.staleness_p99 <= 3


def test_background_work_that_outlasts_its_step_goes_on():
    """A copy of 0.5 GB takes 0.5 s over the link, a step 0.1 s: two copies at a time, and no step waits."""
    send = Operation(
        name="b", term="b", role="trainer", to="dense-server", sent_bytes=5e8, after=("a",), background=True
    )
    back = replace(send, name="c", role="dense-server", to="trainer", sent_bytes=1.0, after=("b",))
    found = exact(graph([work("a", 0.1, begins=True), send, back], **{"dense-server": 1}))
    assert found.samples_per_s == pytest.approx(10.0)


def test_groups_with_servers_share_dense_servers():
    """Two groups ask one dense server, which is in no group."""
    strategy = BY_NAME["hierarchical"](groups=2, trainers_per_group=2, servers_per_group=2, nets=2)
    found = price(strategy, facts(4), **EXACT, steps=8).simulated
    assert found.samples_per_s > 0
    assert found.core_s["dense-server"] > 0


def test_local_takes_its_path_if_cores_suffice():
    hosts = Hosts((HostGroup(count=1, cores=CORE_COUNT + 1, memory_gb=1, gbit=8),))  # one for the reader
    found = exact(graph_of("local"), hosts)
    assert found.samples_per_s == pytest.approx(1000 / sum(folded("local").path_s.values()), rel=1e-6)


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(name):
    known = facts(STRATEGIES[name].trainers)
    one, again, other = (
        json.dumps(price(STRATEGIES[name], known, seed=seed, runs=2, steps=8).to_dict()) for seed in (1, 1, 2)
    )
    assert one == again
    assert one != other


def test_quantiles_of_nine_runs_are_those_of_their_distribution():
    speeds = [_speed((number + 0.5) / 9, 0.12) for number in range(9)]
    sigma = math.sqrt(math.log1p(0.12**2))
    for at in (0.1, 0.5, 0.9):
        assert quantile(speeds, at) == pytest.approx(math.exp(sigma * NormalDist().inv_cdf(at)), rel=0.01)
    assert [quantile(speeds, at) for at in (0, 0.05, 0.95, 1)] == [speeds[place] for place in (0, 0, 8, 8)]


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_staleness_is_bounded_and_cores_are_never_overfull(name):
    found = price(STRATEGIES[name], facts(STRATEGIES[name].trainers), runs=3, steps=16).simulated
    assert found.samples_per_s_p5 <= found.samples_per_s_p10 <= found.samples_per_s <= found.samples_per_s_p90
    assert max(found.utilization.values()) <= 1 + 1e-9
    bound = STRATEGIES[name].step_graph(facts(STRATEGIES[name].trainers)).in_flight - 1
    assert 0 <= found.staleness_p50 <= found.staleness_p99 <= found.staleness_max <= bound
    assert 0 <= found.staleness_mean <= found.staleness_max
    assert found.extrapolated == ()


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_slower_links_and_fewer_cores_are_never_faster(name):
    known = facts(STRATEGIES[name].trainers)
    found = [
        price(STRATEGIES[name], replace(known, calibration=calibration().over(rate)), **EXACT).samples_per_s
        for rate in (1e9, 1e8, 1e7, 1e6)
    ]
    # a longer message can change the order of work on shared cores, and shorten the whole (Graham 1969)
    assert all(slower <= 1.05 * faster for faster, slower in pairwise(found))
    assert found[-1] < found[0] / 10
    few, many = (
        exact(
            graph_of(name),
            Hosts((HostGroup(count=1, cores=cores, memory_gb=1, gbit=8, link_per_process=True),)),
        ).samples_per_s
        for cores in (1, 8)
    )
    assert few < many


def fleet(count, **more):
    """A host for each of ``count`` trainers, servers, workers and loaders."""
    return Hosts((HostGroup(count=4 * count, cores=4, memory_gb=1000, gbit=10, **more),))


def large(strategy, trainers, **options):
    """``facts`` for more trainers, each with the share of one of two."""
    base, factor = facts(2), trainers / 2
    known = base.profile
    profile = replace(
        known,
        rows_of_share=known.rows_of_share,
        ids=factor * known.ids,
        ids_of_tables={name: factor * count for name, count in known.ids_of_tables.items()},
    )
    counts = dict.fromkeys(("embedding_servers", "embedding_workers", "loaders"), trainers)
    made = BY_NAME[strategy](trainers=trainers, **counts, **options)
    return made, replace(base, num_trainers=trainers, batch_size=500 * trainers, profile=profile, threads=4)


def test_a_few_processes_stand_for_many_equal_ones():
    """Asynchronous trainers with a share of everything each: as fast per trainer, whether 8, 16 or 64 are simulated by 8."""
    speeds = []
    for trainers in (8, 16, 64):
        strategy, known = large("asynchronous", trainers)
        # with more trainers, the dense server and each loader have more to do, and messages to servers take more of a core
        made = strategy.step_graph(replace(known, calibration=calibration(message_cpu_s=0.0)))
        rows = [each for each in made.operations if "parameter-server" not in (each.role, each.to)]
        equal = tuple(replace(each, core_s=min(each.core_s, 1e-3)) for each in rows)
        speeds.append(exact(replace(made, operations=equal), fleet(trainers)).samples_per_s / trainers)
    assert speeds == pytest.approx([speeds[0]] * 3, rel=0.05)


def test_a_thousand_hosts_with_1e14_parameters_simulate_in_a_minute():
    strategy, known = large("hybrid", 250)
    rows = 10**14 // 128
    known = replace(known, tables=(TableFacts(name="a", row_bytes=300, max_rows=rows),))
    started = time.process_time()
    found = predict(strategy.step_graph(known), known, fleet(250), runs=3)
    assert time.process_time() - started < 20  # a third of the default number of runs
    assert found.samples_per_s > 0
    assert len(found.simulated.extrapolated) == 3  # trainers, machines, rows of a server


def test_rows_must_fit_into_memory():
    strategy, known = large("hybrid", 2)
    known = replace(known, tables=(TableFacts(name="a", row_bytes=300, max_rows=10**12),))
    with pytest.raises(
        ConfigError, match=r"memory_gb = 1000: 1 × embedding-server on a host need 150,000 GB"
    ):
        predict(strategy.step_graph(known), known, fleet(2))


def test_lines_of_large_tables_pass_the_measured_points_and_fall_between():
    for rows, speed in LINES_PER_S:
        assert lines_per_s(rows) == pytest.approx(speed)
    assert LINES_PER_S[0][1] > lines_per_s(3e6) > lines_per_s(2e7) > LINES_PER_S[2][1] == lines_per_s(1e12)


def test_a_device_computes_passes():
    strategy, known = large("hybrid", 2)
    slow, fast = (
        predict(strategy.step_graph(known), known, fleet(2, device=device), runs=1) for device in ("", "v100")
    )
    assert "v100" in fast.simulated.extrapolated[0]
    assert "trainer: gpu" in fast.simulated.utilization
    assert "trainer: gpu" not in slow.simulated.utilization
    with pytest.raises(ConfigError, match=r"device = 'tpu': expected one of v100"):
        predict(strategy.step_graph(known), known, fleet(2, device="tpu"))


def test_factors_have_mean_one_and_the_largest_of_many_is_larger():
    draws = Draws("1", 0.2)
    factors = [draws.factor() for _ in range(20_000)]
    mean = sum(factors) / len(factors)
    assert mean == pytest.approx(1, abs=0.01)
    assert (sum((each - mean) ** 2 for each in factors) / len(factors)) ** 0.5 == pytest.approx(0.2, rel=0.05)
    largest = [max(draws.factor() for _ in range(10)) for _ in range(2000)]
    drawn = [draws.factor(of=10) for _ in range(2000)]
    assert sum(drawn) / sum(largest) == pytest.approx(1, rel=0.01)


HOSTS = """
[[hosts]]
count = 2
cores = 48
memory_gb = 512
gbit = 100
delay_ms = 0.1
roles = ["trainer", "loader"]

[[hosts]]
count = 3
cores = 8
memory_gb = 12_000
gbit = 25
roles = ["embedding-server", "embedding-worker"]
"""


def test_hosts_are_read_and_processes_are_dealt_in_turn(tmp_path):
    file = tmp_path / "hosts.toml"
    file.write_text(HOSTS)
    hosts = Hosts.read(file)
    assert hosts.cores == 2 * 48 + 3 * 8
    places = hosts.place({"trainer": 3, "loader": 1, "embedding-server": 4}, [2, 3])
    assert places == {
        ("trainer", 0): (0, 0), ("trainer", 1): (0, 1), ("trainer", 2): (0, 0), ("loader", 0): (0, 1),
        ("embedding-server", 0): (1, 0), ("embedding-server", 1): (1, 1), ("embedding-server", 2): (1, 2),
        ("embedding-server", 3): (1, 0),
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"no host runs 'dense-server': roles list .*; add 'dense-server'"):
        hosts.place({"trainer": 1, "dense-server": 1}, [2, 3])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cores = 48", "core = 48", "core"),
        ("cores = 48", "", "cores"),
        ("cores = 48", "cores = 0", "> 0"),
        ("gbit = 100", 'gbit = "fast"', "number"),
        ("count = 2", "count = 0", "at least 1"),
        ('"loader"', '"loaders"', "'loaders': expected some of trainer"),
        ("delay_ms = 0.1", "delay_ms = -1", "≥ 0"),
        ("[[hosts]]", "[[host]]", "host"),
    ],
)
def test_mistakes_in_hosts_say_what_was_expected(old, new, message, tmp_path):
    file = tmp_path / "hosts.toml"
    file.write_text(HOSTS.replace(old, new))
    with pytest.raises(ConfigError, match=message) as found:
        Hosts.read(file)
    assert "hosts.toml" in str(found.value) or "roles" in str(found.value)


def test_hosts_must_not_be_empty(tmp_path):
    file = tmp_path / "hosts.toml"
    file.write_text("hosts = []\n")
    with pytest.raises(ConfigError, match="at least one"):
        Hosts.read(file)
