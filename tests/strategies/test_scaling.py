"""Roles that are added and removed while a run trains, by ``girih scale``, by autoscaling, and beside a trainer of a program's own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import suppress

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from running import environment, processes_of
from scenes import SIZE, write

import girih
from girih.cluster.launchers.local import LocalProcess
from girih.cluster.roles import RoleName
from girih.lifecycle import rescaling
from girih.lifecycle.planning import Calibrated
from girih.planner.calibration import LINKS, Calibration, Link, Rate, StepWork
from girih.processes.segments import SHARED_MEMORY
from girih.runs import scale_requests
from girih.runs.callbacks import Callback
from girih.strategies.strategy import price
from girih.training import log
from runs import difference, latest, train

pytestmark = pytest.mark.heavy
STEPS = 400
TABLE = """
[[tables]]
name = "{}"
eviction = {{ name = "lru", max_rows = 150 }}
"""
SHORT = [f"train.max_steps={STEPS}", "train.epochs=1000000", "train.log_every_steps=5", "checkpoint.keep=9"]
IN_STEP = [*SHORT, "strategy.staleness=0"]
ENDLESS = IN_STEP[1:]
OPTIONS = {
    "embedding-server": "embedding_servers",
    "embedding-worker": "embedding_workers",
    "loader": "loaders",
    "trainer": "trainers",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("scale"), num_examples=1601)


@pytest.fixture
def full_tables(directory):
    """Overrides for tables that are full, so that the shard of a key, and so their number, decides which row leaves."""
    rows = "eviction={name='lru',max_rows=150}"
    return [f"tables=[{{name='user',{rows}}},{{name='item',{rows}}}]"]


def start_scaling(running, *wanted):
    words = [sys.executable, "-m", "girih", "scale", str(running.run), *wanted]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(running.mark)
    )


def scale(running, *wanted, status=0):
    """What ``girih scale`` tells."""
    asking = start_scaling(running, *wanted)
    reported, error = asking.communicate(timeout=120)
    assert "Traceback" not in error
    assert asking.returncode == status, reported + error
    return reported if status == 0 else error


def step_of(reported):
    return int(re.match(r"scaled at step (\d+): ", reported)[1])


def counts_of(running):
    processes = json.loads((running.run / "processes.json").read_text())
    return {role: sum(each["role"] == role for each in processes) for role in {p["role"] for p in processes}}


def summary_of(running):
    return json.loads((running.run / "summary.json").read_text())


def options(**counts):
    return [f"strategy.{name}={count}" for name, count in counts.items()]


def until(running, step):
    """Waits until a step is recorded."""
    running.until_it_trains()
    while json.loads((running.run / "metrics.jsonl").read_text().splitlines()[-1])["step"] < step:
        assert running.process.poll() is None, running.process.communicate()


def went_on(directory, run, strategy, *lives):
    """A run that was stopped after a step, and went on with other overrides, once or more often; the independent reference."""
    for number, (step, overrides) in enumerate(lives):
        train(directory, strategy, run, *overrides, f"train.max_steps={step}", resume=number > 0)
    return run


def test_scaling_embedding_servers(begin, directory, full_tables, tmp_path):
    """More, then fewer; with tables that are full, so that the order of rows in each shard counts, too."""
    own = [*IN_STEP, *full_tables]
    two, three, one = (options(embedding_servers=count) for count in (2, 3, 1))
    running = begin("hybrid", *own, *two)
    running.until_it_trains()
    up = step_of(scale(running, "embedding-server=3", "embedding-worker=2"))
    assert counts_of(running) == {"trainer": 1, "embedding-server": 3, "embedding-worker": 2, "loader": 1}
    down = step_of(scale(running, "embedding-server=1"))
    assert counts_of(running) == {"trainer": 1, "embedding-server": 1, "embedding-worker": 2, "loader": 1}
    running.ends(0)
    summary = summary_of(running)
    assert (summary["steps"], summary["lost_updates"]) == (STEPS, 0)
    reported = [(each["step"], each["roles"]) for each in summary["scalings"]]
    assert reported == [
        (up, {"embedding-server": [2, 3], "embedding-worker": [1, 2]}),
        (down, {"embedding-server": [3, 1]}),
    ]
    lives = [(up, [*own, *two]), (down, [*own, *three]), (STEPS, [*own, *one])]
    assert difference(running.run, went_on(directory, tmp_path / "whole", "hybrid", *lives)) == (0, 0)


def test_scaling_embedding_workers_and_loaders(begin, directory, tmp_path):
    before = options(trainers=2, loaders=2)
    running = begin("hybrid", *IN_STEP, *before)
    running.until_it_trains()
    scale(running, "embedding-worker=3")
    assert counts_of(running) == {"trainer": 2, "embedding-server": 1, "embedding-worker": 3, "loader": 2}
    scale(running, "loader=1", "embedding-worker=2")
    assert counts_of(running) == {"trainer": 2, "embedding-server": 1, "embedding-worker": 2, "loader": 1}
    running.ends(0)
    train(directory, "hybrid", tmp_path / "whole", *IN_STEP, *before)
    assert difference(running.run, tmp_path / "whole") == (0, 0)


@pytest.fixture(scope="module")
def ever_new(directory):
    """Overrides for data in which each example has a user of its own, so that the number of rows tells what was trained on."""
    table = pq.read_table(directory / "train.parquet")
    table = pa.concat_tables([table] * (STEPS * SIZE // len(table) + 2)).combine_chunks()
    users = pa.array(range(len(table)), pa.int64())
    table = table.set_column(table.column_names.index("user"), "user", users)
    pq.write_table(table.slice(0, STEPS * SIZE), directory / "ever-new.parquet")
    return [f"data.train={directory}/ever-new.parquet", "train.epochs=1", "train.log_every_steps=5"]


def test_scaling_asynchronous_reads_each_example_once(begin, directory, ever_new, tmp_path):
    own = [*ever_new, "strategy.trainers=2", "strategy.staleness=3"]
    running = begin("asynchronous", *own)
    running.until_it_trains()
    scale(running, "embedding-server=2", "loader=2")
    scale(running, "embedding-worker=2")
    running.ends(0)
    summary, whole = summary_of(running), train(directory, "asynchronous", tmp_path / "whole", *own)
    assert [summary[name] for name in ("num_rows", "steps", "num_examples", "lost_updates")] == [
        whole[name] for name in ("num_rows", "steps", "num_examples", "lost_updates")
    ]
    assert summary["staleness_max"] <= 3


def test_scaling_roles_of_groups(begin):
    groups = [f"strategy.{name}=2" for name in ("groups", "nets", "average_every_steps")]
    running = begin("hierarchical", *SHORT, *groups)
    running.until_it_trains()
    reported = scale(running, "trainer=3", status=2)
    assert "strategy 'hierarchical' cannot change its number of trainer processes" in reported
    scale(running, "embedding-server=2", "embedding-worker=2", "loader=2")
    assert counts_of(running)["embedding-server"] == 2
    running.ends(0)
    summary = summary_of(running)
    assert (summary["steps"], summary["lost_updates"]) == (STEPS, 0)


@pytest.mark.parametrize(("strategy", "first", "wanted"), [
    ("synchronous", {"trainers": 2}, {"trainers": 3}),
    ("synchronous", {"trainers": 2}, {"trainers": 1}),
    ("hybrid", {"trainers": 1}, {"trainers": 2, "embedding_servers": 2}),
])  # fmt: skip
def test_scaling_trainers(begin, directory, tmp_path, strategy, first, wanted):
    own = IN_STEP if strategy == "hybrid" else SHORT
    role = {option: name for name, option in OPTIONS.items()}
    running = begin(strategy, *own, *options(**first))
    running.until_it_trains()
    step = step_of(scale(running, *(f"{role[name]}={count}" for name, count in wanted.items())))
    assert counts_of(running)["trainer"] == wanted["trainers"]
    running.ends(0)
    assert [each["step"] for each in summary_of(running)["scalings"]] == [step]
    lives = [(step, [*own, *options(**first)]), (STEPS, [*own, *options(**wanted)])]
    assert difference(running.run, went_on(directory, tmp_path / "whole", strategy, *lives)) == (0, 0)


def begun(running):
    """Waits until training has paused for the scaling."""
    file = running.run / "scale.json"
    while not file.exists() or json.loads(file.read_text())["begun"] is None:
        assert running.process.poll() is None, running.process.communicate()
        time.sleep(0.005)


@pytest.mark.parametrize("after_s", [0.0, 0.3, 2.0, 4.0])
@pytest.mark.parametrize(("role", "index"), [("trainer", 0), ("trainer", 1), ("embedding-server", 0)])
def test_a_process_is_killed_while_the_run_is_scaled(begin, directory, role, index, after_s):
    """The run goes on with the old numbers or the new ones, or ends with a line, and a checkpoint to go on from."""
    before = options(trainers=2, embedding_servers=2)
    running = begin("hybrid", *SHORT, *before)
    running.until_it_trains()
    processes = json.loads((running.run / "processes.json").read_text())
    asking = start_scaling(running, "embedding-server=3")
    begun(running)
    time.sleep(after_s)
    now = json.loads((running.run / "processes.json").read_text()) or processes
    killed = [each["pid"] for each in now if (each["role"], each["index"]) == (role, index)]
    for pid in killed:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    reported, error = asking.communicate(timeout=120)
    try:
        error = running.ends(0)
        assert summary_of(running)["steps"] == STEPS
        assert asking.returncode == 0 or "not scaled: a process was killed meanwhile" in error, (
            reported + error
        )
    except AssertionError:
        assert running.process.returncode == 1, error
        last = running.process.communicate()[1].strip().splitlines()[-1]
        assert re.match(r"girih: .*was killed by signal 9.*; go on from step-\d+ with", last)
    before = options(trainers=2, embedding_servers=1)
    last = train(
        directory, "hybrid", running.run, *SHORT, *before, f"train.max_steps={STEPS + 20}", resume=True
    )
    assert last["steps"] == STEPS + 20


@pytest.mark.parametrize("role", ["trainer", "embedding-worker"])
def test_restarts_count_across_scalings(begin, role):
    """A process that has come back as often as it may does not come back because all began anew meanwhile."""
    running = begin("hybrid", *ENDLESS, "checkpoint.every_steps=20", "cluster.max_restarts=1")
    until(running, 40)
    os.kill(pid_of(running, role, life=0), signal.SIGKILL)
    pid_of(running, role, life=1)
    scale(running, "trainer=2")
    os.kill(pid_of(running, role, life=0), signal.SIGKILL)
    reported = running.ends(1)
    assert reported.count("(restart 1 of at most 1)") == 1
    assert f"{role} 0 was killed by signal 9" in reported.splitlines()[-1]


def pid_of(running, role, life):
    """Waits for the first process of a role to be in one of its lives."""
    while True:
        assert running.process.poll() is None, running.process.communicate()
        with suppress(FileNotFoundError):
            for each in json.loads((running.run / "processes.json").read_text()):
                if (each["role"], each["index"], each["incarnation"]) == (role, 0, life):
                    return each["pid"]
        time.sleep(0.01)


def test_all_processes_are_killed_while_the_run_is_scaled(begin, directory):
    before = options(trainers=2, embedding_servers=2)
    running = begin("hybrid", *SHORT, *before)
    running.until_it_trains()
    asking = start_scaling(running, "embedding-server=3")
    begun(running)
    for process in processes_of(running.mark):
        if b"scale" not in (process / "cmdline").read_bytes().split(b"\0"):
            os.kill(int(process.name), signal.SIGKILL)
    running.process.communicate()
    _, error = asking.communicate(timeout=60)
    assert asking.returncode == 2
    assert "the run ended before it was scaled; its last checkpoint is whole" in error
    time.sleep(10.0)  # until processes have noticed that nobody keeps them
    last = train(directory, "hybrid", running.run, *SHORT, *before, resume=True)
    assert (last["steps"], last["scalings"]) == (STEPS, [])


def test_requests_that_are_refused(begin):
    running = begin("hybrid", *ENDLESS, *options(trainers=2))
    running.until_it_trains()
    for wanted, why in (
        ("embedding-sever=2", "unknown role 'embedding-sever'; did you mean 'embedding-server'?"),
        (
            "servers=2",
            "unknown role 'servers'; valid: embedding-server, embedding-worker, loader, trainer",
        ),
        ("embedding-server=0", "expected ROLE=COUNT with at least one process, as embedding-server=4"),
        (
            "group-server=2",
            "strategy 'hybrid' cannot change its number of group-server processes; expected one of",
        ),
        ("loader=3", "loaders = 3: expected at most one per trainer, 2 in all"),
        ("embedding-server=4096", "expected an integer from 1 to 1024"),
    ):
        reported = scale(running, wanted, status=2)
        assert why in reported
        assert reported.count("\n") == 1
    assert scale(running, "loader=1") == "nothing to do: loader is 1\n"
    first = start_scaling(running, "embedding-worker=2")
    while not (running.run / "scale.json").exists():
        time.sleep(0.001)
    assert "another scaling is under way" in scale(running, "embedding-worker=3", status=2)
    assert first.communicate(timeout=60)[0].startswith("scaled at step")
    running.process.send_signal(signal.SIGINT)
    running.ends(130)
    words = [sys.executable, "-m", "girih", "scale", str(running.run), "loader=2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "this run is not on; train it with --resume, with other counts by --set" in done.stderr


EPOCH = 24
"""Steps of an epoch: 3,000 examples, 128 at a time."""


class Scales(Callback):
    """Asks for a scaling at some steps, and keeps the plans that it hears of."""

    def __init__(self, run, wanted):
        self.run, self.wanted, self.plans = run, wanted, []

    def on_plan(self, plan):
        self.plans.append(plan)

    def on_metrics(self, record):
        if record["step"] in self.wanted:
            scale_requests.ask(self.run, self.wanted[record["step"]])


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Has a request be seen between the same two steps, however fast they are."""
    monkeypatch.setattr(rescaling, "LOOK_S", 0.0)


