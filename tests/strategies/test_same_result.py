"""The same config and seed twice, once while other processes keep all cores busy: what docs/strategies.md promises of each strategy."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
from scenes import write

from runs import difference, train

pytestmark = pytest.mark.slow

STEPS = 12
SHORT = [f"train.max_steps={STEPS}", "train.log_every_steps=1"]
TWO, SERVERS = ["strategy.trainers=2"], ["strategy.embedding_servers=2"]
AUTO = ["schedule.micro_batches=auto", "schedule.interleaving_groups=auto"]
ONE_GROUP = ["strategy.servers_per_group=2"]
heavy = pytest.mark.heavy
SAME = [
    pytest.param("substitution", TWO, id="substitution"),
    pytest.param("substitution", [*TWO, "strategy.dense=split"], marks=heavy, id="split"),
    pytest.param("substitution", [*TWO, "strategy.dense=replicated"], marks=heavy, id="replicated"),
    pytest.param("substitution", [*TWO, AUTO[0]], marks=heavy, id="substitution-auto"),
    pytest.param("local", [AUTO[0], "model.dropout=0.1"], marks=heavy, id="local"),
    pytest.param("synchronous", [*TWO, *AUTO], marks=heavy, id="synchronous"),
    pytest.param("hybrid", [*TWO, *SERVERS, "strategy.staleness=0"], marks=heavy, id="hybrid"),
    pytest.param("hierarchical", [*ONE_GROUP, "model.dropout=0.1"], id="hierarchical"),
]
BOUNDED = [
    pytest.param("hybrid", [*TWO, *SERVERS, "strategy.staleness=3"], 3, marks=heavy, id="hybrid"),
    pytest.param("asynchronous", [*TWO, *SERVERS, "strategy.staleness=3"], 3, marks=heavy, id="asynchronous"),
    pytest.param("hierarchical", ["strategy.groups=2", "strategy.nets=2"], None, marks=heavy, id="groups"),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("same"), num_examples=2 * STEPS * 32)


@contextlib.contextmanager
def busy_cores():
    """Twice as many processes that compute as there are cores."""
    count = 2 * len(os.sched_getaffinity(0))
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def losses(run):
    return [json.loads(line).get("loss") for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("strategy", "words"), SAME)
def test_a_busy_machine_gives_the_same_result(directory, tmp_path, strategy, words):
    idle, busy = tmp_path / "idle", tmp_path / "busy"
    one = train(directory, strategy, idle, *SHORT, *words)
    with busy_cores():
        other = train(directory, strategy, busy, *SHORT, *words)
    assert json.loads((idle / "plan.json").read_text()) == json.loads((busy / "plan.json").read_text())
    assert losses(idle) == losses(busy)
    assert (one["auc"], one["logloss"]) == (other["auc"], other["logloss"])
    assert difference(idle, busy) == (0, 0)


@pytest.mark.parametrize(("strategy", "words", "staleness"), BOUNDED)
def test_a_busy_machine_keeps_the_bounds(directory, tmp_path, strategy, words, staleness):
    idle, busy, words = (
        tmp_path / "idle",
        tmp_path / "busy",
        ["train.epochs=1", "train.log_every_steps=1", *words],
    )
    summaries = {idle: train(directory, strategy, idle, *words)}
    with busy_cores():
        summaries[busy] = train(directory, strategy, busy, *words)
    for run, summary in summaries.items():
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert max(record.get("examples", 0) for record in records) == 2 * STEPS * 32
        assert summary["lost_updates"] == 0
        assert staleness is None or summary["staleness_max"] <= staleness
