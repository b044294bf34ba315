"""Slow hosts of benchmarks: the hosts file, the quotas, and the page that is made of results."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from girih.cli import bench

pytestmark = pytest.mark.usefixtures("folder")

FILE = """
[[hosts]]
count = 4
cores = 0.5
memory_gb = 2
gbit = 0.2
delay_ms = 1.0
roles = ["trainer", "loader"]
[[hosts]]
count = 2
cores = 1
memory_gb = 8
gbit = 1
roles = ["embedding-server"]
"""
SPIN = "import time; end = time.perf_counter() + 2\nwhile time.perf_counter() < end: pass\nprint(time.process_time())"


@pytest.fixture
def kinds(tmp_path):
    import hosts_file

    file = tmp_path / "hosts.toml"
    file.write_text(FILE)
    return hosts_file.load(file)


def test_processes_take_the_hosts_with_their_role_in_turn(kinds):
    import hosts_file

    places = hosts_file.placed(kinds, {"trainer": 4, "loader": 1, "embedding-server": 3})
    assert [places[f"trainer {rank}"] for rank in range(4)] == ["h0", "h1", "h2", "h3"]
    assert places["loader 0"] == "h0"
    assert [places[f"embedding-server {index}"] for index in range(3)] == ["h4", "h5", "h4"]
    with pytest.raises(ValueError, match="no host has the role group-server"):
        hosts_file.placed(kinds, {"group-server": 1})


def test_hosts_follow_the_trainers_in_proportion_and_links_the_cores(kinds):
    import hosts_file

    assert [kind.count for kind in hosts_file.for_trainers(kinds, 8)] == [8, 4]
    assert [kind.count for kind in hosts_file.for_trainers(kinds, 1)] == [1, 1]
    slow = hosts_file.at_cores(kinds, 0.1)
    assert [kind.cores for kind in slow] == [0.1, 0.2]
    assert [kind.gbit for kind in slow] == pytest.approx([0.04, 0.2])
    assert [kind.delay_ms for kind in slow] == pytest.approx([5.0, 0.0])
    assert hosts_file.shaped(slow[0]).rate == "40000kbit"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("gbit = 0.2", "gbits = 0.2", "unknown key 'gbits'"),
        ('"loader"', '"loaders"', "roles: 'loaders': expected some of"),
        ("gbit = 0.2\n", "", "gbit"),
        ('"trainer", ', "", "no host has the role trainer"),
    ],
)
def test_a_mistake_in_a_hosts_file_is_named(tmp_path, before, after, message):
    import hosts_file

    file = tmp_path / "hosts.toml"
    file.write_text(FILE.replace(before, after))
    with pytest.raises(ValueError, match=message):
        hosts_file.load(file)


def test_the_hosts_of_the_benchmark_have_all_roles():
    import hosts_file

    (kind,) = hosts_file.load(bench.FOLDER / "slow_hosts.toml")
    assert (kind.count, kind.cores, kind.gbit) == (16, 0.1, 0.1)
    assert set(kind.roles) == set(hosts_file.EVERY_ROLE)


def test_quotas_of_both_versions_of_control_groups():
    import cpu_groups

    one = cpu_groups.CpuGroup((Path("/c/cpu/t0"), Path("/c/cpuacct/t0")), unified=False)
    assert one.limit(0.1) == {"/c/cpu/t0/cpu.cfs_period_us": "10000", "/c/cpu/t0/cpu.cfs_quota_us": "1000"}
    assert one.limit(None)["/c/cpu/t0/cpu.cfs_quota_us"] == "-1"
    assert one.usage_file == Path("/c/cpuacct/t0/cpuacct.usage")
    two = cpu_groups.CpuGroup((Path("/c/t0"),), unified=True)
    assert two.limit(1.5) == {"/c/t0/cpu.max": "15000 10000"}
    assert two.limit(None) == {"/c/t0/cpu.max": "max 10000"}
    with pytest.raises(ValueError, match=r"cores = 0\.05"):
        two.limit(0.05)


def test_groups_are_below_the_own_group_or_below_the_root_of_version_two(tmp_path):
    import cpu_groups

    own, mounts, root = tmp_path / "cgroup", tmp_path / "mounts", tmp_path / "unified"
    own.write_text("3:cpuacct:/\n2:cpu:/work\n1:memory:/x\n0::/\n")
    mounts.write_text("c /s/cpu cgroup rw,cpu 0 0\nc /s/cpuacct cgroup rw,cpuacct 0 0\n")
    assert cpu_groups.parents(own, mounts) == [Path("/s/cpu/work"), Path("/s/cpuacct")]
    own.write_text("2:cpu,cpuacct:/work\n")
    mounts.write_text("c /s/both cgroup rw,cpu,cpuacct 0 0\n")
    assert cpu_groups.parents(own, mounts) == [Path("/s/both/work")]
    root.mkdir()
    (root / "cgroup.controllers").write_text("cpuset cpu io")
    mounts.write_text(f"c {root} cgroup2 rw 0 0\n")
    assert cpu_groups.parents(own, mounts) == [root]
    (root / "cgroup.controllers").write_text("io")
    assert cpu_groups.parents(own, mounts) == []


def test_the_usage_of_a_group_is_read_in_seconds(tmp_path):
    import cpu_groups

    (tmp_path / "cpuacct.usage").write_text("2500000000\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")
    assert cpu_groups.used_s(tmp_path / "cpuacct.usage") == 2.5
    assert cpu_groups.used_s(tmp_path / "cpu.stat") == 1.5


@pytest.mark.slow
def test_a_slow_host_gets_its_share_of_a_core_and_leaves_nothing():
    import cpu_groups
    import network

    if (reason := network.missing(cores=True)) is not None:
        pytest.skip(reason)
    with network.network({"a": network.Host("10mbit", cores=0.2)}) as hosts:
        place, group = hosts.places["a"], hosts.groups["a"]
        assert place.environment["OMP_NUM_THREADS"] == "1"
        cpu_groups.write(hosts.limits())
        done = subprocess.run(
            [*place.command, sys.executable, "-c", SPIN], capture_output=True, text=True, check=True
        )
        assert float(done.stdout) < 1.0  # of two seconds
        assert cpu_groups.used_s(group.usage_file) >= float(done.stdout)
    assert not any(folder.exists() for folder in group.folders)


def test_a_relay_delays_one_direction_and_keeps_the_order():
    """Its devices are sockets here: a message is a packet."""
    import delays

    (host, inner), (bridge, outer) = (socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
    end, ending = os.pipe()
    after = {inner.fileno(): (outer.fileno(), 0.05), outer.fileno(): (inner.fileno(), 0.0)}
    relay = threading.Thread(target=delays.relay, args=(after, end))
    relay.start()
    try:
        start = time.perf_counter()
        for number in range(20):
            host.send(bytes([number]))
        sent = time.perf_counter()
        bridge.send(b"back")
        assert host.recv(9) == b"back"
        assert time.perf_counter() - sent < 0.04
        assert not select.select([bridge], (), (), 0)[0], "no packet passes before its delay is over"
        assert [bridge.recv(9)[0] for _ in range(20)] == list(range(20))
        assert 0.05 <= time.perf_counter() - start < 1.0
    finally:
        os.write(ending, b"x")
        relay.join()
        for device in (host, inner, bridge, outer):
            device.close()
        os.close(end)
        os.close(ending)


@pytest.mark.slow
def test_a_delay_of_both_ends_is_in_each_round_trip_and_no_byte_is_lost():
    import links
    import network

    if (reason := network.missing(delay=True)) is not None:
        pytest.skip(reason)
    found = links.measured("100mbit", 5.0, trips=40, stream_s=0.5)
    assert found["relay"] == ("no" if network.has_netem() else "yes")
    assert -0.01 < found["error ms: median"] < 2.0
    assert 0.5 < found["of the rate"] < 1.2
    assert 1.0 < found["counted bytes of those sent"] < 1.2


@pytest.mark.slow
def test_a_lost_host_is_gone_with_its_processes():
    import network

    if (reason := network.missing()) is not None:
        pytest.skip(reason)
    with network.network(["a", "b"], "10mbit") as hosts:
        waiting = subprocess.Popen([*hosts.places["a"].command, "sleep", "60"])
        until = time.monotonic() + 10.0
        while waiting.pid not in network.pids("a") and time.monotonic() < until:
            time.sleep(0.01)
        network.lose(hosts, "a")
        assert waiting.wait(10.0) == -9
        assert not Path("/sys/class/net", hosts.links["a"]).exists()
        assert Path("/sys/class/net", hosts.links["b"]).exists()


TERMINATED = """
import subprocess, sys
import network