@pytest.fixture
def begin_trainer(log_directory):
    """A trainer whose run asks for scalings, by step; with the callback that does."""

    def begin_trainer(wanted, **overrides):
        run = log_directory / "run"
        scales = Scales(run, wanted)
        overrides = {"train.log_every_steps": 1, "store.shards": 1, **overrides}
        trainer = girih.Trainer.from_config(
            log_directory / "config.toml",
            overrides,
            strategy="hybrid",
            run=run,
            callbacks=[scales],
            progress=False,
        )
        return trainer, scales

    return begin_trainer


def counts_in(run):
    options = tomllib.loads((run / "config.toml").read_text())["strategy"]
    return options.get("embedding_servers"), options.get("embedding_workers")


def test_scaling_changes_the_counts_in_the_config(begin_trainer):
    trainer, scales = begin_trainer({3: {"embedding-worker": 2}}, **{"strategy.embedding_servers": 1})
    with trainer:
        trainer.fit()
        assert [each["roles"] for each in scale_requests.history(scales.run)] == [
            {"embedding-worker": [1, 2]}
        ]
        assert len(scales.plans) == 2
        assert counts_in(scales.run) == (1, 2)
        trainer.fit()
        assert counts_in(scales.run) == (1, 2)


def test_servers_killed_while_they_end_leave_no_shared_memory(begin_trainer, monkeypatch):
    """As the supervisor does with those that take too long; later there are fewer, whose names would not be wanted."""
    end = LocalProcess.end

    def end_by_force(self):
        (LocalProcess.kill if self.name == RoleName.EMBEDDING_SERVER else end)(self)

    monkeypatch.setattr(LocalProcess, "end", end_by_force)
    trainer, scales = begin_trainer({3: {"embedding-server": 3}, 9: {"embedding-server": 1}})
    with trainer:
        trainer.fit()
        assert trainer.state.step == EPOCH
        assert [each["roles"] for each in scale_requests.history(scales.run)] == [
            {"embedding-server": [1, 3]},
            {"embedding-server": [3, 1]},
        ]
        segment = trainer._cluster.segment
        left = [name for name in os.listdir(SHARED_MEMORY) if name.startswith(segment)]
        assert left
        assert all(name.startswith(f"{segment}-0-") for name in left)
    assert not [name for name in os.listdir(SHARED_MEMORY) if name.startswith(segment)]


