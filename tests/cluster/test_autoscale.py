"""The number of processes that loads ask for, by role."""

import json
import time

import pytest

from girih.cluster.elastic.autoscale import LOOKS, Autoscaler, decided, loads_of
from girih.cluster.options import Bounded, ClusterOptions
from girih.config import build
from girih.errors import ConfigError

COUNTS = {"trainer": 1, "embedding-server": 1, "embedding-worker": 2, "loader": 1}
RANGES = {"embedding-server": Bounded(ceiling=2), "embedding-worker": Bounded(ceiling=3)}


def change(**loads):
    named = {name.replace("_", "-"): load for name, load in loads.items()}
    found = decided(named, COUNTS, RANGES)
    return None if found is None else found[:2]


def test_a_bottleneck_that_works_all_the_time_gets_one_more():
    assert change(embedding_worker=0.9, trainer=0.5) == ("embedding-worker", 3)
    assert change(embedding_server=0.8, embedding_worker=0.7) == ("embedding-server", 2)
    assert change(embedding_worker=0.79, trainer=0.5) is None
    assert change(embedding_worker=0.9, trainer=0.95) is None  # more of them would wait for the trainer


def test_one_goes_where_the_others_would_have_little_to_do():
    assert change(embedding_worker=0.2, trainer=0.9) == ("embedding-worker", 1)
    assert change(embedding_worker=0.25, trainer=0.9) is None
    assert change(embedding_server=0.0, trainer=0.9) is None  # the floor


def test_no_role_leaves_its_bounds():
    assert decided({"loader": 1.0}, COUNTS, {"loader": Bounded(ceiling=1)}) is None
    assert decided({}, COUNTS, {"loader": Bounded(floor=2, ceiling=4)})[:2] == ("loader", 2)
    assert decided({}, COUNTS, {"embedding-worker": Bounded(ceiling=1)})[:2] == ("embedding-worker", 1)
    assert decided({}, COUNTS, RANGES) is None


def show(run, role, busy_s, index=0, age_s=0.0):
    """A process that worked so much of the last five seconds."""
    now, then = time.time() - age_s, time.time() - age_s - 5.0
    readings = {
        name: {"at_s": at_s, "stats": {"live": {"busy_s": spent, "busy_threads": 1}}}
        for name, at_s, spent in (("now", now, 10.0 + busy_s), ("then", then, 10.0))
    }
    shown = {
        "role": role,
        "index": index,
        "incarnation": 0,
        "pid": 1,
        "start": "",
        "host": "",
        "begun_s": 0.0,
    }
    (run / "live").mkdir(exist_ok=True)
    (run / "live" / f"{role}-{index}.json").write_text(json.dumps(shown | {"endpoint": "", **readings}))


def test_loads_are_means_over_processes_that_all_say_theirs(tmp_path):
    counts = {"trainer": 1, "loader": 2}
    show(tmp_path, "trainer", 1.0)
    show(tmp_path, "loader", 5.0)
    assert loads_of(tmp_path, counts) == {}
    show(tmp_path, "loader", 2.0, index=1)
    assert loads_of(tmp_path, counts) == pytest.approx({"trainer": 0.2, "loader": 0.7})
    show(tmp_path, "trainer", 1.0, age_s=6.0)
    assert loads_of(tmp_path, counts) == {}


def test_looks_must_agree(tmp_path):
    counts = {"loader": 1}
    scaler = Autoscaler(tmp_path, {"loader": Bounded(ceiling=2)}, every_s=0.0)
    found = []
    for busy_s in (5.0, 5.0, 1.0, 5.0, 5.0, 5.0, 5.0):
        show(tmp_path, "loader", busy_s)
        found.append(scaler.wanted(counts))
    assert [each is not None for each in found] == [False] * 5 + [True, False]
    assert found[5] == ("loader", 2, "each loader works 100% of the time")
    slow = Autoscaler(tmp_path, {"loader": Bounded(ceiling=2)}, every_s=1000.0)
    assert [slow.wanted(counts) for _ in range(LOOKS)] == [None] * LOOKS


def test_options_are_checked():
    options = build(ClusterOptions, {"autoscale": {"loader": {"ceiling": 3}}}, "[cluster]")
    assert options.autoscale["loader"] == Bounded(floor=1, ceiling=3)
    with pytest.raises(ConfigError, match=r"floor = 3: above ceiling = 2; expected at most that"):
        build(ClusterOptions, {"autoscale": {"loader": {"floor": 3, "ceiling": 2}}}, "[cluster]")
