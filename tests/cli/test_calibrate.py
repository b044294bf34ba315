"""``girih calibrate`` as a user meets it, and what ``girih plan`` makes of its file."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from girih import cli
from girih.app.machine import measure_codec, ways
from girih.app.run_config import RunConfig
from girih.comm.codecs.tensors import BFloat16, TopK
from girih.comm.group import TrainerGroup
from girih.lifecycle import planning
from girih.optim import BY_NAME
from girih.planner.calibration import LINKS, Calibration, CodecSpeed, Link, Rate, StepWork
from girih.planner.facts import DenseCost
from girih.report.text import short
from girih.strategies.strategy import price

TWO = ("--set", "strategy.trainers=2")


def run(*words):
    return cli.run([str(word) for word in words])


@pytest.fixture
def calibrated(log_directory):
    """A calibration of equal links: 1 ms a message, 1 MB/s."""
    path = log_directory / "calibration.json"
    found = Calibration(trainers=3, machine={"cores": 2}, links=dict.fromkeys(LINKS, Link(1e-3, 1e6)))
    path.write_text(json.dumps(found.to_dict()))
    return path


@pytest.mark.parametrize("strategy", ["synchronous", "substitution", "hybrid", "asynchronous"])
def test_a_plan_says_what_its_bytes_take_and_where_that_is_from(calibrated, strategy, capsys):
    words = (calibrated.parent / "config.toml", "--strategy", strategy, *TWO)
    assert run("plan", *words) == 0
    without = json.loads(capsys.readouterr().out)
    assert run("plan", *words, "--calibration", calibrated) == 0
    printed = capsys.readouterr()
    predicted = json.loads(printed.out)["predicted"]
    total, by_kind = predicted["communication_ms_per_step"], predicted["communication_ms"]
    assert total == pytest.approx(sum(by_kind.values()))
    assert total > predicted["bytes_per_step"] / 1e3  # 1 MB/s, and messages
    assert predicted["communication_from"] == {"file": str(calibrated), "trainers": 3}
    assert f"takes {total:.3g} ms" in printed.err
    assert f"predicted from {calibrated}, measured by 3 trainers" in printed.err
    assert without["predicted"].items() <= predicted.items()  # bytes and decisions are the same
    assert not any("communication" in name for name in without["predicted"])
    if strategy == "substitution":
        assert predicted["synchronous_communication_ms_per_step"] > 0


def test_a_plan_for_other_machines_says_so(calibrated, capsys):
    words = (
        "plan",
        calibrated.parent / "config.toml",
        "--strategy",
        "synchronous",
        *TWO,
        "--calibration",
        calibrated,
    )
    predicted = []
    for more in ((), ("--machines", 2, "--gbit", 0.004), ("--gbit", 0.002)):  # 1, 0.5 and 0.25 MB/s
        assert run(*words, *more) == 0
        predicted.append(json.loads(capsys.readouterr().out)["predicted"])
    assert predicted[1]["communication_from"] == {"file": str(calibrated), "trainers": 3, "machines": 2}
    own, half, quarter = (each["communication_ms_per_step"] for each in predicted)
    assert (
        half > own + predicted[0]["bytes_per_step"] / 1e3
    )  # twice the time for each byte, and messages as they were
    assert quarter - half == pytest.approx(2 * (half - own))


@pytest.fixture
def worked(calibrated):
    """The same with the work of steps: 1 µs an id and 10 ms a step."""
    work = StepWork(
        lookup=Rate(1e-4, 1e-6, 1e-8),
        updates={"adam": Rate(1e-4, 1e-6, 1e-8)},
        example_s=1e-6,
        value_s=1e-7,
        step_s=1e-2,
        products=((64, 1e9), (256, 1e9), (1024, 1e9)),
    )
    found = replace(Calibration.read(calibrated), work=work)
    calibrated.write_text(json.dumps(found.to_dict()))
    return calibrated


def test_a_pass_that_is_known_prices_a_configuration_and_places_its_net(worked, monkeypatch):
    """A quarter of a second, and a half for each of a trainer's 64 examples: nothing that this machine could take."""
    cost = DenseCost(bytes_per_example=8, memory_bytes=1e9, pass_s=0.25, example_s=0.5, update_s=1e-3)
    calibration = Calibration.read(worked).spread(32)  # a core and more for each thread
    strategy = ("strategy.name = 'hierarchical'", "strategy.groups = 2")
    with_servers = (*strategy, "strategy.servers_per_group = 1")
    copies, groups = (
        RunConfig.load(worked.parent / "config.toml", overrides=each) for each in (strategy, with_servers)
    )
    sparse, dense = copies.halves()
    known = planning.measured_pass(copies.dataset("train"), sparse, dense, TrainerGroup(), 2)
    assert 0 < known.seconds(64) < 0.25
    assert known.update_s > 0
    monkeypatch.setattr(planning, "measured_pass", lambda *given: cost)
    speeds = [price(copies.strategy, copies.facts_by(calibration)(copies.strategy)) for _ in range(2)]
    assert speeds[0] == speeds[1]
    assert speeds[0].fold.path_s["forward and backward"] == pytest.approx(0.25 + 64 * 0.5)
    _, net = groups.planned_net(calibration)
    assert net.facts.dense_cost == cost