@pytest.mark.parametrize("last", [EPOCH, 9])
def test_scaling_at_the_last_step_repeats_no_evaluation(begin_trainer, last):
    """The run has an evaluation left, that of the epoch's end, or nothing at all."""
    trainer, scales = begin_trainer({last: {"embedding-worker": 2}}, **{"train.max_steps": last})
    with trainer:
        trainer.fit()
        state = trainer.state
        assert (state.step, state.epoch) == (last, int(last == EPOCH))
        lines = map(json.loads, (scales.run / "metrics.jsonl").read_text().splitlines())
        assert [line["step"] for line in lines if "split" in line] == [last] * state.epoch
        assert [each["step"] for each in scale_requests.history(scales.run)] == [last] * state.epoch
        assert scale_requests.pending(scales.run) is None


def narrow():
    """A machine whose links are so slow that those of embedding servers and workers decide."""
    work = StepWork(
        lookup=Rate(0, 0, 0), updates={"adam": Rate(0, 0, 0)}, example_s=0, value_s=0, step_s=0, products=((64, 1e12),)
    )  # fmt: skip
    links = dict.fromkeys(LINKS, Link(latency_s=0.0, bytes_per_s=1e3))
    return Calibration(trainers=2, machine={"cores": 4}, links=links, work=work)


