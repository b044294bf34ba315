"""Batches cut from rows: equal to a plain twin, the same for ever, in memory that is used again."""

import hashlib
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.data import read_csv, read_parquet
from girih.data.decode import batches as batches_module
from girih.data.decode.batches import BagColumn, DecodedRows, cut, joined
from girih.data.position import permutation, sorted_places
from girih.errors import DataError
from girih.kernels.buffers import Buffers
from girih.schema import Categorical, Labels, Numeric, Schema, Sequence

FEATURES = st.lists(st.sampled_from(["single", "bags", "weighted bags", "weighted"]), max_size=3)


def drawn_parts(draw, features):
    """Rows as lists of (ids, weights) for each feature, and the same as parts."""
    table, parts = [], []
    for _ in range(draw(st.integers(1, 3))):
        num_rows, bags = draw(st.integers(1, 6)), []
        begin = len(table)
        numbers = np.arange(begin, begin + num_rows, dtype=np.float32)
        table += [[] for _ in range(num_rows)]
        for kind in features:
            longest = 4 if "bags" in kind else 1
            ids = [draw(st.lists(st.integers(-9, 9), min_size=0 if "bags" in kind else 1, max_size=longest))
                   for _ in range(num_rows)]  # fmt: skip
            weighted = kind.startswith("weighted") and draw(st.booleans())  # a part of ones has none
            flat = np.array([i for bag in ids for i in bag], dtype=np.int64)
            weights = np.arange(len(flat), dtype=np.float32) if weighted else np.ones(len(flat), np.float32)
            offsets = np.cumsum([0, *map(len, ids)])
            for row, bag in enumerate(ids):
                table[begin + row].append((bag, weights[offsets[row] : offsets[row + 1]].tolist()))
            bags.append(BagColumn(flat, offsets if "bags" in kind else None, weights if weighted else None))
        matrix = np.stack([numbers, -numbers], axis=1)
        kept = pa.table({"row": numbers})
        parts.append(DecodedRows(bags, matrix, numbers[:, None].copy(), numbers / 2, kept))
    return table, parts


def plain(table, rows, num_features):
    """A batch of some rows, one value after the other."""
    bags = [table[row][f] for f in range(num_features) for row in rows]
    return {
        "ids": [i for ids, _ in bags for i in ids],
        "weights": [w for _, weights in bags for w in weights],
        "offsets": np.cumsum([0, *(len(ids) for ids, _ in bags)]).tolist(),
        "numeric": [[row, -row] for row in rows],
        "labels": [[row] for row in rows],
        "example_weights": [row / 2 for row in rows],
        "kept": list(rows),
    }


def shown(batch):
    weights = np.ones(len(batch.ids)) if batch.weights is None else batch.weights
    kept = batch.kept["row"].to_pylist()
    names = ("ids", "offsets", "numeric", "labels", "example_weights")
    return {name: getattr(batch, name).tolist() for name in names} | {
        "weights": weights.tolist(), "kept": kept,
    }  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(FEATURES, st.data())
def test_batches_are_those_of_the_plain_twin(features, data):
    table, parts = drawn_parts(data.draw, features)
    order = np.array(data.draw(st.permutations(range(len(table)))))
    size, first = data.draw(st.integers(1, 5)), data.draw(st.integers(0, len(table)))
    found = cut(parts, order, first, size, Buffers())
    last = first + (len(table) - first) // size * size
    bounds = sorted({0, *range(first, last + 1, size), len(table)})
    want = [order[a:b].tolist() for a, b in pairwise(bounds)]
    assert [shown(batch) for batch in found] == [plain(table, rows, len(features)) for rows in want]
    assert shown(joined(found, Buffers())) == plain(table, order.tolist(), len(features))


def test_groups_of_any_size_give_the_same_batches(monkeypatch):
    def batches():
        column = BagColumn(np.arange(50), np.arange(0, 51, 2))
        rows = DecodedRows(
            [column, BagColumn(np.arange(25))], np.zeros((25, 0), np.float32), np.zeros((25, 1), np.float32)
        )
        return [
            (b.ids.tolist(), b.offsets.tolist()) for b in cut([rows], permutation(25, 1), 3, 4, Buffers())
        ]

    want = batches()
    for group_bytes in (1, 200, 300):
        monkeypatch.setattr(batches_module, "GROUP_BYTES", group_bytes)
        monkeypatch.setattr(batches_module, "GROUP_ROWS", 1)
        assert batches() == want


