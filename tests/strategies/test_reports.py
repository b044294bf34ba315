"""Reports of runs: timelines, bytes that can be counted again, also by the kernel; metrics, status, logs and bottleneck of a run under way."""

import json
import os
import signal
import time
import urllib.request
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import sent
from matrix import VARIANTS, Runs, Workload, cells
from prometheus_client.parser import text_string_to_metric_families
from running import processes_of
from scenes import write

from girih import cli
from girih.app.run_config import RunConfig
from girih.data.batch import share_of
from girih.data.click_log import click_log
from girih.report.status import status_of
from girih.telemetry.peer_status import BOTTLENECK
from girih.telemetry.prometheus import METRICS
from runs import dense_of, difference, latest, train, train_here
from support.twins import shard_of_key

TRAINERS, SERVERS, SHARDS_EACH = 2, 2, 2
NUM_EXAMPLES, SIZE = 161, 16  # the last batch has one example, so one share is empty
FEATURES, TABLES, DIM = 3, 3, 4
LARGE_SIZE, LARGE_STEPS = 1024, 6
WORKLOADS = {"plain": Workload()}
LARGE_WORKLOADS = {
    name: Workload(overrides=(f"train.max_steps={steps}",), scene={"sent": True})
    for name, steps in (("kernel-bytes", LARGE_STEPS), ("kernel-bytes-long", 2 * LARGE_STEPS))
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = write(tmp_path_factory.mktemp("reports"), num_examples=NUM_EXAMPLES, size=SIZE, held_out=101)
    return Runs(directory, WORKLOADS)


@pytest.fixture(scope="module")
def large_runs(tmp_path_factory):
    """Runs with so many bytes a step that headers are few of them."""
    if (reason := sent.missing()) is not None:
        pytest.skip(reason)
    directory = write(tmp_path_factory.mktemp("bytes"), num_examples=1, size=LARGE_SIZE, held_out=101)
    table, _ = click_log(2 * LARGE_STEPS * LARGE_SIZE, cardinality=20_000)
    pq.write_table(table, directory / "train.parquet")
    config = (directory / "deepfm.toml").read_text().replace("dim = 4", "dim = 32").replace("[16, 8]", "[64]")
    (directory / "deepfm.toml").write_text(config)
    return Runs(directory, LARGE_WORKLOADS)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "workload"), cells("kernel-bytes"))
def test_counted_bytes_are_those_that_the_kernel_sent(large_runs, variant, workload):
    """The start and the end of a run are left out: a run of six steps is subtracted from one of twelve."""
    short, long = (large_runs.of(variant, each).summary for each in (workload, f"{workload}-long"))
    counted = sum(long["wire_bytes"].values()) - sum(short["wire_bytes"].values())
    measured = long["sent_bytes"] - short["sent_bytes"]
    assert counted <= measured <= counted + LARGE_STEPS * variant.uncounted_bytes
    assert measured <= 1.025 * counted


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "workload"), cells("plain", lambda variant: variant.phases))
def test_the_timeline_has_the_phases_of_every_process(runs, variant, workload):
    run = runs.of(variant, workload)
    trace = json.loads((run.path / "timeline.json").read_text())
    titles, tracks = {}, {}
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert event["name"] == "process_name"
            titles[event["pid"]] = event["args"]["name"]
            continue
        assert event["ph"] == "X"
        for name in ("ts", "dur"):
            assert isinstance(event[name], int)
            assert event[name] >= 0
        tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    phases = {
        title: {event["name"] for (pid, _), events in tracks.items() if pid == number for event in events}
        for number, title in titles.items()
    }
    assert phases.keys() == variant.phases.keys()
    for title, expected in variant.phases.items():
        assert expected <= phases[title], title
    for events in tracks.values():
        assert_nested(events)
    steps = [event for event in tracks[0, 0] if event["name"] == "forward"]
    assert len(steps) == run.summary["steps"]
    assert sum(event["dur"] for event in steps) == pytest.approx(
        1e6 * trace["totals_s"]["forward"], abs=2 * len(steps)
    )
    if (
        "embedding-server 0" in phases
    ):  # one clock for all: an update comes after its lookup, and within the run
        server = next(pid for pid, title in titles.items() if title == "embedding-server 0")
        begins = {
            name: min(event["ts"] for event in tracks[server, 0] if event["name"] == name)
            for name in ("lookup", "update")
        }
        trainers = [pid for pid, title in titles.items() if title.startswith("trainer")]
        computed = min(  # by whichever trainer was the first
            event["ts"] + event["dur"]
            for pid in trainers
            for event in tracks[pid, 0]
            if event["name"] == "forward"
        )
        assert begins["lookup"] < computed <= begins["update"]


