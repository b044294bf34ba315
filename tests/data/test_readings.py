"""Readings that are shared: everybody gets what ``Dataset.batches`` gives, and what is read together is decoded once."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.data import Dataset, epoch, read_csv, read_parquet
from girih.data.shared_scans import SharedScans
from girih.errors import DataError
from girih.schema import Categorical, Numeric, Schema

SCHEMA = Schema([Categorical(name="c"), Numeric(name="x")], "y")
ROWS, SIZE, UNITS = 60, 4, 12


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("readings") / "a.parquet"
    columns = {"c": np.arange(ROWS), "x": np.arange(ROWS, dtype=np.float64), "y": np.arange(ROWS) % 2}
    pq.write_table(pa.table(columns), path, row_group_size=ROWS // UNITS)
    return read_parquet(path, SCHEMA, batch_size=SIZE, shuffle=True, shuffle_rows=11)


@pytest.fixture
def num_decoded(monkeypatch):
    decode, units = epoch.decode, []
    monkeypatch.setattr(epoch, "decode", lambda unit, *rest: units.append(unit) or decode(unit, *rest))
    return lambda: len(units)


def plain(batches):
    return [(batch.ids.tolist(), batch.labels.tolist(), after) for batch, after in batches]


def num_threads():
    return sum(thread.name == "girih-read-ahead" for thread in threading.enumerate())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 4))
def test_all_read_the_same_in_whatever_order_they_come(data, order, most_kept):
    expected = list(data.batches(1))
    starts = [None, None, expected[4][1], expected[9][1]]
    wanted = [plain(expected[first:]) for first in (0, 0, 5, 10)]
    readings, found = SharedScans(data, most_kept), [[] for _ in starts]
    with ExitStack() as stack:
        readers = [stack.enter_context(closing(readings.reader(1, start))) for start in starts]
        for who in order:
            found[who] += plain([taken] if (taken := next(readers[who], None)) else [])
            assert len(readings._readings) <= len(readers)
            assert all(len(reading.kept) <= most_kept for reading in readings._readings)
        for reader, rest in zip(readers, found, strict=True):
            rest += plain(reader)
    assert found == wanted
    assert readings._readings == []


def test_what_is_read_together_is_decoded_once(data, num_decoded):
    readings = SharedScans(data, 2)
    with closing(readings.reader(0, None)) as one, closing(readings.reader(0, None)) as other:
        for _ in range(ROWS // SIZE):
            assert plain([next(one)]) == plain([next(other)])
        assert (next(one, None), next(other, None)) == (None, None)
    assert num_decoded() == UNITS
    assert num_threads() == 0


def test_one_far_behind_has_a_reading_of_its_own_from_where_it_is(data, num_decoded):
    readings, expected = SharedScans(data, 2), plain(data.batches(0))
    before = num_decoded()
    with closing(readings.reader(0, None)) as slow, closing(readings.reader(0, None)) as fast:
        for taken in expected[:10]:
            assert plain([next(slow)]) == plain([next(fast)]) == [taken]
        assert plain(fast) == plain(slow) == expected[10:]
    assert UNITS < num_decoded() - before < 2 * UNITS
    assert num_threads() == 0


def test_one_behind_takes_what_is_decoded_while_another_waits_for_more(data, monkeypatch):
    come, expected = threading.Event(), plain(data.batches(0))

    def ahead(self, epoch, position):
        for number, taken in enumerate(self.batches(epoch, position)):
            assert number < 2 or come.wait(20)
            yield taken

    monkeypatch.setattr(Dataset, "ahead", ahead)
    readings = SharedScans(data, 9)
    slow, fast = readings.reader(0, None), readings.reader(0, None)
    with ThreadPoolExecutor(2) as pool, closing(slow), closing(fast):
        assert plain([next(fast), next(fast)]) == expected[:2]
        third = pool.submit(next, fast)
        assert plain([pool.submit(next, slow).result(10) for _ in range(2)]) == expected[:2]
        assert not third.done()
        come.set()
        assert plain([third.result(10)]) == expected[2:3]


def test_each_hears_of_a_bad_row_when_it_comes_to_it(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("c,x,y\n" + "1,1,1\n" * 29 + "1,x,1\n" + "1,1,1\n" * 9)
    readings = SharedScans(read_csv(path, SCHEMA, batch_size=2, block_bytes=30), 9)
    with closing(readings.reader(0, None)) as one, closing(readings.reader(0, None)) as other:
        before = [next(reader)[0].ids.tolist() for reader in (one, other)]
        assert before == [[1, 1], [1, 1]]
        for reader in (one, other, one):
            with pytest.raises(DataError, match="line 31"):
                list(reader)


def test_rows_that_were_skipped_are_counted_by_all(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("c,x,y\n" + "1,x,1\n1,1,1\n" * 20)
    readings = SharedScans(read_csv(path, SCHEMA, batch_size=2, block_bytes=30, on_bad_row="skip"), 1)
    with closing(readings.reader(0, None)) as slow, closing(readings.reader(0, None)) as fast:
        for _ in range(5):
            next(slow)
        for reader in (fast, slow):
            list(reader)
        assert slow.skipped.count == fast.skipped.count == 20
        assert slow.skipped.first == fast.skipped.first
        assert "line 2:" in fast.skipped.first
