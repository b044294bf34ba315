"""The index, the list and the filter against dictionaries, lists and counts."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.kernels.cpu import admission, index, layout, recency
from girih.kernels.cpu.jit import JIT_DISABLED

KEY = st.tuples(st.sampled_from([0, -1, 1, 5, 9, 2**63 - 1, -(2**63), 2**40]), st.integers(0, 2))


def filled(num_slots, rows):
    slots = np.zeros((num_slots, 2), np.int64)
    for (key_id, table), row in rows.items():
        index.insert(slots, np.int64(key_id), np.int64(table), row)
    return slots


def looked_up(slots, keys):
    ids = np.array([i for i, _ in keys], np.int64)
    tables = np.array([t for _, t in keys], np.int32)
    rows = np.empty(len(keys), np.int32)
    index.find_all(slots, ids, tables, np.empty(len(keys), np.int64), rows)
    assert [index.find(slots, i, t) for i, t in zip(ids, tables, strict=True)] == rows.tolist()
    return rows.tolist()


@settings(deadline=None, max_examples=30 if JIT_DISABLED else 200)
@given(st.lists(st.tuples(st.booleans(), KEY), max_size=60))
def test_sixteen_slots_are_a_dictionary(actions):
    """So small that probes run around the end, and that deletions close gaps across it."""
    slots, rows = np.zeros((16, 2), np.int64), {}
    for number, (adds, key) in enumerate(actions):
        if adds and key not in rows and len(rows) < 12:
            index.insert(slots, np.int64(key[0]), np.int64(key[1]), number)
            rows[key] = number
        elif not adds:
            index.delete(slots, np.int64(key[0]), np.int64(key[1]))
            rows.pop(key, None)
        keys = [(i, t) for i in (0, -1, 1, 5, 9, 2**63 - 1, -(2**63), 2**40) for t in range(3)]
        assert looked_up(slots, keys) == [rows.get(key, -1) for key in keys]
    assert (slots[:, 1] != 0).sum() == len(rows)


def test_deletion_around_the_end_keeps_every_key():
    by_home = {}
    probe = np.zeros((16, 2), np.int64)
    for key_id in range(400):
        by_home.setdefault(int(index.home_slot(probe, np.int64(key_id), np.int64(0))), []).append(key_id)
    keys = [*by_home[14][:3], *by_home[15][:3], *by_home[0][:3], *by_home[1][:2]]
    for first in keys:
        for second in keys:
            rows = {(key, 0): number for number, key in enumerate(keys)}
            slots = filled(16, rows)
            for gone in {first, second}:
                index.delete(slots, np.int64(gone), np.int64(0))
                del rows[gone, 0]
            assert looked_up(slots, [(key, 0) for key in keys]) == [rows.get((key, 0), -1) for key in keys]


def test_rehash_keeps_every_key():
    num_keys = 90 if JIT_DISABLED else 3000
    rows = {(key_id * 7919 - 5000, key_id % 3): key_id for key_id in range(num_keys)}
    old = filled(1 << (num_keys * 4 // 3).bit_length(), rows)
    new = np.zeros((4 * len(old), 2), np.int64)
    index.rehash(old, new)
    assert looked_up(new, list(rows)) == list(rows.values())
    assert looked_up(new, [(-1, 0), (10**9, 1)]) == [-1, -1]


@settings(deadline=None, max_examples=30 if JIT_DISABLED else 200)
@given(st.lists(st.tuples(st.sampled_from(["push", "touch", "unlink"]), st.integers(0, 9)), max_size=50))
def test_the_list_is_a_list(actions):
    meta = np.full((10, layout.META_COLUMNS), 77, np.int32)
    tables = np.full((2, layout.TABLE_COLUMNS), -1, np.int64)
    rows = []  # oldest first
    for action, row in actions:
        if action == "push" and row not in rows:
            recency.push_newest(meta, tables, 1, np.int64(row))
            rows.append(row)
        elif action == "touch" and row in rows:
            recency.touch(meta, tables, 1, np.int64(row))
            rows.remove(row)
            rows.append(row)
        elif action == "unlink" and row in rows:
            recency.unlink(meta, tables, 1, np.int64(row))
            rows.remove(row)
        out = np.empty(10, np.int32)
        assert out[: recency.oldest_first(meta, tables, 1, out)].tolist() == rows
        back, row_back = [], tables[1, layout.NEWEST]
        while row_back >= 0:
            back.append(int(row_back))
            row_back = meta[row_back, layout.OLDER]
        assert back == rows[::-1]
        assert (tables[0, :2] == -1).all()


def bloom_of(cells):
    blocks = -(-cells // admission.MAX_BLOCK_CELLS)
    size = -(-cells // blocks)
    return np.zeros(blocks * size, np.uint8), np.array([[0, 0, blocks, blocks, size]], np.int64)


def test_the_filter_never_counts_too_little():
    cells, bloom = bloom_of(100)
    truth = {}
    for number in range(300):
        key_id, count = (number * 37) % 50, 1 + number % 3
        admission.add(cells, bloom, np.int64(key_id), 0, count)
        truth[key_id] = truth.get(key_id, 0) + count
        assert admission.seen(cells, bloom, np.int64(key_id), 0) >= min(255, truth[key_id])


def test_the_filter_saturates():
    cells, bloom = bloom_of(64)
    for _ in range(3):
        admission.add(cells, bloom, np.int64(1), 0, 2**31 - 1)
    assert admission.seen(cells, bloom, np.int64(1), 0) == 255


def test_the_filter_errs_as_often_as_documented():
    num_keys = 600 if JIT_DISABLED else 20_000
    num_cells = 10 * num_keys
    cells, bloom = bloom_of(num_cells)
    for key_id in range(num_keys):
        admission.add(cells, bloom, np.int64(key_id), 0, 1)
    wrong = np.mean([admission.seen(cells, bloom, np.int64(-1 - i), 0) > 0 for i in range(num_keys)])
    expected = (1 - np.exp(-4 * num_keys / num_cells)) ** 4
    assert abs(wrong - expected) < 6 * (expected / num_keys) ** 0.5
