"""Runs that train on a Kafka topic: each record has a row of its own, so that none is skipped unseen."""

import json
import os
import signal
import struct
import time
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from running import Running

from kafka_broker import PARTITIONS, TURN, Broker, in_turns, records
from runs import command, difference, latest, train, train_here

pytestmark = pytest.mark.slow

pytest.importorskip("confluent_kafka")
heavy = pytest.mark.heavy
USERS, ITEMS, SIZE = 50, 20, 256
ROUND = PARTITIONS * TURN  # all partitions had one turn
FIRST = 2 * ROUND + 100  # several trainers wait for whole turns
READ = 2 * ROUND - 4 * SIZE  # at least; batches that are prepared ahead wait for the next ones
CONFIG = """
[data]
format = "kafka"
train = "{train}"
batch_size = 256
[[features]]
name = "record"
kind = "categorical"
dim = 4
[[features]]
name = "user"
kind = "categorical"
dim = 4
[[features]]
name = "item"
kind = "categorical"
dim = 4
[[features]]
name = "price"
kind = "numeric"
[labels]
names = ["click"]
[model]
name = "deepfm"
hidden = [8]
[train]
progressive_validation = true
log_every_steps = 10
[checkpoint]
every_steps = 20
"""
TO_THE_END = 'data.stop_at="end"'
SERVERS = ["strategy.embedding_servers=2", "strategy.embedding_workers=2"]
SEVERAL = [
    ("hybrid", ["strategy.trainers=2", *SERVERS]),
    ("synchronous", ["strategy.trainers=2"]),
]


@pytest.fixture
def broker():
    broker = Broker(FIRST)
    yield broker
    broker.close()


@pytest.fixture
def directory(tmp_path, broker):
    (tmp_path / "config.toml").write_text(CONFIG.format(train=broker.address))
    return tmp_path


@pytest.fixture
def begin(directory, tmp_path):
    started = []

    def begin(strategy, *overrides, resume=False):
        started.append(Running(command(directory, strategy, tmp_path / "run", *overrides, resume=resume)))
        return started[-1]

    yield begin
    for each in started:
        each.process.kill()
        each.process.communicate()


def trained(run):
    """Examples that the steps so far trained on."""
    return marked(run)[0]


def marked(run):
    """Examples trained on so far, and how many of them came twice."""
    try:
        return struct.unpack("<qq", (run / "trained").read_bytes())
    except FileNotFoundError:
        return 0, 0


def until(running, done):
    """Waits for a condition of a run."""
    most = time.monotonic() + 90
    while not done(running.run):
        assert running.process.poll() is None, running.process.communicate()
        assert time.monotonic() < most, running.abort()
        time.sleep(0.02)


def all_read(num_records):
    return lambda run: trained(run) >= num_records


def saved(step, run):
    return (run / "checkpoints" / f"step-{step:08d}").exists()


def says(words, run):
    """Whether some process of a run has told this."""
    return any(words in file.read_text() for file in (run / "logs").iterdir())


def whole(summary, num_records):
    """Each record was trained on, by what the run is made of."""
    assert summary["num_examples"] == num_records
    assert summary["num_rows"] == num_records + USERS + ITEMS
    assert summary["progressive"]["click"]["num_examples"] == num_records