def test_a_speed_is_predicted_of_the_new_counts(begin_trainer):
    trainer, scales = begin_trainer({3: {"embedding-server": 2, "embedding-worker": 2}})
    with trainer:
        trainer._run.planning.calibrated = Calibrated(narrow(), "narrow.json")
        trainer.fit()
        before, after = (plan["predicted"]["speed"] for plan in scales.plans)
        assert after["from"] == before["from"] == "narrow.json"
        assert after["samples_per_s"] > 1.5 * before["samples_per_s"]
        expected = price(
            girih.Hybrid(embedding_servers=2, embedding_workers=2), trainer._run.planning._priced_by
        )
        assert after["samples_per_s"] == expected.samples_per_s
        assert json.loads((scales.run / "plan.json").read_text())["predicted"]["speed"] == after
        summary = trainer.summary(None, duration_s=0.0)
        assert summary["predicted_samples_per_s"] == summary["plan"]["speed"]["samples_per_s"]
        assert summary["predicted_samples_per_s"] == after["samples_per_s"]


def test_the_first_steps_after_scaling_predict_the_speed(begin_trainer, monkeypatch):
    monkeypatch.setattr(log, "LIMIT_S", 0.0)
    monkeypatch.setattr(log, "MOST_OF_RUN", 1.0)
    trainer, _ = begin_trainer({7: {"embedding-worker": 2}})
    with trainer:
        trainer.fit()
        summary = trainer.summary(None, duration_s=0.0)
        assert summary["predicted_from"] == "its first step since it was scaled at step 7"
        assert summary["predicted_samples_per_s"] > 0


