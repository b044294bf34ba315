"""Order, resuming, and how much is held in memory."""

import gzip
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.data import Position, read_csv, read_libsvm, read_parquet
from girih.data.position import permutation
from girih.errors import ConfigError, DataError
from girih.schema import Categorical, Numeric, Schema, Sequence

SCHEMA = Schema([Categorical(name="row"), Sequence(name="bag", separator="|"), Numeric(name="x")], "y")
PAIRS = Schema([Categorical(name="row"), Numeric(name="x")], "y")
NUM_ROWS = 97
BAD = {5, 40, 41, 96}


def cells():
    for row in range(NUM_ROWS):
        x = "nan" if row in BAD else str(row / 4)
        yield row, "|".join(str(i) for i in range(row % 4)), x, row % 2


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same rows in each format, in three files."""
    root = tmp_path_factory.mktemp("resume")
    rows = list(cells())
    for number, part in enumerate((rows[:30], rows[30:31], rows[31:])):
        columns = list(zip(*part, strict=True))
        x = [float(value) for value in columns[2]]
        table = pa.table({"row": columns[0], "bag": columns[1], "x": x, "y": columns[3]})
        pq.write_table(table, root / f"{number}.parquet", row_group_size=7)
        lines = "row,bag,x,y\n" + "".join(f"{r},{b},{x},{y}\n" for r, b, x, y in part)
        (root / f"{number}.csv").write_text(lines)
        (root / f"{number}.csv.gz").write_bytes(gzip.compress(lines.encode()))
        (root / f"{number}.txt").write_text("".join(f"{y} {r}:1 0:{x}\n\n" for r, _, x, y in part))
    return root


def opened(files, kind, **options):
    options = {"batch_size": 8, "on_bad_row": "skip", "shuffle_rows": 20, "seed": 3} | options
    if kind == "parquet":
        return read_parquet(f"{files}/*.parquet", SCHEMA, **options)
    if kind == "txt":
        return read_libsvm(f"{files}/*.txt", PAIRS, block_bytes=100, **options)
    return read_csv(f"{files}/*.{kind}", SCHEMA, block_bytes=100, **options)


def fingerprint(batch):
    return [
        None if array is None else (array.dtype.str, array.tobytes())
        for array in (batch.ids, batch.offsets, batch.weights, batch.numeric, batch.labels)
    ]


def rows_of(batch):
    return batch.ids[: batch.num_examples].tolist()


KINDS = ["parquet", "csv", "csv.gz", "txt"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("batch_size", [1, 8, 23, 1000])
def test_resuming_at_every_batch_equals_the_uninterrupted_run(files, kind, shuffle, batch_size):
    dataset = opened(files, kind, shuffle=shuffle, batch_size=batch_size)
    steps = list(dataset.batches(2))
    skipped = dataset.num_skipped
    prints = [fingerprint(batch) for batch, _ in steps]
    every = max(1, len(steps) // 12)
    for number, (_, position) in list(enumerate(steps))[:-1:every]:
        rest = list(opened(files, kind, shuffle=shuffle, batch_size=batch_size).batches(2, position))
        assert [fingerprint(batch) for batch, _ in rest] == prints[number + 1 :]
        assert [later for _, later in rest] == [later for _, later in steps[number + 1 :]]
    resumed = opened(files, kind, shuffle=shuffle, batch_size=batch_size)
    list(resumed.batches(2, steps[len(steps) // 2 - 1][1] if len(steps) > 1 else None))
    assert resumed.num_skipped == skipped == len(BAD)
    assert steps[-1][1] == Position(epoch=3, order=steps[-1][1].order)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 120), st.integers(1, 400), st.integers(0, 5), st.data())
def test_resuming_with_any_sizes(files, batch_size, shuffle_rows, block_bytes, seed, data):
    dataset = read_csv(
        f"{files}/*.csv",
        SCHEMA,
        batch_size=batch_size,
        shuffle=True,
        shuffle_rows=shuffle_rows,
        seed=seed,
        on_bad_row="skip",
        block_bytes=block_bytes,
    )
    steps = list(dataset.batches(0))
    assert sorted(row for batch, _ in steps for row in rows_of(batch)) == [
        r for r in range(NUM_ROWS) if r not in BAD
    ]
    number = data.draw(st.integers(0, len(steps) - 1))
    rest = list(dataset.batches(steps[number][1].epoch, steps[number][1])) if number < len(steps) - 1 else []
    assert [fingerprint(batch) for batch, _ in rest] == [
        fingerprint(batch) for batch, _ in steps[number + 1 :]
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_is_a_permutation_and_differs_from_the_next(files, kind):
    dataset = opened(files, kind, shuffle=True)
    good = [row for row in range(NUM_ROWS) if row not in BAD]
    epochs = [[row for batch, _ in dataset.batches(epoch) for row in rows_of(batch)] for epoch in (0, 1, 0)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == good
    assert epochs[0] == epochs[2] != epochs[1]
    assert epochs[0] != good
    other = [
        row for batch, _ in opened(files, kind, shuffle=True, seed=4).batches(0) for row in rows_of(batch)
    ]
    assert sorted(other) == good != other != epochs[0]


@pytest.mark.parametrize("kind", KINDS)
def test_without_shuffling_rows_come_in_file_order(files, kind):
    dataset = opened(files, kind)
    batches = [batch for batch, _ in dataset.batches(5)]
    assert [row for batch in batches for row in rows_of(batch)] == [
        r for r in range(NUM_ROWS) if r not in BAD
    ]
    assert [batch.num_examples for batch in batches[:-1]] == [8] * (len(batches) - 1)


def test_formats_and_block_sizes_give_the_same_batches(files):
    want = [fingerprint(batch) for batch in opened(files, "parquet")]
    assert [fingerprint(batch) for batch in opened(files, "csv")] == want
    for block_bytes in (1, 9, 10, 11, 64, 1 << 20):
        dataset = read_csv(f"{files}/*.csv", SCHEMA, batch_size=8, on_bad_row="skip", block_bytes=block_bytes)
        assert [fingerprint(batch) for batch in dataset] == want


def test_windows_mix_row_groups_of_different_files(files):
    dataset = opened(files, "parquet", shuffle=True, batch_size=20)
    first = rows_of(next(iter(dataset)))
    assert len({row < 30 for row in first}) == 2


def test_the_order_is_the_same_for_ever():
    assert permutation(10, 7, 0, 0).tolist() == GOLDEN_ORDER
    assert sorted(permutation(1000, 1, 2, "parts").tolist()) == list(range(1000))
    assert permutation(0, 1).tolist() == []


GOLDEN_ORDER = [6, 1, 3, 7, 9, 8, 2, 0, 5, 4]


def test_positions_fit_only_the_order_they_are_from(files):
    dataset = opened(files, "parquet", shuffle=True)
    (_, position), *_ = dataset.batches(1)
    with pytest.raises(ConfigError, match="epoch 1 is not the epoch asked for, 0"):
        dataset.batches(0, position)
    for other in (
        opened(files, "csv", shuffle=True),
        opened(files, "parquet"),
        opened(files, "parquet", shuffle=True, seed=4),
        opened(files, "parquet", shuffle=True, shuffle_rows=21),
    ):
        with pytest.raises(ConfigError, match="position"):
            other.batches(1, position)
    assert len(list(dataset.with_batch_size(5).batches(1, position))) > 0


def test_a_position_beyond_its_window_is_refused(files):
    dataset = opened(files, "parquet")
    with pytest.raises(DataError, match="row 99 is beyond its window"):
        list(dataset.batches(0, Position(row=99)))


def test_counts_of_rows(files):
    assert opened(files, "parquet").num_examples == NUM_ROWS
    assert opened(files, "csv").num_examples is None


def test_memory_stays_at_about_two_windows(tmp_path):
    rows, groups, width = 20_000, 24, 10
    schema = Schema([Categorical(name=f"c{i}") for i in range(width)], "c0x")
    columns = {f"c{i}": np.arange(rows * groups) for i in range(width)} | {"c0x": np.zeros(rows * groups)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=rows)
    dataset = read_parquet(
        tmp_path / "a.parquet", schema, shuffle=True, shuffle_rows=2 * rows, batch_size=1000
    )
    window_bytes = 2 * rows * (width + 1) * 8
    arrow, count = 0, 0
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    for batch, _ in dataset.batches(0):
        count += batch.num_examples
        arrow = max(arrow, pa.total_allocated_bytes() - before)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == rows * groups
    assert peak + arrow < 4 * window_bytes < rows * groups * (width + 1) * 8 / 2
