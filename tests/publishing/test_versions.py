"""What followers have is what training had at that step, bit for bit."""

import pytest
from following import EVERY, SMALL, assert_is, follower, merge_all, publish, publish_here, rows_in, summary_of

from girih.checkpoint import Storage, find
from girih.publishing.log import Log
from girih.publishing.manifest import write_pin

STRATEGIES = {
    "local": ("local", ["store.shards=2"]),
    "synchronous": ("synchronous", ["strategy.trainers=2"]),
    "hybrid": ("hybrid", ["strategy.staleness=0", "strategy.embedding_servers=2"]),
    "substitution": ("substitution", ["strategy.trainers=2"]),
    "two tiers": ("local", ["store.tiers=['dram','ssd']", "store.hot_rows=20", "store.warm_up_steps=2"]),
}


heavy = pytest.mark.heavy


def versions_of(log):
    return Log(Storage.at(log)).versions()


MARKS = {"substitution": heavy, "synchronous": pytest.mark.slow, "hybrid": pytest.mark.slow}


@pytest.mark.parametrize("name", [pytest.param(each, marks=MARKS.get(each, [])) for each in STRATEGIES])
def test_every_version_has_the_rows_and_parameters_of_its_step(config, tmp_path, name):
    strategy, options = STRATEGIES[name]
    every = ["publish.every_steps=2", "publish.snapshot_every=3", "publish.keep=50"]
    log = tmp_path / "log"
    options = [*EVERY, SMALL, *every, *options]
    if strategy == "local":
        run = publish_here(config, tmp_path / "run", log, *options)
    else:
        run = publish(config, tmp_path / "run", log, *options, strategy=strategy)
    found = versions_of(log)
    told = summary_of(run)["published"]
    assert told["skipped"] == told["failed"] == 0
    assert told["snapshots"] >= 2
    steps = []
    for number in found:
        write_pin(Storage.at(log), number)
        with_all = follower(log, tmp_path / "followed")
        assert with_all.poll()
        version = with_all.current
        assert version.number == number
        assert_is(version, tmp_path / "followed", run / "checkpoints" / f"step-{version.step:08d}")
        steps.append(version.step)
        with_all.close()
    assert steps == [2, 4, 6, 8, 10, 12]


APART = {
    "asynchronous": ["strategy.trainers=2", "strategy.embedding_servers=2"],
    "hierarchical": ["strategy.groups=2", "strategy.trainers_per_group=1", "strategy.servers_per_group=0"],
    "hybrid": ["strategy.trainers=2", "strategy.staleness=4"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [pytest.param(each, marks=[] if each == "hybrid" else [heavy]) for each in APART]
)
def test_trainers_that_go_apart_meet_to_publish(config, tmp_path, strategy):
    options = ["train.max_steps=30", "data.batch_size=64", SMALL, "publish.every_s=0.1", *APART[strategy]]
    run = publish(config, tmp_path / "run", tmp_path / "log", *options, strategy=strategy)
    found = follower(tmp_path / "log", tmp_path / "followed")
    for number in versions_of(tmp_path / "log"):  # by way of all segments
        write_pin(Storage.at(tmp_path / "log"), number)
        found.poll()
        assert found.current.number == number
    assert number > 1
    assert_is(found.current, tmp_path / "followed", find(run).local)


@pytest.mark.parametrize(
    "store", [["store.tiers=['dram']"], ["tables=[{name='user',dtype='bfloat16'}]"]], ids=["lru", "halves"]
)
def test_a_follower_that_sees_every_segment_has_what_one_that_begins_at_the_end_has(
    config, tmp_path, patient, store
):
    _, log = patient
    if "tables" in store[0]:
        log = tmp_path / "log"
        publish_here(config, tmp_path / "run", log, "publish.every_steps=1", "train.max_steps=8", *store)
    late = follower(log, tmp_path / "late")
    late.poll()
    assert late.current.number == versions_of(log)[-1]
    again = follower(log, tmp_path / "again")
    numbers = []
    for number in versions_of(log):
        write_pin(Storage.at(log), number)
        again.poll()
        numbers.append(again.current.number)
    write_pin(Storage.at(log), None)
    assert numbers == versions_of(log)
    merge_all(again)
    assert rows_in(again.current, tmp_path / "again") == rows_in(late.current, tmp_path / "late")


def test_rows_leave_in_these_runs(patient, tmp_path):
    _, log = patient
    there = Log(Storage.at(log))
    left = [
        sum(part["left"] for part in there.read(number, whole=False).shards.values())
        for number in there.numbers(whole=False)
    ]
    assert sum(left) > 50


def test_a_segment_has_what_changed_and_a_snapshot_all_of_it(patient):
    _, log = patient
    there = Log(Storage.at(log))
    both = sorted({*there.numbers(whole=True)} & {*there.numbers(whole=False)})
    assert both
    for number in both:
        whole, delta = (there.read(number, whole=each) for each in (True, False))
        assert whole.step == delta.step
        rows, changed = (sum(sum(p["tables"].values()) for p in m.shards.values()) for m in (whole, delta))
        assert 0 < changed < rows


def test_stacks_stay_short(patient, tmp_path):
    _, log = patient
    found = follower(log, tmp_path / "f")
    for number in versions_of(log):
        write_pin(Storage.at(log), number)
        found.poll()
        merge_all(found)
        for files in found.current.rows:
            keys = [file.keys for file in files]
            assert all(older > 2 * sum(keys[:n]) for n, older in enumerate(keys) if n)
    write_pin(Storage.at(log), None)
    names = {path.name for path in (tmp_path / "f").glob("*.safetensors")}
    assert {file.name for file in found.current.files} <= names
    assert len(names) < 30