def test_too_many_ids_are_refused(monkeypatch):
    monkeypatch.setattr(batches_module, "MAX_IDS", 7)
    for offsets in (None, np.arange(9)):
        rows = DecodedRows(
            [BagColumn(np.arange(8), offsets)], np.zeros((8, 0), np.float32), np.zeros((8, 0), np.float32)
        )
        with pytest.raises(DataError, match=r"batch of 8 rows has more than 2³¹ ids; lower batch_size"):
            cut([rows], np.arange(8), 0, 8, Buffers())
        rows.bags = [BagColumn(np.arange(8), offsets)]
        with pytest.raises(DataError, match=r"batch of 8 rows has more than 2³¹ ids; lower batch_size"):
            joined(cut([rows], np.arange(8), 4, 8, Buffers()), Buffers())


@given(st.lists(st.integers(0, 2**64 - 1), unique=True, max_size=30), st.integers(0, 63))
def test_places_are_sorted_as_argsort_does(keys, shift):
    """Small keys agree in their upper bits, so that all are ties."""
    keys = np.array(sorted({key >> shift for key in keys}), dtype=np.uint64)
    np.random.default_rng(0).shuffle(keys)
    assert sorted_places(keys).tolist() == np.argsort(keys).tolist()


SCHEMA = Schema(
    [Categorical(name="a"), Categorical(name="b"), Sequence(name="s", separator="|"), Numeric(name="x")],
    Labels(names=("y",), weight="w"),
)
GOLDEN = {"parquet": "5982f58e100e6c72", "csv": "791636b5b3603d52"}


@pytest.mark.parametrize("kind", sorted(GOLDEN))
def test_shuffled_batches_are_the_same_for_ever(tmp_path, kind):
    n = 3000
    row = np.arange(n)
    sequences = ["|".join(str(i * i % 101) for i in range(r % 5)) for r in range(n)]
    columns = {
        "a": row * row % 997 - 400,
        "b": row // 3,
        "s": sequences,
        "x": row / 8,
        "y": row % 2,
        "w": row % 3,
    }
    for part in range(3):
        rows = slice(part * 1000, part * 1000 + 1000)
        table = pa.table({name: values[rows] for name, values in columns.items()})
        pq.write_table(table, tmp_path / f"{part}.parquet", row_group_size=300)
        lines = [
            ",".join(map(str, cells)) for cells in zip(*(c[rows] for c in columns.values()), strict=True)
        ]
        (tmp_path / f"{part}.csv").write_text("\n".join([",".join(columns), *lines]) + "\n")
    options = {"batch_size": 256, "shuffle": True, "shuffle_rows": 700, "seed": 5}
    if kind == "parquet":
        dataset = read_parquet(str(tmp_path / "*.parquet"), SCHEMA, **options)
    else:
        dataset = read_csv(str(tmp_path / "*.csv"), SCHEMA, block_bytes=5000, **options)
    digest = hashlib.sha256()
    for batch, _ in dataset.batches(3):
        for array in (batch.ids, batch.offsets, batch.numeric, batch.labels, batch.example_weights):
            digest.update(array.tobytes())
    assert digest.hexdigest()[:16] == GOLDEN[kind]


def test_batches_that_are_kept_are_not_written_over(tmp_path):
    n = 1 << 17
    table = pa.table({"c": np.arange(2 * n), "d": np.arange(2 * n), "y": np.zeros(2 * n)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=n)
    schema = Schema([Categorical(name="c"), Categorical(name="d")], "y")
    dataset = read_parquet(tmp_path / "a.parquet", schema, batch_size=n // 2, shuffle=True, shuffle_rows=n)
    kept = list(dataset)
    ids = np.concatenate([batch.ids.reshape(2, -1) for batch in kept], axis=1)
    assert (ids[0] == ids[1]).all()
    assert (np.sort(ids[0]) == np.arange(2 * n)).all()