WORKER = "embedding-worker"
SLOW_S = 0.06
BY_ITSELF = ["cluster.autoscale={embedding-worker=[1,2]}", "cluster.autoscale_every_s=4.0"]
AUTOSCALED = [
    "train.epochs=1000000",
    "train.log_every_steps=5",
    "strategy.staleness=0",
    "strategy.trainers=2",
]


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
    running = begin("hybrid", *AUTOSCALED, *BY_ITSELF)
    running.until_it_trains()
    slowing.roles({WORKER: SLOW_S})
    until_scaled(running, 1)
    until_logged(running, "autoscale keeps embedding-worker 1 → 2")
    slowing.roles({"trainer": 2 * SLOW_S})
    until_scaled(running, 2)
    until_logged(running, "autoscale keeps embedding-worker 2 → 1")
    slowing.roles({WORKER: 2 * SLOW_S}, lock=str(tmp_path / "lock"))
    scalings = until_scaled(running, 4)
    slowing.roles()
    assert [each["roles"] for each in scalings] == 2 * [{WORKER: [1, 2]}, {WORKER: [2, 1]}]
    for each, why in zip(scalings, (
        r"embedding-worker works \d+% of the time, and is the bottleneck",
        r"embedding-worker works \d+% of the time; 1 would work less than 50%",
        r"embedding-worker works \d+% of the time, and is the bottleneck",
        r"embedding-worker 1 → 2 brought nothing: \d+ → \d+ samples/s",
    ), strict=True):  # fmt: skip
        assert re.fullmatch(why, each["why"]), each["why"]
    running.process.send_signal(signal.SIGINT)
    error = running.ends(130)
    shown = error + running.output
    assert f"autoscale asks for embedding-worker 1 → 2: {scalings[0]['why']}" in shown
    assert f"scaled at step {scalings[0]['step']}: embedding-worker 1 → 2" in shown
    manifest = json.loads((latest(running.run) / "manifest.json").read_text())
    assert manifest["plan"]["roles"][WORKER] == 1
    steps = manifest["state"]["run"]["step"] + 20
    own = [*AUTOSCALED, f"train.max_steps={steps}"]
    summary = train(directory, "hybrid", running.run, *own, resume=True)
    assert [(each["step"], each["why"]) for each in summary["scalings"]] == [
        (each["step"], each["why"]) for each in scalings
    ]
    assert (summary["steps"], summary["lost_updates"]) == (steps, 0)
    train(directory, "hybrid", tmp_path / "whole", *own)
    assert difference(running.run, tmp_path / "whole") == (0, 0)


def test_autoscaling_that_a_strategy_does_not_support_is_refused(directory, tmp_path):
    for strategy, bounds, why in (
        (
            "hybrid",
            "{trainer=[1,2]}",
            "a change of the number of trainers restarts them, so it is never automatic",
        ),
        ("hybrid", "{loader=[1,3]}", "loaders = 3: expected at most one per trainer, 2 in all"),
        (
            "hybrid",
            "{embedding-worker=[3,2]}",
            "embedding-worker = [3, 2]: expected the fewest and then the most",
        ),
        ("synchronous", "{embedding-worker=[1,2]}", "strategy 'synchronous' has no embedding-worker"),
    ):
        scalings = train(
            directory,
            strategy,
            tmp_path / "run",
            f"cluster.autoscale={bounds}",
            "strategy.trainers=2",
            status=2,
        )
        assert why in scalings
        assert scalings.count("\n") == 1