def assert_nested(events):
    """Spans of one track either follow each other or lie in each other."""
    under_way = []
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        while under_way and under_way[-1] <= event["ts"]:
            under_way.pop()
        end = event["ts"] + event["dur"]
        assert not under_way or end <= under_way[-1], event
        under_way.append(end)


class Counted:
    """The batches that a run of ``deepfm`` reads: one group of tables, whose rows are an embedding and a first-order weight."""

    def __init__(self, directory):
        settings = RunConfig.load(directory / "deepfm.toml")
        self.train = self._shares(settings.dataset("train"))
        self.evaluated = self._shares(settings.dataset("test").in_order())

    @staticmethod
    def _shares(data):
        return [
            (rank, share_of(batch, rank, TRAINERS), after)
            for batch, after in data.batches(0)
            for rank in range(TRAINERS)
        ]

    @staticmethod
    def keys(batch):
        """(table, id) of every key of a share, once."""
        bounds = batch.offsets[:: max(1, batch.num_examples)] if batch.num_examples else [0] * (FEATURES + 1)
        return {(t, int(i)) for t in range(TABLES) for i in batch.ids[bounds[t] : bounds[t + 1]]}


@pytest.fixture(scope="module")
def counted(runs):
    return Counted(runs.directory)


def summary_of(runs, name):
    return runs.of(VARIANTS[name], "plain").summary