def test_a_topic_trains_the_same_as_a_file_in_the_same_order(directory, tmp_path, broker):
    summary = train_here(directory, "local", tmp_path / "run", TO_THE_END)
    whole(summary, FIRST)
    told = summary["progressive"]["click"]
    assert told["auc_last_hour"] == told["auc"] > 0.6
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line.get("split") == "progressive"]
    assert steps == [*range(10, FIRST // SIZE + 1, 10)]
    pq.write_table(pa.Table.from_pylist(in_turns(records(FIRST))), tmp_path / "rows.parquet")
    text = CONFIG.replace('"kafka"', '"parquet"').format(train="rows.parquet")
    (tmp_path / "config.toml").write_text(text)
    train_here(directory, "local", tmp_path / "file", "data.shuffle=false")
    assert difference(tmp_path / "run", tmp_path / "file") == (0, 0)


@heavy
@pytest.mark.parametrize(
    ("strategy", "counts"),
    [
        ("asynchronous", ["strategy.trainers=2", *SERVERS, "strategy.loaders=2"]),
        ("substitution", ["strategy.trainers=2"]),
        ("hierarchical", ["strategy.groups=2"]),
    ],
)
def test_other_strategies_read_each_record_once(directory, tmp_path, broker, strategy, counts):
    whole(train(directory, strategy, tmp_path / "run", *counts, TO_THE_END), FIRST)


@heavy
@pytest.mark.parametrize(("strategy", "counts"), SEVERAL)
def test_no_record_is_skipped_after_a_crash_and_those_read_twice_are_counted(
    directory, tmp_path, broker, begin, strategy, counts
):
    running = begin(strategy, *counts, "cluster.max_restarts=0")
    until(running, lambda run: trained(run) >= READ and saved(20, run))
    os.killpg(running.process.pid, signal.SIGKILL)  # it waits for records
    running.process.wait()
    running.leaves_nothing(within_s=30)
    assert latest(running.run).name == "step-00000020"
    read = trained(running.run)
    broker.add(3 * ROUND - FIRST)
    summary = train(directory, strategy, running.run, *counts, TO_THE_END, resume=True)
    whole(summary, 3 * ROUND)
    assert summary["repeated_examples"] == read - 20 * SIZE


@heavy
@pytest.mark.parametrize(("strategy", "counts"), SEVERAL[:1])
def test_a_killed_trainer_restarts_and_reads_on(directory, broker, begin, strategy, counts):
    running = begin(strategy, *counts)
    until(running, lambda run: trained(run) >= READ and saved(20, run))
    processes = json.loads((running.run / "processes.json").read_text())
    (second,) = (each["pid"] for each in processes if (each["role"], each["index"]) == ("trainer", 1))
    os.kill(second, signal.SIGKILL)
    until(running, lambda run: marked(run)[1] > 0)  # it went back to the checkpoint
    broker.add(3 * ROUND - FIRST)
    until(running, all_read(3 * ROUND - 4 * SIZE))
    running.process.send_signal(signal.SIGTERM)
    broker.add(ROUND)  # the signal takes effect with the next batch
    running.ends(130)
    state = json.loads((latest(running.run) / "manifest.json").read_text())["state"]["run"]
    assert 3 * ROUND - 4 * SIZE <= state["examples"] <= 4 * ROUND
    assert READ - 20 * SIZE <= state["repeated_examples"] <= 2 * ROUND - 20 * SIZE


@heavy
@pytest.mark.parametrize("role", ["loader", "embedding-worker"])
@pytest.mark.parametrize("strategy", ["hybrid", "asynchronous"])
def test_a_loader_or_worker_that_comes_back_skips_no_record_and_reads_none_twice(
    directory, broker, begin, strategy, role
):
    counts = SEVERAL[0][1]
    running = begin(strategy, *counts)
    until(running, all_read(READ))
    processes = json.loads((running.run / "processes.json").read_text())
    os.kill(next(each["pid"] for each in processes if each["role"] == role), signal.SIGKILL)
    broker.add(3 * ROUND - FIRST)
    until(running, all_read(3 * ROUND - 4 * SIZE))
    running.process.send_signal(signal.SIGTERM)
    broker.add(ROUND)
    assert "it came back" in running.ends(130)
    summary = train(directory, strategy, running.run, *counts, TO_THE_END, resume=True)
    whole(summary, 4 * ROUND)
    assert summary["repeated_examples"] == 0


@heavy
def test_a_crash_before_the_first_checkpoint_counts_repeated_examples(directory, broker, begin):
    running = begin("local", "checkpoint.every_steps=1000")
    until(running, all_read(READ))
    running.process.kill()
    running.process.wait()
    read = trained(running.run)
    again = begin("local", "checkpoint.every_steps=1000", TO_THE_END, resume=True)
    assert "nothing to resume" in again.ends(0)
    summary = json.loads((again.run / "summary.json").read_text())
    whole(summary, FIRST)
    assert summary["repeated_examples"] == read


@heavy
@pytest.mark.parametrize(("strategy", "counts"), [("local", []), ("hybrid", []), *SEVERAL])
def test_a_signal_ends_a_run_that_waits_for_records(directory, broker, begin, strategy, counts):
    running = begin(strategy, *counts)
    until(running, all_read(READ))
    running.process.send_signal(signal.SIGTERM)
    if strategy != "local":
        broker.add(3 * ROUND - FIRST)
    assert "go on with" in running.ends(130)
    summary = train(directory, strategy, running.run, *counts, TO_THE_END, resume=True)
    whole(summary, broker.num_records)
    assert summary["repeated_examples"] == 0


@heavy
@pytest.mark.parametrize(("strategy", "counts"), [("local", []), SEVERAL[0]])
def test_a_run_waits_if_its_brokers_die_and_resumes_with_others(directory, broker, begin, strategy, counts):
    running = begin(strategy, *counts)
    until(running, all_read(READ))
    broker.close()
    until(running, partial(says, "no broker answers"))
    running.process.send_signal(signal.SIGTERM)
    if strategy != "local":  # it waits for a batch; the second signal ends it at once
        time.sleep(1)
        running.process.send_signal(signal.SIGTERM)
    running.ends(130)
    read, other = trained(running.run), Broker(3 * ROUND)
    try:
        (directory / "config.toml").write_text(CONFIG.format(train=other.address))
        summary = train(directory, strategy, running.run, *counts, TO_THE_END, resume=True)
    finally:
        other.close()
    whole(summary, 3 * ROUND)
    assert summary["repeated_examples"] == (0 if strategy == "local" else read - 20 * SIZE)


@heavy
def test_a_broker_that_hangs_is_waited_for(broker, begin):
    options = '"socket.timeout.ms"=1000, "api.version.request.timeout.ms"=1000'
    running = begin("local", f"data.kafka={{{options}}}")
    until(running, all_read(READ))
    broker.hang()
    until(running, partial(says, "no broker answers"))
    broker.wake()
    broker.add(3 * ROUND - FIRST)
    until(running, all_read(3 * ROUND - 4 * SIZE))
    assert says("records come again", running.run)
    running.process.send_signal(signal.SIGTERM)
    running.ends(130)
