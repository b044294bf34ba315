"""What a process shows of itself: its numbers, its file, its metrics, its log; and what others make of them."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from girih.config.train import MetricsOptions
from girih.errors import ConfigError
from girih.processes.segments import start_of
from girih.telemetry import logs
from girih.telemetry.peer_status import PeerStatus
from girih.telemetry.stats import BOUNDS_S, STALENESS, Stats
from girih.telemetry.status_file import ProcessId, StatusTarget, StatusWriter, forget, read_all, state_of

SERVER = ProcessId("embedding-server", 1, 2)
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")


def some_stats():
    stats = Stats()
    stats.sent("ids", 96)
    stats.counters["lost_updates"] += 3
    stats.histograms[STALENESS].update([0, 2, 2, 4])
    stats.watch(lambda: {"queues": {"requests": 2}, "retries": 1, "store": {"hits": 5, "ssd_reads": 7}})
    stats.watch(lambda: {"queues": {"requests": 1, "samples": 8}, "rows": {"a table": 12}})
    for seconds in (0.00005, 0.0001, 0.02, 99.0):
        stats.spans.add("lookup", seconds, 0.0)
        stats.requests.add("pull", seconds)
    return stats


def until(condition):
    end_s = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < end_s
        time.sleep(0.02)
    return found


def test_a_reading_sums_what_sources_say_until_they_are_asked_no_more():
    stats = some_stats()
    reading = json.loads(json.dumps(stats.reading()))
    assert reading["live"]["queues"] == {"requests": 3, "samples": 8}
    assert reading["live"]["retries"] == 1
    assert reading["histograms"] == {STALENESS: {"0": 1, "2": 2, "4": 1}}
    found = reading["phases"]["lookup"]
    naive = [sum(low < s <= high for s in (0.00005, 0.0001, 0.02, 99.0)) for low, high in buckets()]
    assert found["counts"] == naive
    assert found["sum_s"] == pytest.approx(99.02015)
    stats.unwatch()
    assert stats.reading()["live"] == {}


def buckets():
    bounds = (float("-inf"), *BOUNDS_S, float("inf"))
    return pairwise(bounds)


def test_metrics_are_what_the_official_parser_reads(tmp_path):
    targets = tmp_path / "targets"
    place = StatusTarget(tmp_path / "a run", MetricsOptions(port=0, targets=str(targets)))
    with StatusWriter(SERVER, some_stats(), place):
        (file,) = targets.iterdir()
        assert file.name == "a run-embedding-server-1.json"  # of all runs in one directory
        (target,) = json.loads(file.read_text())
        own = {"role": "embedding-server", "index": "1", "incarnation": "2", "run": "a run"}
        assert target["labels"] == own
        text = urllib.request.urlopen(f"http://{target['targets'][0]}/metrics").read().decode()
    assert not file.exists()
    samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert own.items() <= sample.labels.items()
            rest = tuple(sorted(item for item in sample.labels.items() if item not in own.items()))
            samples[sample.name, rest] = sample.value
    assert samples["girih_lost_updates_total", ()] == 3
    assert samples["girih_sent_bytes_total", (("kind", "ids"),)] == 96
    assert samples["girih_queue_depth", (("queue", "requests"),)] == 3
    assert samples["girih_rows", (("table", "a table"),)] == 12
    assert samples["girih_tier_reads_total", (("tier", "ssd"),)] == 7
    assert samples["girih_lookup_seconds_count", ()] == 4
    assert samples["girih_lookup_seconds_bucket", (("le", "0.0001"),)] == 2
    assert samples["girih_lookup_seconds_bucket", (("le", "60.0"),)] == 3
    assert samples["girih_lookup_seconds_bucket", (("le", "+Inf"),)] == 4
    assert samples["girih_request_seconds_count", (("verb", "pull"),)] == 4
    assert samples["girih_staleness_batches_bucket", (("le", "2.0"),)] == 3
    assert samples["girih_staleness_batches_sum", ()] == 8


def test_each_process_takes_the_first_free_port(tmp_path):
    with StatusWriter(SERVER, Stats(), StatusTarget(None, MetricsOptions(port=0))) as first:
        port = int(first._endpoint.address.rpartition(":")[2])
        with StatusWriter(SERVER, Stats(), StatusTarget(None, MetricsOptions(port=port))) as second:
            assert int(second._endpoint.address.rpartition(":")[2]) > port


def test_what_cannot_be_served_is_the_users_mistake(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"metrics: targets: .* cannot be written"):
        StatusWriter(
            SERVER,
            Stats(),
            StatusTarget(None, MetricsOptions(port=0, targets=str(tmp_path / "file" / "below"))),
        )
    with pytest.raises(ConfigError, match=r"metrics: 192\.0\.2\.1:.*set metrics\.bind"):
        StatusWriter(SERVER, Stats(), StatusTarget(None, MetricsOptions(port=0, bind="192.0.2.1")))
    with pytest.raises(ConfigError, match=r"metrics: bind = '0\.0\.0\.0': expected one address of this host"):
        MetricsOptions(bind="0.0.0.0")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"not installed; pip install 'girih\[metrics\]'"):
        StatusWriter(SERVER, Stats(), StatusTarget(None, MetricsOptions(port=0)))


def test_a_process_has_a_file_while_it_runs(tmp_path):
    assert read_all(tmp_path) == []
    with StatusWriter(SERVER, some_stats(), StatusTarget(tmp_path)):
        (shown,) = until(lambda: read_all(tmp_path))
        assert (shown.title, shown.incarnation, shown.pid) == ("embedding-server 1", 2, os.getpid())
        assert shown.counter("lost_updates") == 3
        assert shown.now["rss_bytes"] > 1 << 20
        (tmp_path / "live" / "loader-0.json").write_text('{"role": ')  # cut off
        assert len(read_all(tmp_path)) == 1
    assert [file.name for file in (tmp_path / "live").iterdir()] == ["loader-0.json"]
    forget(tmp_path)
    assert list(tmp_path.iterdir()) == []


@needs_proc
def test_the_system_knows_whether_a_process_runs():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    start = start_of(process.pid)
    assert state_of(process.pid, start) == "running"
    assert state_of(process.pid, f"{int(start) - 1}") == "gone"  # another one that had its number
    process.send_signal(signal.SIGSTOP)
    until(lambda: state_of(process.pid, start) == "stopped")
    process.kill()
    until(lambda: state_of(process.pid, start) == "gone")
    process.wait()
    assert state_of(process.pid, start) == "gone"


def show(run, role, index, *, staleness=(), examples=(0, 0), rss_bytes=0, ago_s=0.0):
    def reading(at_s, done):
        stats = some_stats().reading() | {"live": {"examples": done}}
        stats["histograms"] = {STALENESS: {str(v): c for v, c in Counter(staleness).items()}}
        return {"at_s": at_s, "cpu_s": 0.0, "rss_bytes": rss_bytes, "stats": stats}

    now_s = time.time() - ago_s
    known = {"role": role, "index": index, "incarnation": 0, "pid": 1, "start": "", "host": "elsewhere"}
    now, then = reading(now_s, examples[1]), reading(now_s - 2.0, examples[0])
    (run / "live").mkdir(exist_ok=True)
    text = json.dumps({**known, "begun_s": 0.0, "endpoint": "", "now": now, "then": then})
    (run / "live" / f"{role}-{index}.json").write_text(text)


def test_records_count_the_memory_batches_and_pace_of_all_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "girih.telemetry.peer_status.EVERY_S", -1.0
    )  # files are read whenever they are asked for
    apart = []
    others = PeerStatus(tmp_path, ProcessId("trainer", 0), lambda: bool(apart))
    assert others.resident_bytes() == 0
    show(tmp_path, "trainer", 0, rss_bytes=1 << 40)  # its own
    show(tmp_path, "trainer", 1, staleness=[1, 1, 3], examples=(0, 200), rss_bytes=1000)
    show(tmp_path, "trainer", 2, rss_bytes=1 << 40, ago_s=60.0)  # gone, or stands still
    show(tmp_path, "loader", 0, rss_bytes=50)
    assert others.resident_bytes() == 1050
    assert others.staleness() == {1: 2, 3: 1}
    show(tmp_path, "trainer", 1, staleness=[1, 1, 3, 3], examples=(0, 200), rss_bytes=1000)
    assert others.staleness() == {3: 1}
    assert others.samples_per_s(500.0) == 500.0  # in step this trainer's is that of all
    apart.append(True)
    assert others.samples_per_s(500.0) == 250.0 + 100.0
    assert others.samples_per_s(None) is None


def test_a_log_is_one_line_a_record_and_bounded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(logs, "FILE_BYTES", 20_000)
    logger = logging.getLogger("girih.sparse")
    before = logging.getLogger("girih").handlers.copy()
    with logs.logging_as(SERVER, StatusTarget(tmp_path), on_stderr=True):
        logger.debug("unseen")
        try:
            raise ValueError("two\nlines")
        except ValueError:
            logger.exception("it went wrong in %s", "row 7")
        told = capsys.readouterr().err
        for _ in range(1000):
            logger.info("a record among many")
    capsys.readouterr()
    assert logging.getLogger("girih").handlers == before
    logger.info("nobody's")
    assert logs.is_line(told)
    (line,) = told.splitlines()
    record = json.loads(line)
    assert record | {"time": "", "trace": ""} == {
        "time": "", "level": "error", "role": "embedding-server", "index": 1, "incarnation": 2,
        "logger": "girih.sparse", "message": "it went wrong in row 7", "trace": "",
    }  # fmt: skip
    assert record["trace"].endswith("ValueError: two\nlines")
    files = sorted((tmp_path / "logs").iterdir())
    assert [file.name for file in files] == ["embedding-server-1.log", "embedding-server-1.log.1"]
    assert sum(file.stat().st_size for file in files) <= 40_000
    assert all(json.loads(line)["index"] == 1 for file in files for line in file.read_text().splitlines())
