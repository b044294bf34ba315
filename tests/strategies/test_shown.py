"""What processes of a run under way show: metrics that the official parser reads, a status, logs, and records over all of them."""

import json
import os
import signal
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scenes import write

from girih import cli
from girih.report.status import status_of
from girih.telemetry.prometheus import METRICS

pytestmark = pytest.mark.slow

LONG = ["train.epochs=1000000", "train.log_every_steps=5", "metrics.port=0"]
ELSEWHERE = {"girih_dense_staleness_writes", "girih_tier_reads_total", "girih_ssd_bytes_total"}
"""Metrics of other strategies, and of stores with tiers."""
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("shown"), num_examples=1601)


def until(condition):
    end_s = time.monotonic() + 90
    while not (found := condition()):
        assert time.monotonic() < end_s
        time.sleep(0.1)
    return found


def scrape(run):
    """Samples of all processes: name, and labels beside the run → value; and the metrics that they are of."""
    samples, names = {}, set()
    for file in (run / "targets").glob("*.json"):
        (target,) = json.loads(file.read_text())
        text = urllib.request.urlopen(f"http://{target['targets'][0]}/metrics").read().decode()
        for family in text_string_to_metric_families(text):
            names.add(f"{family.name}_total" if family.type == "counter" else family.name)
            for sample in family.samples:
                assert target["labels"].items() <= sample.labels.items()
                rest = {
                    name: each for name, each in sample.labels.items() if name not in ("run", "incarnation")
                }
                samples[sample.name, *sorted(rest.values())] = sample.value
    return samples, names


@needs_proc
def test_a_run_under_way_shows_its_processes_until_they_are_gone(begin, capsys):
    running = begin("hybrid", *LONG, "strategy.embedding_servers=2")
    running.until_it_trains()
    run = running.run
    until(lambda: len(shown := status_of(run)["processes"]) == 5 and all(p["cpu_cores"] for p in shown))
    found = until(lambda: (status := status_of(run))["totals"]["samples_per_s"] and status)
    assert found["state"] == "running"
    assert {(p["role"], p["index"], p["state"]) for p in found["processes"]} == {
        ("trainer", 0, "running"), ("loader", 0, "running"), ("embedding-worker", 0, "running"),
        ("embedding-server", 0, "running"), ("embedding-server", 1, "running"),
    }  # fmt: skip
    assert all(0.0 <= process["busy"] <= 1.0 for process in found["processes"])
    assert found["cores"]["there"] == len(os.sched_getaffinity(0))
    assert found["cores"]["used"] == pytest.approx(found["totals"]["cpu_cores"])
    assert found["totals"]["restarts"] == 0

    samples, names = scrape(run)
    assert names == {metric.name for metric in METRICS} - ELSEWHERE
    later, _ = scrape(run)
    assert later.keys() >= samples.keys()
    assert all(later[key] >= value for key, value in samples.items() if key[0].endswith(("_total", "_count")))
    assert sum(value for key, value in later.items() if key[0] == "girih_rows") > 0
    steps = samples["girih_steps_total", "0", "trainer"]
    assert 0 < steps <= later["girih_request_seconds_count", "0", "embedding-worker", "pull"]
    assert samples["girih_examples_total", "0", "trainer"] <= steps * 32
    for title in ("trainer", "loader", "embedding-worker", "embedding-server"):
        assert (
            0
            < samples["girih_busy_seconds_total", "0", title]
            <= later["girih_busy_seconds_total", "0", title]
        )
    assert (
        samples["girih_staleness_batches_count", "0", "trainer"] <= later["girih_steps_total", "0", "trainer"]
    )

    record = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert record["rss_bytes"] > 1.5 * max(p["rss_bytes"] for p in found["processes"])

    worker = next(p for p in found["processes"] if p["role"] == "embedding-worker")
    os.kill(worker["pid"], signal.SIGSTOP)
    until(
        lambda: {p["role"]: p["state"] for p in status_of(run)["processes"]}["embedding-worker"] == "silent"
    )
    assert cli.run(["status", str(run)]) == 0
    assert f"embedding-worker 0 (process {worker['pid']}) is silent" in capsys.readouterr().out
    os.kill(worker["pid"], signal.SIGCONT)

    running.process.kill()  # the launcher, and then whoever would end it in good order
    for process in found["processes"]:
        os.kill(process["pid"], signal.SIGKILL)
    until(lambda: all(p["state"] == "gone" for p in status_of(run)["processes"]))
    assert status_of(run)["state"] == "killed"
    assert cli.run(["status", str(run)]) == 0
    assert "killed: all its processes are gone" in capsys.readouterr().out

    names = sorted(file.name for file in (run / "logs").iterdir())
    assert names == sorted(f"{p['role']}-{p['index']}.log" for p in found["processes"])
    for file in (run / "logs").iterdir():
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert "began as process" in lines[0]["message"]
        assert {f"{line['role']}-{line['index']}.log" for line in lines} == {file.name}


@pytest.mark.heavy
def test_a_run_that_ends_in_good_order_leaves_its_logs_alone(begin):
    running = begin("asynchronous", "train.max_steps=6", "strategy.trainers=2", "train.log_every_steps=2")
    running.ends(0)
    left = {path.name for path in running.run.iterdir()}
    assert not left & {"live", "targets", "processes.json"}
    assert len(list((running.run / "logs").iterdir())) == 5
    status = status_of(running.run)
    assert (status["state"], status["processes"]) == ("ended", [])