def test_a_plan_prices_all_strategies_and_shows_the_tagged_graph(worked, capsys):
    folder = worked.parent
    words = ["plan", folder / "config.toml", "--strategy", "hierarchical", "--calibration", worked]
    words += ["--set", "strategy.trainers_per_group=2", "strategy.servers_per_group=1"]
    assert run(*words, "--picture", folder / "net.svg", "--out", folder / "plan.json") == 0
    told = capsys.readouterr().err
    for name in ("local", "synchronous", "hybrid", "asynchronous", "substitution", "hierarchical"):
        assert f"│ {name}" in told
    assert "← this config" in told
    assert "choose " in told
    assert "deep.0.linear" in told  # an operator
    assert "server 0: CPU " in told
    assert "refinement moved" in told
    speed = json.loads((folder / "plan.json").read_text())["predicted"]["speed"]
    assert 0 < speed["samples_per_s"] < 2 * 128 / 1e-2  # two trainers, 10 ms a step of 128 examples
    assert speed["from"] == str(worked)
    assert "deep.0.linear" in (folder / "net.svg").read_text()
    assert run(*words[:2], "--picture", folder / "none.svg") == 2
    assert "all operators of 'local' run on trainers" in capsys.readouterr().err


HOSTS = """
[[hosts]]
count = 4
cores = 2
memory_gb = 8
gbit = 1
"""


def test_hosts_are_simulated_and_the_result_is_a_file(worked, capsys):
    folder = worked.parent
    hosts, out, timeline = (folder / name for name in ("hosts.toml", "found.json", "timeline.json"))
    hosts.write_text(HOSTS)
    words = ["simulate", folder / "config.toml", "--strategy", "hybrid", *TWO, "--hosts", hosts]
    words += ["--calibration", worked, "--steps", 8, "--runs", 3, "--seed", 5]
    assert run(*words, "--json", out, "--timeline", timeline) == 0
    printed = capsys.readouterr()
    found = json.loads(out.read_text())
    assert 0 < found["samples_per_s_p10"] <= found["samples_per_s"] <= found["samples_per_s_p90"]
    assert 0 <= found["staleness_p50"] <= found["staleness_p99"] <= 4
    assert found["extrapolated"] is True  # several machines
    assert f"bounded by {found['bottleneck']}" in printed.out
    assert "extrapolated: several machines" in printed.out
    events = json.loads(timeline.read_text())["traceEvents"]
    assert {each["ph"] for each in events} == {"M", "X"}
    names = {each["args"]["name"] for each in events if each["ph"] == "M"}
    assert {"trainer 0", "trainer 1", "embedding-server 0", "embedding-worker 0", "loader 0"} <= names
    assert all(each["dur"] >= 0 for each in events if each["ph"] == "X")
    hosts.write_text(HOSTS.replace("cores", "core"))
    assert run(*words) == 2
    assert "hosts.toml" in capsys.readouterr().err
    hosts.write_text(HOSTS + 'roles = ["trainer"]\n')
    assert run(*words) == 2
    assert "no host runs 'embedding-worker'" in capsys.readouterr().err


def test_a_run_tells_what_was_predicted_beside_what_was_measured(worked, capsys):
    words = ["train", worked.parent / "config.toml", "--set", "train.max_steps=5"]
    assert run(*words, "--run", worked.parent / "told", "--calibration", worked) == 0
    printed = " ".join(capsys.readouterr().out.split())
    summary = json.loads((worked.parent / "told" / "summary.json").read_text())
    assert 0 < summary["predicted_samples_per_s"] < 128 / 1e-2
    assert summary["predicted_from"] == str(worked)
    assert f"samples/s ({short(summary['predicted_samples_per_s'])} predicted from" in printed
    plan = json.loads((worked.parent / "told" / "plan.json").read_text())
    assert plan["predicted"]["speed"]["samples_per_s"] == summary["predicted_samples_per_s"]
    assert run(*words, "--run", worked.parent / "silent") == 0
    summary = json.loads((worked.parent / "silent" / "summary.json").read_text())
    assert summary["predicted_from"] == "nothing: 2 s of training are needed after the first 2 steps"
    assert summary["predicted_samples_per_s"] is None
    assert "predicted" not in capsys.readouterr().out


