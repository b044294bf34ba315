"""What runs of two trainers tell: a timeline that Perfetto takes as it is meant, and bytes that can be counted again."""

import json

import numpy as np
import pytest
from scenes import play_all, write

from girih.config.file import RunConfig
from girih.data.shares import share_of
from girih.testing.twins import shard_of_key
from runs import dense_of, latest

pytestmark = pytest.mark.slow

TRAINERS, SERVERS, SHARDS_EACH = 2, 2, 2
NUM_EXAMPLES, SIZE = 161, 16  # the last batch has one example, so one share is empty
FEATURES, TABLES, DIM = 3, 3, 4
SCENES = [
    {"name": "synchronous", "strategy": "synchronous"},
    {
        "name": "halves",
        "strategy": "synchronous",
        "options": ['wire_embeddings="float16"', 'wire_gradients="float16"'],
    },
    {
        "name": "hybrid",
        "strategy": "hybrid",
        "options": ["staleness=2", f"embedding_servers={SERVERS}", "embedding_workers=2"],
    },
    {"name": "asynchronous", "strategy": "asynchronous", "options": ["staleness=2"]},
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write(tmp_path_factory.mktemp("told"), num_examples=NUM_EXAMPLES, size=SIZE, held_out=101)


@pytest.fixture(scope="module")
def told(directory):
    return play_all(directory, SCENES, TRAINERS)


OF_A_TRAINER = {"read", "forward", "backward", "apply", "push", "wait for rows"}
EXCHANGES = {"exchange ids", "exchange embeddings", "exchange gradients", "exchange vote"}
EXPECTED = {
    "synchronous": {
        "trainer 0": OF_A_TRAINER | {"pull", "allreduce"} | EXCHANGES,
        "trainer 1": OF_A_TRAINER | {"pull", "allreduce"} | EXCHANGES,
    },
    "hybrid": {
        "trainer 0": OF_A_TRAINER | {"allreduce"},
        "trainer 1": OF_A_TRAINER | {"allreduce"},
        "loader 0": {"dispatch"},
        "embedding-worker 0": {"unpack", "dedup", "pool", "scatter"},
        "embedding-worker 1": {"unpack", "dedup", "pool", "scatter"},
        "embedding-server 0": {"lookup", "update"},
        "embedding-server 1": {"lookup", "update"},
    },
    "asynchronous": {
        "trainer 0": OF_A_TRAINER,
        "trainer 1": OF_A_TRAINER,
        "loader 0": {"dispatch"},
        "embedding-worker 0": {"unpack", "dedup", "pool", "scatter"},
        "embedding-server 0": {"lookup", "update"},
    },
}


@pytest.mark.parametrize("strategy", EXPECTED)
def test_the_timeline_has_the_phases_of_every_process(directory, told, strategy):
    trace = json.loads((directory / strategy / "timeline.json").read_text())
    names, tracks = {}, {}
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int)
        if event["ph"] == "M":
            assert event["name"] == "process_name"
            names[event["pid"]] = event["args"]["name"]
            continue
        assert event["ph"] == "X"
        assert isinstance(event["ts"], int)
        assert isinstance(event["dur"], int)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        tracks.setdefault((event["pid"], event["tid"]), []).append(event)
    found = {
        title: {e["name"] for (pid, _), events in tracks.items() if pid == number for e in events}
        for number, title in names.items()
    }
    assert found.keys() == EXPECTED[strategy].keys()
    for title, phases in EXPECTED[strategy].items():
        assert phases <= found[title], title
    for events in tracks.values():
        assert_nested(events)
    steps = [e for e in tracks[0, 0] if e["name"] == "forward"]
    assert len(steps) == told[strategy]["steps"]
    assert sum(e["dur"] for e in steps) == pytest.approx(
        1e6 * trace["totals_s"]["forward"], abs=2 * len(steps)
    )
    if strategy != "synchronous":  # one clock for all: an update comes after its lookup, and within the run
        server = next(pid for pid, name in names.items() if name == "embedding-server 0")
        begins = {
            name: min(e["ts"] for e in tracks[server, 0] if e["name"] == name)
            for name in ("lookup", "update")
        }
        trainers = [pid for pid, name in names.items() if name.startswith("trainer")]
        computed = min(  # by whichever trainer was the first
            e["ts"] + e["dur"] for pid in trainers for e in tracks[pid, 0] if e["name"] == "forward"
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
def counted(directory):
    return Counted(directory)


def place_of(table, key):
    return shard_of_key(key, table, TRAINERS * SHARDS_EACH) // SHARDS_EACH


@pytest.mark.parametrize(
    ("name", "row_bytes"), [("synchronous", 4 * (DIM + 1)), ("halves", 2 * (DIM + 1) + 4)]
)
def test_bytes_of_synchronous_are_those_of_keys_that_belong_to_another_trainer(
    directory, told, counted, name, row_bytes
):
    ids = embeddings = gradients = 0
    for train, shares in ((True, counted.train), (False, counted.evaluated)):
        for rank, share, _ in shares:
            elsewhere = sum(place_of(*key) != rank for key in Counted.keys(share))
            ids += 8 * TABLES + 8 * elsewhere + 8 * -(-elsewhere // 2)  # lengths, keys, counts of four bytes
            embeddings += (
                row_bytes + (not train)
            ) * elsewhere  # evaluations also learn which keys have no row
            gradients += row_bytes * elsewhere * train
    steps = -(-NUM_EXAMPLES // SIZE)
    assert told[name]["wire_bytes"] == {
        "ids": ids,
        "embeddings": embeddings,
        "gradients": gradients,
        "partials": 0,
        "activations": 0,
        "dense": dense_bytes(directory, steps),
    }


def test_loads_of_synchronous_are_those_of_each_step(directory, told, counted):
    asked, rows, paced = [0] * TRAINERS, [0] * TRAINERS, 0
    for first in range(0, len(counted.train), TRAINERS):
        keys = [key for _, share, _ in counted.train[first : first + TRAINERS] for key in Counted.keys(share)]
        of_step = [[key for key in keys if place_of(*key) == rank] for rank in range(TRAINERS)]
        asked = [total + len(each) for total, each in zip(asked, of_step, strict=True)]
        rows = [total + len(set(each)) for total, each in zip(rows, of_step, strict=True)]
        paced += TRAINERS * max(len(each) for each in of_step)
    loads, imbalance = told["synchronous"]["loads"], told["synchronous"]["imbalance"]
    assert (loads["asked_keys"], loads["served_rows"]) == (asked, rows)
    assert len(loads["exchange_s"]) == TRAINERS
    assert min(loads["exchange_s"]) > 0
    assert imbalance["asked_keys"] == max(asked) * TRAINERS / sum(asked)
    assert imbalance["served_rows"] == max(rows) * TRAINERS / sum(rows)
    assert imbalance["asked_keys_per_step"] == paced / sum(asked) >= imbalance["asked_keys"]
    lines = map(json.loads, (directory / "synchronous" / "metrics.jsonl").read_text().splitlines())
    assert [line["imbalance"] for line in lines] == [paced / sum(asked)]


def test_loads_of_hybrid_are_those_of_its_servers(told):
    asked = told["hybrid"]["loads"]["asked_keys"]
    assert len(asked) == SERVERS
    assert told["hybrid"]["imbalance"] == {"asked_keys": max(asked) * SERVERS / sum(asked)}
    assert told["hybrid"]["server_load"] == told["hybrid"]["imbalance"]["asked_keys"]


def test_bytes_of_hybrid_are_those_of_each_share_on_its_way(directory, told, counted):
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
    assert told["hybrid"]["wire_bytes"] == {
        "ids": ids,
        "embeddings": embeddings,
        "gradients": gradients,
        "partials": 0,
        "activations": 0,
        "dense": dense + dense_bytes(directory, steps),
    }


def dense_bytes(directory, steps):
    """Of AllReduce in a ring: 2 (n - 1) / n of the gradients a trainer."""
    model = {
        n: v for n, v in dense_of(latest(directory / "synchronous")).items() if n.startswith("dense.model")
    }
    size = sum(4 * int(np.prod(value.shape)) for value in model.values())
    assert size > 0
    return steps * TRAINERS * (2 * (TRAINERS - 1) * size // TRAINERS)
