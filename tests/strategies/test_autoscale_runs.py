"""Numbers of processes that follow how busy these are, in real runs: up, down, and back where it brought nothing; examples and rows as ever."""

import json
import re
import signal
import time

import pytest
from scenes import write

from runs import difference, latest, train

pytestmark = pytest.mark.heavy
WORKER = "embedding-worker"
SLOW_S = 0.06
BY_ITSELF = ["cluster.autoscale={embedding-worker=[1,2]}", "cluster.autoscale_every_s=4.0"]
LONG = ["train.epochs=1000000", "train.log_every_steps=5", "strategy.staleness=0", "strategy.trainers=2"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("autoscale"), num_examples=1601)


def until_scaled(running, times, within_s=90):
    """What was scaled, once it was so many times."""
    file, until_s = running.run / "scaled.jsonl", time.monotonic() + within_s
    while not file.exists() or len(lines := file.read_text().splitlines()) < times:
        assert running.process.poll() is None, running.process.communicate()
        assert time.monotonic() < until_s, running.abort()
        time.sleep(0.1)
    return [json.loads(line) for line in lines]


def until_logged(running, words, within_s=60):
    """Waits for a line in the log of the first trainer."""
    file, until_s = running.run / "logs" / "trainer-0.log", time.monotonic() + within_s
    while not any(words in json.loads(line)["message"] for line in file.read_text().splitlines()):
        assert running.process.poll() is None, running.process.communicate()
        assert time.monotonic() < until_s, running.abort()
        time.sleep(0.1)


def test_numbers_follow_how_busy_processes_are(begin, directory, slowing, tmp_path):
    """Bit for bit as a run in which nothing changed: workers are too slow, then idle, then slow however many there are."""
    running = begin("hybrid", *LONG, *BY_ITSELF)
    running.until_it_trains()
    slowing.roles({WORKER: SLOW_S})
    until_scaled(running, 1)
    until_logged(running, "autoscale keeps embedding-worker 1 → 2")
    slowing.roles({"trainer": 2 * SLOW_S})
    until_scaled(running, 2)
    until_logged(running, "autoscale keeps embedding-worker 2 → 1")
    slowing.roles({WORKER: 2 * SLOW_S}, lock=str(tmp_path / "lock"))
    told = until_scaled(running, 4)
    slowing.roles()
    assert [each["roles"] for each in told] == 2 * [{WORKER: [1, 2]}, {WORKER: [2, 1]}]
    for each, why in zip(told, (
        r"embedding-worker works \d+% of the time, and is the bottleneck",
        r"embedding-worker works \d+% of the time; 1 would work less than 50%",
        r"embedding-worker works \d+% of the time, and is the bottleneck",
        r"embedding-worker 1 → 2 brought nothing: \d+ → \d+ samples/s",
    ), strict=True):  # fmt: skip
        assert re.fullmatch(why, each["why"]), each["why"]
    running.process.send_signal(signal.SIGINT)
    error = running.ends(130)
    shown = error + running.told
    assert f"autoscale asks for embedding-worker 1 → 2: {told[0]['why']}" in shown
    assert f"scaled at step {told[0]['step']}: embedding-worker 1 → 2" in shown
    manifest = json.loads((latest(running.run) / "manifest.json").read_text())
    assert manifest["plan"]["roles"][WORKER] == 1
    steps = manifest["state"]["run"]["step"] + 20
    own = [*LONG, f"train.max_steps={steps}"]
    summary = train(directory, "hybrid", running.run, *own, resume=True)
    assert [(each["step"], each["why"]) for each in summary["scalings"]] == [
        (each["step"], each["why"]) for each in told
    ]
    assert (summary["steps"], summary["lost_updates"]) == (steps, 0)
    train(directory, "hybrid", tmp_path / "whole", *own)
    assert difference(running.run, tmp_path / "whole") == (0, 0)


def test_what_cannot_change_by_itself_is_told_in_a_line(directory, tmp_path):
    for strategy, bounds, why in (
        (
            "hybrid",
            "{trainer=[1,2]}",
            "trainers begin anew where their number changes, so it never does by itself",
        ),
        ("hybrid", "{loader=[1,3]}", "loaders = 3: expected at most one per trainer, 2 in all"),
        (
            "hybrid",
            "{embedding-worker=[3,2]}",
            "embedding-worker = [3, 2]: expected the fewest and then the most",
        ),
        ("synchronous", "{embedding-worker=[1,2]}", "strategy 'synchronous' has no embedding-worker"),
    ):
        told = train(
            directory,
            strategy,
            tmp_path / "run",
            f"cluster.autoscale={bounds}",
            "strategy.trainers=2",
            status=2,
        )
        assert why in told
        assert told.count("\n") == 1
