"""Processes that are killed by SIGKILL while roles start: the run comes to its end all the same, or nothing is left of it."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
from running import BEGIN_S, processes_of
from scenes import play_all, write
from test_beginnings import process_of

from runs import difference

pytestmark = pytest.mark.slow

STEPS = 20
SHORT = [f"train.max_steps={STEPS}", "train.epochs=1000000", "train.log_every_steps=5"]
SERVED = ["strategy.trainers=2", "strategy.embedding_servers=2"]
GROUPED = ["strategy.groups=2", "strategy.servers_per_group=1"]
heavy = pytest.mark.heavy


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("startup"), num_examples=1601)


@pytest.fixture(scope="module")
def undisturbed(directory):
    """The runs without a death whose results are promised."""
    exact = {"hybrid": [*SERVED, "strategy.staleness=0"], "synchronous": ["strategy.trainers=2"]}
    exact["substitution"] = exact["synchronous"]
    scenes = [
        {"name": f"undisturbed-{name}", "strategy": name, "overrides": [*SHORT, *words]}
        for name, words in exact.items()
    ]
    play_all(directory, scenes, 2)
    return lambda name: directory / f"undisturbed-{name}" if name in exact else None


def has_imported(pid, name):
    """Whether a process has a library in its memory by now."""
    with open(f"/proc/{pid}/maps") as file:
        return name in file.read()


def kill_at(running, role, index, moment):
    """Kills a process as it is there, imports numpy, or so many seconds after it was there."""
    until = time.monotonic() + BEGIN_S
    while (pid := process_of(running, role, index)) is None:
        assert time.monotonic() < until, running.abort()
        time.sleep(0.005)
    if isinstance(moment, float):
        time.sleep(moment)
    while moment == "imports" and not has_imported(pid, "numpy"):
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)


KILLED = [
    ("hybrid", [*SERVED, "strategy.staleness=0"], "embedding-server", 1),
    ("hybrid", [*SERVED, "strategy.staleness=0"], "embedding-worker", 0),
    ("hybrid", [*SERVED, "strategy.staleness=0"], "loader", 0),
    ("hybrid", [*SERVED, "strategy.staleness=0"], "trainer", 1),
    ("asynchronous", SERVED, "embedding-server", 0),
    ("hierarchical", GROUPED, "group-server", 1),
    ("hierarchical", GROUPED, "dense-server", 0),
    ("hierarchical", GROUPED, "embedding-server", 0),
    ("hybrid", ["strategy.embedding_servers=2", "strategy.staleness=0"], "embedding-server", 0),
    ("synchronous", ["strategy.trainers=2"], "trainer", 1),
    ("substitution", ["strategy.trainers=2"], "trainer", 0),
]
QUICK = {(0, "imports"), (5, "imports")}
MOMENTS = ["there", "imports", 1.0, 2.5]


@pytest.mark.parametrize(
    ("strategy", "words", "role", "index", "moment"),
    [
        pytest.param(*case, moment, marks=[] if (number, moment) in QUICK else heavy)
        for number, case in enumerate(KILLED)
        for moment in MOMENTS
    ],
)
def test_a_process_that_is_killed_as_roles_start_comes_back(
    begin, undisturbed, strategy, words, role, index, moment
):
    running = begin(strategy, *words, *SHORT)
    kill_at(running, role, index, moment)
    told = running.ends(0)
    assert "Traceback" not in told
    assert f"{role} {index} was killed by signal 9" in told
    summary = json.loads((running.run / "summary.json").read_text())
    assert summary["restarts"] == {role: 1}
    assert summary["lost_updates"] == 0
    if (whole := undisturbed(strategy)) and "strategy.trainers=2" in words:
        assert difference(running.run, whole) == (0, 0)


@pytest.mark.parametrize(
    ("strategy", "words", "after_s"),
    [
        pytest.param(strategy, words, after_s, marks=[] if (strategy, after_s) == ("hybrid", 1.5) else heavy)
        for strategy, words in {"hybrid": SERVED, "synchronous": SERVED[:1], "hierarchical": GROUPED}.items()
        for after_s in (0.3, 0.7, 1.5, 3.0, 6.0)
    ],
)
def test_nothing_is_left_ten_seconds_after_the_launcher_is_killed(begin, strategy, words, after_s):
    """On a busy machine: twice as many processes compute as there are cores."""
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))
    ]
    try:
        running = begin(strategy, *words, *SHORT)
        time.sleep(after_s * (1 + random.Random(after_s).random() / 4))
        running.process.kill()
        running.process.wait()
        killed_s = time.monotonic()
        while processes_of(running.mark) and time.monotonic() < killed_s + 10:
            time.sleep(0.05)
        left = [(each / "cmdline").read_bytes() for each in processes_of(running.mark)]
        assert not left
        running.leaves_nothing()
    finally:
        for other in others:
            other.kill()
            other.wait()
