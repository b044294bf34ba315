"""What a soak says of growth, and small runs of the benchmarks of faults and of metrics from end to end."""

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import suppress

import pyarrow.parquet as pq
import pytest

from girih.cli import bench
from girih.data.click_log import click_log

pytestmark = pytest.mark.usefixtures("folder")


PATIENCE_S = int(os.environ.get("GIRIH_PATIENCE_S", "280"))
CONFIG = """
[data]
train = "train.parquet"
valid = "valid.parquet"
test = "valid.parquet"
batch_size = 64
[[features]]
name = "user"
kind = "categorical"
dim = 4
[[features]]
name = "item"
kind = "categorical"
dim = 4
[labels]
names = ["click"]
[model]
name = "deepfm"
hidden = [8]
[sparse_optimizer]
name = "adagrad"
lr = 0.05
[train]
early_stopping = { metric = "auc", patience = 0 }
"""


def lives(leak_per_s=0.0, growth_by_step=0.0, every_s=120.0):
    """(seconds, age in steps, what is held, life) over an hour, by processes that are killed now and then; steps come ever faster."""
    dice, born_s = random.Random(0), 0

    def step_at(at_s):
        return int(4 * at_s * (1 + at_s / 3600))

    for at_s in range(0, 3600, 5):
        if dice.random() < 5 / every_s:
            born_s = at_s
        age = step_at(at_s) - step_at(born_s)
        level = 100.0 + growth_by_step * min(age, 1000) + leak_per_s * at_s
        yield float(at_s), age, level * dice.uniform(0.99, 1.01), born_s


def test_a_leak_grows_and_processes_that_are_killed_and_fill_up_again_do_not():
    from soak import MOST_GROWTH, growth

    assert abs(growth(lives(), 1800, 3600)) < MOST_GROWTH / 4
    assert abs(growth(lives(growth_by_step=0.05), 1800, 3600)) < MOST_GROWTH / 2
    assert growth(lives(leak_per_s=0.005), 1800, 3600) == pytest.approx(0.08, abs=0.01)
    assert growth(lives(leak_per_s=0.005, growth_by_step=0.05), 1800, 3600) > MOST_GROWTH


def test_one_more_descriptor_now_and_then_is_growth_in_a_process_that_is_never_killed():
    from soak import MOST_GROWTH, growth, verdict

    steps = [(float(s), 4 * s, 20 + s // 600, 1) for s in range(0, 3600, 5)]
    assert growth(steps, 1800, 3600) > MOST_GROWTH
    assert verdict([growth(steps, 1800, 3600), 0.0]) == "no"
    assert verdict([0.0, -0.5]) == "yes"
    assert growth(steps[:20], 0, 100) is None
    assert verdict([None, 0.0]) == "too short to say"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    made = tmp_path_factory.mktemp("soak")
    for name, size in (("train", 3200), ("valid", 1000)):
        table, _ = click_log(size, start=0, cardinality=300)
        pq.write_table(table, made / f"{name}.parquet", row_group_size=1000)
    (made / "config.toml").write_text(CONFIG)
    return made


def ran(name, *words, cwd):
    """A benchmark's tables; none of its runs outlives it."""
    command = [sys.executable, bench.FOLDER / f"{name}.py", *words, "--json", cwd / f"{name}.json"]
    told = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=cwd, start_new_session=True, **told) as process:
        try:
            printed = process.communicate(timeout=PATIENCE_S)[0]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, printed
    return json.loads((cwd / f"{name}.json").read_text())["tables"]


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_a_short_soak_survives_its_faults_and_leaves_nothing(place):
    words = f"--config {place}/config.toml --passes 8 --every-s 1 --faults 5 --stopped-s 1 --rates 1 --svg {place}/soak.svg"
    came_of, held, stalled = ran("soak", *words.split(), cwd=place)
    faults, usual = came_of["rows"]
    assert (faults["run"], usual["run"]) == ("faults", "undisturbed")
    assert faults["killed"] >= 2
    # one that is killed just before a trainer begins anew with all the others
    assert 2 <= faults["restarts"] <= faults["killed"]
    assert usual["restarts"] == usual["killed"] == usual["stopped"] == usual["lost updates"] == 0
    assert faults["left behind"] == usual["left behind"] == 0
    assert abs(faults["of undisturbed"]) < 0.05
    roles = {"embedding-server", "embedding-worker", "loader", "trainer", "launcher"}
    there = {
        run: {row["role"] for row in held["rows"] if row["run"] == run} for run in ("faults", "undisturbed")
    }
    assert there == {
        "faults": roles | {"shared memory"},
        "undisturbed": roles | {"shared memory", "all, PSS"},
    }
    assert {row["role"] for row in stalled["rows"]} <= roles
    by_minute = json.loads((place / "soak.minutes.json").read_text())
    assert len(by_minute["faults"]["faults"]) == faults["killed"] + faults["stopped"]
    assert [at for at, _ in by_minute["undisturbed"]["aucs"]] == list(range(1, 9))
    assert "<svg" in (place / "soak.svg").read_text()


@pytest.mark.heavy
@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.timeout(600)  # three nodes of Ray start, and one is lost
def test_a_run_goes_on_when_it_loses_a_host_if_another_has_room(place, monkeypatch):
    pytest.importorskip("ray", reason="needs pip install girih[cluster]")
    import lost_host
    import network

    if (reason := network.missing()) is not None:
        pytest.skip(reason)
    checks = {"INITIAL_DELAY_MS": 1000, "PERIOD_MS": 1000, "TIMEOUT_MS": 5000, "FAILURE_THRESHOLD": 3}
    for name, value in checks.items():  # by default Ray needs a minute
        monkeypatch.setenv(f"RAY_health_check_{name.lower()}", str(value))
    words = [str(place / "config.toml"), "--strategy", "synchronous"]
    for override in (
        "strategy.trainers=2",
        "train.epochs=100",
        "train.max_steps=2000",
        "train.log_every_steps=5",
    ):
        words += ["--set", override]
    row = lost_host.lose_one([*words, "--set", "checkpoint.every_steps=10"], place / "run", 30, 0.1, 1)
    assert (row["girih train"], row["restarts"], row["steps repeated"] >= 0) == ("goes on", 1, True), row


def test_a_role_is_killed_at_a_moment_of_its_seed(place):
    words = f"--config {place}/config.toml --epochs 4 --roles loader embedding-server --rounds 1 --seed 1"
    (table,) = ran("faults", *words.split(), cwd=place)
    nobody, *killed = table["rows"]
    assert (nobody["killed"], nobody["restarts"], nobody["lost updates"]) == ("nobody", 0, 0)
    assert [row["killed"] for row in killed] == ["loader", "embedding-server"]
    assert [row["restarts"] for row in killed] == [1, 1]
    assert all(abs(row["farthest of undisturbed"]) < 0.05 for row in killed)
    assert all(row["longest s"] == row["stalled s"] > 0 for row in killed)


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_metrics_are_asked_for_while_runs_are_timed(tmp_path):
    (table,) = ran("scraped", "--rounds", "1", "--examples", "20000", cwd=tmp_path)
    without, quiet, asked = table["rows"]
    assert without["of no port"] == 1
    assert all(row["samples/s"] > 0 for row in table["rows"])
    assert without["answers"] is quiet["answers"] is None
    assert asked["answers"] > 0 < asked["ms"]
