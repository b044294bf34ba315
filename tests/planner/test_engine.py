"""The engine against hand computations and closed forms of queues."""

import random
from itertools import pairwise

import pytest

from girih.planner.simulator.engine import Activity, Capacity, Engine, Executor, fair_rates


def ends(engine, jobs):
    """Runs (start, work, capacities, most); returns when each ended."""
    found = {}
    for number, (start_s, work, capacities, most) in enumerate(jobs):

        def begin(number=number, work=work, capacities=capacities, most=most):
            engine.start(work, capacities, most, lambda: found.setdefault(number, engine.now_s))

        engine.after(start_s, begin)
    engine.run()
    return [found[number] for number in range(len(jobs))]


def test_processor_sharing_by_hand():
    """Two cores: one job alone for 1 s, three jobs share until the first has its 4 core-seconds of one core each."""
    cores = Capacity("cores", 2.0)
    found = ends(Engine(), [(0, 2, (cores,), 1), (1, 2, (cores,), 1), (1, 2, (cores,), 1)])
    # from 1 s on each has 2/3 of a core: the first has 1 left, so it ends at 2.5; the others have 1 left and a core each
    assert found == pytest.approx([2.5, 3.5, 3.5])
    assert cores.served == pytest.approx(6)


def test_a_job_with_many_threads_takes_cores_that_others_leave():
    cores = Capacity("cores", 4.0)
    assert ends(Engine(), [(0, 1, (cores,), 1), (0, 9, (cores,), 4)]) == pytest.approx([1, 2.5])


def test_fair_links_by_hand():
    """Max-min: of a link of 10 shared by three flows, one is held to 2 elsewhere, so the others have 4 each."""
    shared, narrow, wide = Capacity("a", 10.0), Capacity("b", 2.0), Capacity("c", 100.0)
    flows = [
        Activity(1, (shared, narrow), 99, print),
        Activity(1, (shared, wide), 99, print),
        Activity(1, (shared,), 99, print),
        Activity(1, (wide,), 50, print),
    ]
    assert list(fair_rates(flows).values()) == pytest.approx([2, 4, 4, 50])


def test_fair_rates_are_max_min_on_random_networks():
    """No flow is below its most, unless a full link of it carries no faster flow (Bertsekas and Gallager, §6.5.2)."""
    draw = random.Random(3)
    for _ in range(200):
        links = [Capacity(str(number), draw.uniform(1, 10)) for number in range(5)]
        flows = [
            Activity(1, tuple(draw.sample(links, draw.choice((1, 2)))), draw.uniform(0.2, 8), print)
            for _ in range(draw.randint(1, 12))
        ]
        rates = fair_rates(flows)
        carried = {link: [rates[flow] for flow in flows if link in flow.capacities] for link in links}
        for link in links:
            assert sum(carried[link]) <= link.rate * (1 + 1e-9)
        for flow in flows:
            full = [link for link in flow.capacities if sum(carried[link]) >= link.rate * (1 - 1e-9)]
            bottleneck = any(rates[flow] >= max(carried[link]) * (1 - 1e-9) for link in full)
            assert bottleneck or rates[flow] == pytest.approx(flow.most)


def test_a_token_bucket_sends_its_burst_at_once_and_fills_while_idle():
    link = Capacity("link", 10.0, burst=20.0)
    found = ends(Engine(), [(0, 30, (link,), 1e9), (5, 30, (link,), 1e9)])
    # 20 at once, 10 in 1 s; at 5 s the bucket holds 20 again
    assert found == pytest.approx([1.0, 6.0])
    soon = Capacity("link", 10.0, burst=20.0)
    assert ends(Engine(), [(0, 30, (soon,), 1e9), (2, 30, (soon,), 1e9)]) == pytest.approx([1.0, 4.0])


def test_md1_waits_as_pollaczek_and_khinchine_say():
    """Poisson arrivals at ρ = 0.7 and unit service: mean wait ρ / (2 (1 − ρ)) = 1.1667."""
    engine, draw, waits = Engine(), random.Random(1), []
    server = Executor(engine, "server")
    at_s = 0.0
    for _ in range(60_000):
        at_s += draw.expovariate(0.7)

        def arrive(at_s=at_s):
            def begin():
                waits.append(engine.now_s - at_s)
                engine.after(1.0, server.release)

            server.acquire(begin)

        engine.after(at_s, arrive)
    engine.run()
    assert sum(waits) / len(waits) == pytest.approx(0.7 / (2 * 0.3), rel=0.04)
    server.tick(engine.now_s)
    assert server.busy_s / engine.now_s == pytest.approx(0.7, rel=0.01)
    assert server.waiting_s / engine.now_s == pytest.approx(0.7 * 0.7 / (2 * 0.3), rel=0.05)  # Little


def test_mm1_processor_sharing_has_the_mean_time_of_mm1():
    """M/M/1-PS: mean time in system 1 / (μ − λ)."""
    engine, draw, times = Engine(), random.Random(2), []
    core, at_s = Capacity("core", 1.0), 0.0
    for _ in range(30_000):
        at_s += draw.expovariate(0.5)
        job = draw.expovariate(1.0)

        def arrive(at_s=at_s, work=job):
            engine.start(work, (core,), 1.0, lambda: times.append(engine.now_s - at_s))

        engine.after(at_s, arrive)
    engine.run()
    assert sum(times) / len(times) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("customers", [1, 2, 5])
def test_a_closed_network_has_the_throughput_of_mean_value_analysis(customers):
    """Two exponential FIFO stations and a delay: exact MVA (Reiser and Lavenberg, 1980)."""
    demands, think_s, num_cycles = (1.0, 0.6), 2.0, 20_000
    engine, draw = Engine(), random.Random(4)
    stations, passed = [Executor(engine, str(each)) for each in demands], []

    def visit(station):
        def begin():
            engine.after(draw.expovariate(1 / demands[station]), lambda: leave(station))

        stations[station].acquire(begin)

    def leave(station):
        stations[station].release()
        if station == 0:
            visit(1)
        else:
            passed.append(engine.now_s)
            if len(passed) < num_cycles:
                engine.after(draw.expovariate(1 / think_s), lambda: visit(0))

    for _ in range(customers):
        engine.after(draw.expovariate(1 / think_s), lambda: visit(0))
    engine.run()
    queues, rate = [0.0, 0.0], 0.0
    for number in range(1, customers + 1):
        times = [demand * (1 + queue) for demand, queue in zip(demands, queues, strict=True)]
        rate = number / (think_s + sum(times))
        queues = [rate * each for each in times]
    assert num_cycles / passed[num_cycles - 1] == pytest.approx(rate, rel=0.03)
    assert all(earlier <= later for earlier, later in pairwise(passed))


def test_an_executor_keeps_the_order_of_requests():
    engine, order = Engine(), []
    server = Executor(engine, "server")
    for name in "abc":
        server.acquire(lambda name=name: (order.append(name), engine.after(1, server.release)))
    engine.run()
    assert (order, engine.now_s, server.longest) == (["a", "b", "c"], 3.0, 2)
