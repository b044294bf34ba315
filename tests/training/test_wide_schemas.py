"""Schemas of thousands of features: what a feature costs is in kernels and in torch, not in Python.

Lines of Python that a step comes to are counted: as many with 400 features as with 40.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import girih
from girih.data import read_parquet
from girih.data.batch import share_of
from girih.data.decode import batches
from girih.data.decode.batches import joined
from girih.dense.accel import onednn
from girih.kernels.buffers import Buffers
from girih.kernels.cpu.jit import JIT_DISABLED
from girih.lifecycle.planning import measure_access
from girih.sparse.spec import SparseSpec
from girih.telemetry.stats import Spans
from girih.training.schedules import JoinedHalves

pytestmark = pytest.mark.skipif(JIT_DISABLED, reason="kernels are Python then")
ROOT = str(Path(girih.__file__).parent)
BUFFERS = str(Path(ROOT, "kernels", "buffers.py"))  # calls there follow from the sizes of arrays
BUSY = str(
    Path(ROOT, "telemetry", "busy.py")
)  # whether a thread has to wait is a matter of when others are done
FEW, MANY, SIZE = 40, 400, 512
SLACK = 100  # calls of C that may differ: far fewer than one for each further feature


def schema_of(features, *, dims=(4,), numeric=0):
    sparse = [girih.Categorical(name=f"f{f}", dim=dims[f % len(dims)]) for f in range(features)]
    return girih.Schema([*sparse, *(girih.Numeric(name=f"x{x}") for x in range(numeric))], "click")


def file_of(directory, features, *, rows=3 * SIZE, numeric=0, group=None):
    file, rng = directory / f"{features}-{rows}.parquet", np.random.default_rng(0)
    columns = {f"f{f}": rng.integers(0, 50, rows) for f in range(features)}
    columns |= {f"x{x}": rng.normal(size=rows) for x in range(numeric)}
    pq.write_table(
        pa.table({**columns, "click": rng.integers(0, 2, rows)}), file, row_group_size=group or rows
    )
    return file


def lines_of(work):
    """How often a piece of work comes to a line of each Python function of girih in this thread, and calls functions of C.

    A loop within a line comes to it each time.
    """
    counted: Counter[str] = Counter()

    def note(frame, event, _):
        counted["C"] += event == "c_call"

    def trace(frame, event, _):
        code = frame.f_code
        if not code.co_filename.startswith(ROOT) or code.co_filename in (BUFFERS, BUSY):
            return None
        counted[f"{code.co_filename.removeprefix(ROOT)}:{code.co_qualname}"] += 1
        return trace

    before = sys.gettrace()
    gc.collect()
    gc.disable()  # else lines count of what it happens to close
    sys.setprofile(note)
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
        sys.setprofile(None)
        gc.enable()
    return counted


def assert_alike(few, many):
    few, many = dict(few), dict(many)
    assert abs(many.pop("C") - few.pop("C")) < SLACK
    assert {
        name: many.get(name, 0) - few.get(name, 0) for name in few | many if few.get(name) != many.get(name)
    } == {}


@pytest.mark.parametrize(
    ("model", "options", "dims", "numeric"),
    [
        ("deepfm", {"hidden": (8,)}, (4,), 3),
        ("lr", {}, (4,), 0),
        ("dcn", {"hidden": (8,)}, (4, 8), 1),  # features of two groups, in turns
        ("mmoe", {"num_experts": 2, "expert_hidden": (8,), "tower_hidden": ()}, (4,), 0),
    ],
)
def test_a_step_runs_as_many_lines_whatever_the_features(
    tmp_path, monkeypatch, model, options, dims, numeric
):
    monkeypatch.setattr(onednn, "MIN_PRODUCTS", 1 << 62)  # which way products go follows from sizes

    def calls(features):
        schema = schema_of(features, dims=dims, numeric=numeric)
        data = read_parquet(file_of(tmp_path, features, numeric=numeric), schema, batch_size=SIZE)
        with girih.Trainer(
            girih.models.create(model, schema, options), store=girih.StoreOptions(shards=1)
        ) as trainer:
            trainer.fit(data, epochs=1)  # all rows are there, and what is found out once is known
            (session, batch) = trainer._run.opened()[1], next(iter(data))
            halves = JoinedHalves(session.sparse, session.dense, 3, lambda: 1.0, Spans())
            steps = session.schedule(iter([(batch, None)] * 4), halves)
            next(steps), next(steps)
            step = lines_of(lambda: next(steps))
            steps.close()
            session.dense.predict(batch, session.sparse.peek(batch).wait())
            return step, lines_of(lambda: session.dense.predict(batch, session.sparse.peek(batch).wait()))

    for few, many in zip(calls(FEW), calls(MANY), strict=True):
        assert sum(few.values()) > 20
        assert_alike(few, many)


def test_reading_runs_lines_by_columns_of_row_groups_not_of_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(batches, "GROUP_BYTES", 1)  # of wide rows, a batch has more

    def more_batches(features):
        """What eight batches of a row group run beyond two."""
        schema, file = schema_of(features), file_of(tmp_path, features, rows=512)
        assert schema.numeric == ()  # found out once
        few, many = (
            lines_of(lambda size=size: list(read_parquet(file, schema, batch_size=size)))
            for size in (256, 64)
        )
        many.subtract(few)
        return many

    more_batches(2)
    assert_alike(more_batches(10), more_batches(100))


def test_parts_of_batches_are_put_together_whatever_the_features(tmp_path):
    def calls(features):
        batch, *others = read_parquet(file_of(tmp_path, features), schema_of(features), batch_size=SIZE)
        share_of(batch, 1, 3), joined([batch, *others], Buffers())
        return lines_of(lambda: share_of(batch, 1, 3)), lines_of(lambda: joined([batch, *others], Buffers()))

    for few, many in zip(calls(FEW), calls(MANY), strict=True):
        assert_alike(few, many)


def test_a_run_begins_in_lines_that_grow_with_the_features_alone(tmp_path):
    """A feature more costs the same whatever their number: nothing is looked up among all others."""

    def calls(features):
        file = file_of(tmp_path, features, rows=8)
        config = {
            "features": [{"name": f"f{f}", "kind": "categorical", "dim": 4} for f in range(features)],
            "labels": {"names": ["click"]},
        }

        def begin():
            schema = girih.Schema.from_dict(config)
            other = girih.Schema.from_dict(config)
            data = read_parquet(file, other, batch_size=8)
            with girih.Trainer(girih.models.DeepFM(schema, hidden=(4,))) as trainer:
                trainer.fit(data, epochs=1)

        return sum(lines_of(begin).values())

    calls(10)
    one, two, four = (calls(features) for features in (50, 100, 200))
    assert four - two < 2.2 * (two - one)


def test_thousands_of_features_train(tmp_path):
    features = 2_000
    schema = schema_of(features)
    data = read_parquet(file_of(tmp_path, features, rows=64), schema, batch_size=32)
    with girih.Trainer(girih.models.DeepFM(schema, hidden=(8,)), run=tmp_path / "run") as trainer:
        state = trainer.fit(data, epochs=2)
        assert (state.step, state.examples) == (4, 128)
        stats = trainer.sparse.stats()
        assert sorted(stats.rows) == sorted(f"f{f}" for f in range(features))
        assert sum(stats.rows.values()) == stats.store["rows"] > features
        auc = trainer.evaluate(data).auc
    with girih.Trainer(girih.models.DeepFM(schema, hidden=(8,))) as again:
        again.load(tmp_path / "run", resume=False)
        assert again.evaluate(data).auc == auc


def test_the_access_profile_counts_what_numpy_does(tmp_path):
    schema = girih.Schema(
        [
            girih.Categorical(name="f0", dim=4),
            girih.Categorical(name="f1", dim=8),
            girih.Categorical(name="f2", table="f0"),
            girih.Categorical(name="f3", dim=4),
        ],
        "click",
    )
    data = read_parquet(file_of(tmp_path, 4, rows=90), schema, batch_size=30)
    needs = {feature.name: frozenset({"embedding"}) for feature in schema.sparse}
    profile = measure_access(data, SparseSpec(schema=schema, needs=needs, optimizer=girih.optim.SGD()), 2)
    tables = {"f0": (0, 2), "f1": (1,), "f3": (3,)}
    ids_of = [batch.ids.reshape(4, -1) for batch in data]

    def mean(table, size):
        return np.mean([len(np.unique(ids[list(tables[table]), :size])) for ids in ids_of])

    assert profile.rows == pytest.approx({table: mean(table, 30) for table in tables})
    assert profile.rows_of_share == pytest.approx({table: mean(table, 15) for table in tables})
    assert profile.ids == 4 * 30
