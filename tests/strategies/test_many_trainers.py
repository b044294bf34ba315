"""Strategies in step have the same rows and parameters as ``local`` with 8 and 16 trainers, after 50 steps.

A step has 32 examples, so 16 trainers have two each. There are 18 tables, because ``substitution`` has at most one trainer for each
table. The three strategies share one group of processes, and each runs once.
"""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matrix import DENSE, ROWS
from scenes import COMPANIES, play, play_all

from runs import columns_of, dense_of, difference, latest

STEPS, SIZE, TABLES = 50, 32, 18
HYBRID = ("staleness=0", "embedding_workers=3", "embedding_servers=2", "loaders=2")
IN_STEP = {
    "synchronous": (),
    "hybrid": HYBRID,
    "substitution": ('dense="replicated"',),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    rng = np.random.default_rng(0)
    for split, rows in (("train", STEPS * SIZE), ("test", 100)):
        columns = {f"c{table}": pa.array(rng.zipf(1.3, rows) % (20 + 10 * table)) for table in range(TABLES)}
        clicked = (columns["c0"].to_numpy() + columns["c1"].to_numpy()) % 3 == 0
        columns["x"] = pa.array(rng.normal(size=rows).astype(np.float32))
        columns["click"] = pa.array((clicked ^ (rng.random(rows) < 0.1)).astype(np.int8))
        pq.write_table(pa.table(columns), folder / f"{split}.parquet")
    features = [f'[[features]]\nname = "c{table}"\nkind = "categorical"\ndim = 4' for table in range(TABLES)]
    lines = [
        f'[data]\ntrain = "train.parquet"\ntest = "test.parquet"\nbatch_size = {SIZE}',
        *features,
        '[[features]]\nname = "x"\nkind = "numeric"',
        '[labels]\nnames = ["click"]',
        '[model]\nname = "deepfm"\nhidden = [16, 8]',
        '[sparse_optimizer]\nname = "adagrad"\nlr = 0.05',
        '[dense_optimizer]\nname = "adam"\nlr = 0.003',
        "[store]\nshards = 1\n[train]\nseed = 3",
    ]
    (folder / "deepfm.toml").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def local(directory):
    summary = play(directory, {"name": "local"})
    assert summary["steps"] == STEPS
    return summary


@pytest.fixture(scope="module", params=[8, 16])
def in_step(request, directory):
    """Number of trainers; name of a strategy → the summary of its run."""
    count = request.param
    scenes = [
        {"name": f"{name}-{count}", "strategy": name, "options": options} for name, options in IN_STEP.items()
    ]
    found = play_all(directory, scenes, count)
    yield count, {name: found[f"{name}-{count}"] for name in IN_STEP}
    for company in [key for key in COMPANIES if key[0] == count]:
        COMPANIES.pop(company).end()


def test_rows_and_parameters_equal_those_of_one_trainer(directory, local, in_step):
    count, summaries = in_step
    for name, summary in summaries.items():
        rows, dense = difference(directory / "local", directory / f"{name}-{count}")
        assert rows <= ROWS, name
        assert dense <= DENSE, name
        assert summary["steps"] == STEPS
        assert summary["num_examples"] == STEPS * SIZE
        assert summary["num_rows"] == local["num_rows"]
        assert summary["staleness_max"] == 0


def test_training_moves_rows_and_parameters_by_more_than_is_allowed(directory, local):
    columns, parameters = columns_of(latest(directory / "local")), dense_of(latest(directory / "local"))
    assert {table for table, _ in columns} == {f"c{table}" for table in range(TABLES)}
    for (table, name), (_, values) in columns.items():
        if name == "first_order":  # begins with 0
            assert np.abs(values).max() > 100 * ROWS, table
    assert sum(value.size for value in parameters.values()) > 1000