def test_a_strategy_without_communication_is_given_no_time(calibrated, capsys):
    assert run("plan", calibrated.parent / "config.toml", "--calibration", calibrated) == 0
    assert "no communication time is predicted for local" in capsys.readouterr().err


def test_codecs_are_read_as_they_were_written(calibrated):
    found = Calibration(
        trainers=3,
        machine={},
        links=Calibration.read(calibrated).links,
        codecs={"int8": CodecSpeed(1e-10, 2e-10)},
    )
    calibrated.write_text(json.dumps(found.to_dict()))
    assert Calibration.read(calibrated).codecs == found.codecs


@pytest.mark.parametrize("codec", [BFloat16(), TopK()], ids=str)
def test_a_codec_costs_time_per_byte(codec):
    speed = measure_codec(codec, rounds=3)
    assert 1e-12 < speed.pack_s_per_byte < 1e-6
    assert 1e-12 < speed.unpack_s_per_byte < 1e-6


def test_mistakes_are_one_line(log_directory, calibrated, capsys):
    config = log_directory / "config.toml"
    (log_directory / "bad.json").write_text('{"version": 7}')
    for words, told in (
        (("calibrate", "--trainers", 1), "1 is not in the range 2<=x<=64"),
        (("calibrate", "--transport", "tcp"), "No such option"),
        (("calibrate", "more"), "unexpected extra argument"),
        (("calibrate", "--out", log_directory), "expected a file in a directory that exists"),
        (("calibrate", "--out", log_directory / "none" / "c.json"), "expected a file in a directory"),
        (("plan", config, "--calibration", log_directory / "none.json"), "girih calibrate writes one"),
        (("plan", config, "--calibration", log_directory / "bad.json"), "version = 7: expected 3"),
        (("plan", config, "--machines", 4), "--machines 4: expected --calibration FILE too"),
        (("plan", config, "--gbit", 2.5), "--gbit 2.5: expected --calibration FILE too"),
        (("plan", config, "--calibration", calibrated, "--machines", 0), "0 is not in the range x>=1"),
    ):
        assert run(*words) == 2
        error = capsys.readouterr().err
        assert told in error
        assert len(error.splitlines()) == 1


def children_of(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]


def is_alive(pid):
    return subprocess.run(["ps", "-p", str(pid)], capture_output=True).returncode == 0


def test_a_signal_ends_all_and_leaves_no_file(tmp_path):
    out = tmp_path / "calibration.json"
    process = subprocess.Popen([sys.executable, "-m", "girih", "calibrate", "--out", str(out)])
    until = time.monotonic() + 60
    while len(children := children_of(process.pid)) < 2:
        assert time.monotonic() < until
        time.sleep(0.05)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert not any(map(is_alive, children))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.heavy
def test_calibrate_writes_what_plan_reads(log_directory, capsys):
    out = log_directory / "measured.json"
    done = subprocess.run(
        [sys.executable, "-m", "girih", "calibrate", "--out", str(out)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = Calibration.read(out)
    assert found.trainers == 2
    assert set(found.codecs) == {"float32", "bfloat16", "int8", "topk"}
    assert found.codecs["bfloat16"].pack_s_per_byte > found.codecs["float32"].pack_s_per_byte
    assert "8.00 MiB" in done.stdout
    assert "topk" in done.stdout
    assert set(found.work.updates) == set(BY_NAME)
    assert 0 < found.work.lookup.id_s < 1e-5
    assert 1e-5 < found.work.step_s < 0.1
    assert 1e8 < found.work.flops_per_s < 1e13
    assert set(found.overheads) == set(ways(2))
    assert all(overhead.work.call_s > 0 for way, overhead in found.overheads.items() if way != "local")
    assert "hierarchical, group servers" in done.stdout
    assert all(link.byte_cpu_s > 0 for link in found.links.values())
    assert "rowwise_adagrad" in done.stdout
    assert f"next: girih plan CONFIG.toml --calibration {out}" in done.stdout
    words = (log_directory / "config.toml", "--strategy", "synchronous", *TWO)
    assert run("plan", *words, "--calibration", out) == 0
    assert "measured by 2 trainers" in capsys.readouterr().err
    run_folder = log_directory / "run"
    words = ("--run", run_folder, "--calibration", out, "--set", "train.max_steps=5")
    assert run("train", log_directory / "config.toml", *words) == 0
    told = json.loads((run_folder / "summary.json").read_text())
    assert told["predicted_samples_per_s"] > 0
    assert told["predicted_from"] == str(out)
    assert told["plan"]["speed"]["samples_per_s"] == told["predicted_samples_per_s"]
    assert f"predicted from {out})" in " ".join(capsys.readouterr().out.split())
