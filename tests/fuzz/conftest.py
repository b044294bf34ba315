"""A good directory of each format, from one short run."""

import json
import shutil
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from fuzzed_formats import FORMATS

from girih.app.run_config import RunConfig
from girih.planner.plan import Plan
from girih.processes import segments
from girih.processes.lease import Lease
from girih.serving.exporting import export
from girih.serving.opening import open_model
from girih.serving.reading import RequestReader
from serving.serving_site import tensors_of

sys.path.append(str(Path(__file__).parents[1] / "publishing"))
from following import publish_here

LRU = "tables=[{name='user',eviction={name='lru',max_rows=60}},{name='item',eviction={name='ttl',steps=3}}]"
RUN = [
    LRU,
    "train.max_steps=5",
    "data.batch_size=64",
    "store.shards=2",
    "checkpoint.every_steps=1",
    "checkpoint.keep=1",
]
LOG = ["publish.every_steps=1", "publish.snapshot_every=100", "publish.keep=50"]
CALIBRATION = Path(__file__).parents[2] / "docs" / "results" / "prediction" / "calibration.json"


@pytest.fixture(scope="session")
def good(log_source, tmp_path_factory):
    """Format → its good directory."""
    root = tmp_path_factory.mktemp("good")
    run, log = root / "run", root / "log"
    publish_here(log_source / "config.toml", run, log, *RUN, *LOG)
    export(open_model(run), root / "export", "m", print, programs=False)
    found = {"export": root / "export", "log": log}
    (step,) = (run / "checkpoints").iterdir()
    found["checkpoint"] = found["resumed"] = root / step.name
    shutil.copytree(step, root / step.name)
    for name in ("plan", "calibration", "lease"):
        (root / name).mkdir()
        found[name] = root / name
    settings = RunConfig.load(log_source / "config.toml", strategy="synchronous")
    (root / "plan" / "plan.json").write_text(json.dumps(settings.planned().to_dict()))
    shutil.copy(CALIBRATION, root / "calibration" / "calibration.json")
    lease = root / "lease"
    for name in ("config.toml", "metrics.jsonl", "summary.json", "published.json"):
        shutil.copy(run / name, lease)
    start, namespace = "77", segments._namespace()
    dead = Lease(
        Lease.of_this_run().host,
        Lease.of_this_run().boot,
        4194999,
        start,
        f"girih-4194999.{start}.{namespace}-",
    )
    with (lease / ".lock").open("w") as file:
        dead.write(file)
    request = {"name": "abc", "counts": {"trainer": 2}, "asked_s": 1.0, "why": "", "begun": None}
    begun = {"step": 3, "paused_s": 1.0, "before": {"trainer": 1}, "lease": None}
    (lease / "scale.json").write_text(json.dumps(request | {"begun": begun}))
    (lease / "scaled.jsonl").write_text(
        json.dumps({"name": "abc", "step": 3, "roles": {"trainer": [1, 2]}}) + "\n"
    )
    stats = {"counters": {"x": 1}, "histograms": {"staleness": {"1": 2}}, "live": {"rows": {"a": 1}}}
    reading = {
        "at_s": 1.0,
        "cpu_s": 1.0,
        "rss_bytes": 5,
        "stats": stats | {"phases": {}, "requests": {}, "busy_s": 1.0},
    }
    shown = {
        "role": "trainer",
        "index": 0,
        "incarnation": 0,
        "pid": 5,
        "start": "7",
        "host": "h",
        "begun_s": 1.0,
    }
    (lease / "live").mkdir()
    (lease / "live" / "trainer-0.json").write_text(
        json.dumps(shown | {"endpoint": "", "now": reading, "then": reading})
    )
    return found


@pytest.fixture(scope="session")
def examples(log_source):
    return pq.read_table(log_source / "test.parquet").slice(0, 20)


@pytest.fixture
def fuzzed(request, good, examples, log_source, tmp_path, monkeypatch):
    """A format that is about to be fuzzed."""
    name = request.param
    format = FORMATS[name](good[name], tmp_path, examples.select(["user", "item", "tags", "x0"]))
    if name in ("export", "log"):
        schema = RunConfig.load(log_source / "config.toml").schema
        format.table_batch = RequestReader(schema, 1000).read(tensors_of(format.table))
    if name == "log":
        format.newest = json.loads((good[name] / "head.json").read_text())["newest"]["number"]
    if name == "plan":
        format.good = Plan.read(good[name] / "plan.json")
    if name == "lease":
        format.memory = tmp_path / "memory"
        monkeypatch.setattr(segments, "SHARED_MEMORY", str(format.memory))
    if name == "resumed":
        settings = RunConfig.load(log_source / "config.toml", overrides=RUN)
        with settings.trainer() as format.trainer:
            format.trainer.fit(settings.dataset("train"))
            yield format
        return
    yield format