with network.network(["a"], "10mbit") as hosts:
    waiting = subprocess.Popen([*hosts.places["a"].command, "sleep", "60"])
    print(waiting.pid, hosts.links["a"], flush=True)
    waiting.wait()
"""


@pytest.mark.slow
def test_a_benchmark_that_is_terminated_leaves_no_hosts_and_no_processes():
    import network

    if (reason := network.missing()) is not None:
        pytest.skip(reason)
    words = [sys.executable, "-c", TERMINATED]
    bench_process = subprocess.Popen(words, cwd=bench.FOLDER, stdout=subprocess.PIPE, text=True)
    pid, link = bench_process.stdout.readline().split()
    assert Path("/sys/class/net", link).exists()
    bench_process.terminate()
    assert bench_process.wait(30.0) == 128 + signal.SIGTERM
    bench_process.stdout.close()
    assert not Path("/sys/class/net", link).exists()
    assert not Path("/proc", pid).exists()


def test_the_page_says_if_speeds_are_in_proportion(monkeypatch):
    import slow_pages

    monkeypatch.setattr(slow_pages, "_predictions", lambda: {"tables": []})

    def row(cores, rate):
        return {
            "strategy": "synchronous", "cores": cores, "gbit": cores, "samples/s": rate, "others, of the cores": 0.02,
        }  # fmt: skip

    def part(*rates):
        rows = [row(1.0, 1000.0), *(row(0.1, rate) for rate in rates)]
        table = {"title": "proportion: two trainers", "rows": rows}
        machine = {"cores": 2, "processor": "X"}
        results = {"benchmark": "slow_hosts", "when": "2026-01-02T", "machine": machine, "options": {}}
        parts = slow_pages.page_parts(results | {"tables": [table]})
        assert parts["strategies"] is None
        return parts["proportion"]

    assert "largest deviation is 1%; the bound is 10%: it holds" in part(98.0, 101.0, 102.0)
    assert "| synchronous | 0.1 | 100 | 1,000 × 0.1 | 101 | 1.01 | – | 98 to 102 |" in part(
        98.0, 101.0, 102.0
    )
    assert "largest deviation is 20%; the bound is 10%: it does not hold" in part(79.0, 80.0, 102.0)


def test_trainers_of_their_own_pace_are_timed_by_their_own_status():
    import fleet

    before = {"trainer 0": (10.0, 100.0), "trainer 1": (11.0, 300.0), "trainer 2": (9.0, 50.0)}
    after = {"trainer 0": (12.0, 150.0), "trainer 1": (15.0, 700.0), "trainer 2": (9.0, 50.0)}
    assert fleet._own_rates(before, after) == {"trainer 0": 25.0, "trainer 1": 100.0, "trainer 2": 0.0}


def test_hosts_are_bounded_after_the_first_steps_until_the_last_window(tmp_path):
    import fleet

    quota = tmp_path / "quota"
    plan = fleet.Plan(
        "",
        (),
        warmup=4,
        steps=2,
        windows=3,
        more_steps=6,
        bounds={str(quota): "1000"},
        no_bounds={str(quota): "-1"},
    )
    bounds, seen = fleet.Bounds(plan), []
    bounds.on_plan({})
    for step in range(2, plan.max_steps + 1, 2):
        bounds.on_metrics({"step": step})
        seen.append(quota.read_text())
    assert seen == ["1000"] * 4 + ["-1"] * 4


@pytest.mark.heavy
def test_slow_hosts_are_predicted_from_a_calibration(tmp_path):
    """The titles, names and columns that ``slow_pages`` looks for."""
    import pages

    calibration = bench.FOLDER.parent / "docs" / "results" / "prediction" / "calibration.json"
    words = [sys.executable, str(bench.FOLDER / "slow_predicted.py"), "--quick", "--json", "found.json"]
    done = subprocess.run(
        [*words, "--calibration", str(calibration)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    rows = pages.rows(found, "systems", trainers=2)
    assert {row["strategy"] for row in rows} >= {
        "synchronous",
        "hybrid, τ = 16",
        "substitution",
        "hierarchical",
    }
    assert all(row["samples/s"] > 0 for row in rows)
    assert pages.row(found, "proportion", strategy="hybrid, τ = 4", cores=0.1)["samples/s"] > 0
