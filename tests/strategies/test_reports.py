"""Reports of runs of several trainers: a timeline that Perfetto can read, and bytes that can be counted again, also by the kernel."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import sent
from matrix import VARIANTS, Runs, Workload, cells
from scenes import write

from girih.app.run_config import RunConfig
from girih.data.batch import share_of
from girih.data.click_log import click_log
from runs import dense_of, latest
from support.twins import shard_of_key

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize(("variant", "workload"), cells("kernel-bytes"))
def test_counted_bytes_are_those_that_the_kernel_sent(large_runs, variant, workload):
    """The start and the end of a run are left out: a run of six steps is subtracted from one of twelve."""
    short, long = (large_runs.of(variant, each).summary for each in (workload, f"{workload}-long"))
    counted = sum(long["wire_bytes"].values()) - sum(short["wire_bytes"].values())
    measured = long["sent_bytes"] - short["sent_bytes"]
    assert counted <= measured <= counted + LARGE_STEPS * variant.uncounted_bytes
    assert measured <= 1.025 * counted


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


@pytest.mark.parametrize(
    ("name", "row_bytes"), [("synchronous", 4 * (DIM + 1)), ("synchronous-float16", 2 * (DIM + 1) + 4)]
)
def test_bytes_of_synchronous_are_those_of_keys_that_belong_to_another_trainer(
    runs, counted, name, row_bytes
):
    ids = embeddings = gradients = 0
    for train, shares in ((True, counted.train), (False, counted.evaluated)):
        for rank, share, _ in shares:
            remote_keys = sum(place_of(*key) != rank for key in Counted.keys(share))
            ids += (
                8 * TABLES + 8 * remote_keys + 8 * -(-remote_keys // 2)
            )  # lengths, keys, counts of four bytes
            embeddings += (row_bytes + (not train)) * remote_keys  # evaluations also learn absent keys
            gradients += row_bytes * remote_keys * train
    steps = -(-NUM_EXAMPLES // SIZE)
    assert summary_of(runs, name)["wire_bytes"] == {
        "ids": ids,
        "embeddings": embeddings,
        "gradients": gradients,
        "partials": 0,
        "activations": 0,
        "dense": dense_bytes(runs, steps),
    }


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


def test_loads_of_hybrid_are_those_of_its_servers(runs):
    summary = summary_of(runs, "hybrid-stale")
    asked = summary["loads"]["asked_keys"]
    assert len(asked) == SERVERS
    assert summary["imbalance"] == {"asked_keys": max(asked) * SERVERS / sum(asked)}
    assert summary["server_load"] == summary["imbalance"]["asked_keys"]


def test_bytes_of_hybrid_are_those_of_each_share_on_its_way(runs, counted):
    ids = embeddings = gradients = dense = 0
    for train, shares in ((True, counted.train), (False, counted.evaluated)):
        for _, share, after in shares:
            num_keys = len(Counted.keys(share))
            bags = 4 * FEATURES * (DIM + 1) * share.num_examples  # worker to trainer, and back
            ids += share.ids.nbytes + share.offsets.nbytes  # to the worker
            ids += SERVERS * TABLES * 8 + 12 * num_keys  # to servers: lengths, keys and counts
            embeddings += bags + (4 * (DIM + 1) + (not train)) * num_keys  # and which keys have no row
            gradients += (bags + 4 * (DIM + 1) * num_keys) * train
            if train:  # loader to trainer: also the share's weight, and where the data goes on
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