def place_of(table, key):
    return shard_of_key(key, table, TRAINERS * SHARDS_EACH) // SHARDS_EACH


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "row_bytes"), [("synchronous", 4 * (DIM + 1)), ("synchronous-float16", 2 * (DIM + 1) + 4)]
)
def test_bytes_of_synchronous_are_those_of_keys_that_belong_to_another_trainer(
    runs, counted, name, row_bytes
):
    ids = embeddings = gradients = 0
    for is_training, shares in ((True, counted.train), (False, counted.evaluated)):
        for rank, share, _ in shares:
            remote_keys = sum(place_of(*key) != rank for key in Counted.keys(share))
            ids += 8 * TABLES + 12 * remote_keys  # counts of keys, then each key with its own count
            embeddings += (row_bytes + (not is_training)) * remote_keys  # evaluations also learn absent keys
            gradients += row_bytes * remote_keys * is_training
    steps = -(-NUM_EXAMPLES // SIZE)
    assert summary_of(runs, name)["wire_bytes"] == {
        "ids": ids,
        "embeddings": embeddings,
        "gradients": gradients,
        "partials": 0,
        "activations": 0,
        "dense": dense_bytes(runs, steps),
    }


@pytest.mark.slow
def test_loads_of_synchronous_are_those_of_each_step(runs, counted):
    asked, rows, paced = [0] * TRAINERS, [0] * TRAINERS, 0
    for first in range(0, len(counted.train), TRAINERS):
        keys = [key for _, share, _ in counted.train[first : first + TRAINERS] for key in Counted.keys(share)]
        of_step = [[key for key in keys if place_of(*key) == rank] for rank in range(TRAINERS)]
        asked = [total + len(each) for total, each in zip(asked, of_step, strict=True)]
        rows = [total + len(set(each)) for total, each in zip(rows, of_step, strict=True)]
        paced += TRAINERS * max(len(each) for each in of_step)
    run = runs.of(VARIANTS["synchronous"], "plain")
    loads, imbalance = run.summary["loads"], run.summary["imbalance"]
    assert (loads["asked_keys"], loads["served_rows"]) == (asked, rows)
    assert len(loads["exchange_s"]) == TRAINERS
    assert min(loads["exchange_s"]) > 0
    assert imbalance["asked_keys"] == max(asked) * TRAINERS / sum(asked)
    assert imbalance["served_rows"] == max(rows) * TRAINERS / sum(rows)
    assert imbalance["asked_keys_per_step"] == paced / sum(asked) >= imbalance["asked_keys"]
    assert [record["imbalance"] for record in run.records] == [paced / sum(asked)]


@pytest.mark.slow
def test_loads_of_hybrid_are_those_of_its_servers(runs):
    summary = summary_of(runs, "hybrid-stale")
    asked = summary["loads"]["asked_keys"]
    assert len(asked) == SERVERS
    assert summary["imbalance"] == {"asked_keys": max(asked) * SERVERS / sum(asked)}
    assert summary["server_load"] == summary["imbalance"]["asked_keys"]


@pytest.mark.slow
def test_bytes_of_hybrid_are_those_of_each_share_on_its_way(runs, counted):
    ids = embeddings = gradients = dense = 0
    for is_training, shares in ((True, counted.train), (False, counted.evaluated)):
        for _, share, after in shares:
            num_keys = len(Counted.keys(share))
            bags = 4 * FEATURES * (DIM + 1) * share.num_examples  # worker to trainer, and back
            ids += share.ids.nbytes + share.offsets.nbytes  # to the worker
            ids += SERVERS * SHARDS_EACH * TABLES * 8 + 12 * num_keys  # to servers: lengths, keys and counts
            embeddings += bags + (4 * (DIM + 1) + (not is_training)) * num_keys  # and which keys have no row
            gradients += (bags + 4 * (DIM + 1) * num_keys) * is_training
            if is_training:  # loader to trainer: also the share's weight, and where the data goes on
                dense += share.numeric.nbytes + share.labels.nbytes + 8 + len(json.dumps(after.to_dict()))
    steps = -(-NUM_EXAMPLES // SIZE)
    assert summary_of(runs, "hybrid-stale")["wire_bytes"] == {
        "ids": ids,
        "embeddings": embeddings,
        "gradients": gradients,
        "partials": 0,
        "activations": 0,
        "dense": dense + dense_bytes(runs, steps),
    }


def dense_bytes(runs, steps):
    """Of AllReduce in a ring: 2 (n - 1) / n of the gradients a trainer."""
    model = {
        n: v
        for n, v in dense_of(latest(runs.of(VARIANTS["synchronous"], "plain").path)).items()
        if n.startswith("dense.model")
    }
    size = sum(4 * int(np.prod(value.shape)) for value in model.values())
    assert size > 0
    return steps * TRAINERS * (2 * (TRAINERS - 1) * size // TRAINERS)


LONG = ["train.epochs=1000000", "train.log_every_steps=5", "metrics.port=0"]
ENCRYPTED = ["cluster.encrypt=true", 'strategy.transport="tcp"']
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


@pytest.mark.slow
@needs_proc
def test_a_run_under_way_shows_its_processes_until_they_are_gone(begin, capsys, directory, tmp_path):
    """Its connections are encrypted. All its processes are killed, and the next run of the machine removes what they left."""
    running = begin("hybrid", *LONG, *ENCRYPTED, "strategy.embedding_servers=2", "checkpoint.every_steps=20")
    assert_tls(running.until_it_trains())
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

    assert any(name.startswith("/dev/shm/") for name in running.left())
    kill_all(running)
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

    unfinished = run / ".summary.json.unfinished"
    unfinished.touch()
    train_here(directory, "local", tmp_path / "other", "train.max_steps=1")
    assert not running.left()
    assert train_here(directory, "local", run, "train.max_steps=1", resume=True)["steps"] >= 1
    assert not unfinished.exists()
    assert not (run / "processes.json").exists()


def assert_tls(processes):
    endpoints = {each["role"]: each["endpoint"] for each in processes if each["role"] != "trainer"}
    assert len(endpoints) >= 2
    assert all(endpoint.startswith("tls://127.0.0.1:") for endpoint in endpoints.values()), endpoints


def kill_all(running):
    """Kills all processes of a run before one of them learns of another's end."""
    processes = [int(process.name) for process in processes_of(running.mark)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in processes:
            os.kill(pid, number)
    running.process.communicate()


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("hybrid", ["strategy.staleness=0"]),
        ("asynchronous", ["strategy.trainers=2"]),
        ("hybrid", ["strategy.trainers=2", "strategy.staleness=2"]),
        ("hierarchical", ["strategy.groups=2"]),
    ],
)
def test_encrypted_runs_equal_others(directory, begin, tmp_path, strategy, options):
    options = [*ENCRYPTED, "train.log_every_steps=1", *options]
    running = begin(strategy, *options)
    assert_tls(running.until_it_trains())
    running.ends(0)
    if "strategy.staleness=0" in options:
        train(directory, "local", tmp_path / "local")
        assert difference(tmp_path / "local", tmp_path / "run") == (0, 0)


@pytest.mark.slow
@pytest.mark.heavy
def test_a_completed_run_keeps_only_its_logs(begin):
    running = begin("asynchronous", "train.max_steps=6", "strategy.trainers=2", "train.log_every_steps=2")
    running.ends(0)
    left = {path.name for path in running.run.iterdir()}
    assert not left & {"live", "targets", "processes.json"}
    assert len(list((running.run / "logs").iterdir())) == 5
    status = status_of(running.run)
    assert (status["state"], status["processes"]) == ("ended", [])


ENDLESS = ["train.epochs=1000000", "train.log_every_steps=5", "metrics.port=0"]
SLOW_S = 0.06
WINDOW_S = 8.0
"""Shares are over the last five seconds, which files show up to a second late; and a slow batch may be under way."""


def seen(running):
    """A status after so long that it is of now."""
    time.sleep(WINDOW_S)
    assert running.process.poll() is None, running.process.communicate()
    return status_of(running.run)


def shares(status):
    return {f"{each['role']} {each['index']}": each["busy"] for each in status["processes"]}


def busy_seconds(run):
    """Process → its seconds of work by its metrics, and when it was asked."""
    status = {}
    for file in (run / "targets").glob("*.json"):
        (target,) = json.loads(file.read_text())
        text = urllib.request.urlopen(f"http://{target['targets'][0]}/metrics").read().decode()
        for family in text_string_to_metric_families(text):
            if family.name == "girih_busy_seconds":
                title = f"{target['labels']['role']} {target['labels']['index']}"
                status[title] = family.samples[0].value, time.monotonic()
    return status


@pytest.mark.heavy
def test_the_slow_role_is_the_bottleneck(begin, slowing):
    """A slow worker shows as such, and not as a busy loader, whose batches wait for it; a role that sleeps is slow too."""
    running = begin("hybrid", *ENDLESS, "strategy.staleness=0")
    running.until_it_trains()
    for role in ("loader", "embedding-worker", "embedding-server", "trainer"):
        slowing.roles({role: SLOW_S})
        status = seen(running)
        assert status["bottleneck"] is not None, (role, shares(status))
        assert (status["bottleneck"]["role"], status["bottleneck"]["index"]) == (role, 0), shares(status)
        assert status["bottleneck"]["busy"] == max(shares(status).values()) >= BOTTLENECK
        others = [each for each in status["processes"] if each["role"] != role]
        assert all(each["busy"] < BOTTLENECK for each in others), shares(status)

    slowing.roles({"embedding-server": SLOW_S}, spin=True)  # on cores that it shares with the others
    before = seen(running), busy_seconds(running.run)
    after = seen(running), busy_seconds(running.run)
    assert before[0]["bottleneck"]["role"] == after[0]["bottleneck"]["role"] == "embedding-server"
    rates = {
        title: (done - before[1][title][0]) / (at_s - before[1][title][1])
        for title, (done, at_s) in after[1].items()
    }
    assert max(rates, key=rates.get) == "embedding-server 0"
    assert rates == pytest.approx(shares(after[0]), abs=0.25)

    slowing.roles(dict.fromkeys(("loader", "embedding-worker", "embedding-server", "trainer"), SLOW_S / 2))
    status = seen(running)
    assert status["bottleneck"] is None, shares(status)
    assert status["totals"]["samples_per_s"] > 0


@pytest.mark.heavy
def test_a_slow_trainer_is_the_bottleneck(begin, slowing):
    """Those that wait in a collective do not work, whether it is of keys, rows, gradients or losses."""
    running = begin("synchronous", *ENDLESS, "strategy.trainers=2")
    running.until_it_trains()
    for rank in (1, 0):
        slowing.roles({"trainer": SLOW_S}, rank=str(rank))
        status = seen(running)
        assert status["bottleneck"] is not None, shares(status)
        assert (status["bottleneck"]["role"], status["bottleneck"]["index"]) == ("trainer", rank), shares(
            status
        )
        assert shares(status)[f"trainer {1 - rank}"] < BOTTLENECK


@pytest.mark.heavy
def test_a_slow_group_server_is_the_bottleneck(begin, slowing):
    running = begin(
        "hierarchical", *ENDLESS, "strategy.servers_per_group=1", "strategy.nets=2", "strategy.tagging=rules"
    )
    running.until_it_trains()
    slowing.roles({"group-server": SLOW_S})
    status = seen(running)
    assert status["bottleneck"] is not None, shares(status)
    assert status["bottleneck"]["role"] == "group-server", shares(status)
    assert shares(status)["trainer 0"] < BOTTLENECK
