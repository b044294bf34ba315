"""The index, the list and the filter against dictionaries, lists and counts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from girih.kernels.cpu import admission, index, layout, recency
from girih.kernels.cpu.jit import JIT_DISABLED

KEY = st.tuples(st.sampled_from([0, -1, 1, 5, 9, 2**63 - 1, -(2**63), 2**40]), st.integers(0, 2))


class Index:
    """A shard's index alone, which is grown as ``Space`` grows it."""

    def __init__(self, num_slots, num_rows=64):
        meta = np.zeros((num_rows, layout.META_COLUMNS), np.int32)
        fields = dict.fromkeys(layout.Shard._fields, None)
        fields |= {"slots": np.zeros(num_slots, np.int64), "next_slots": np.zeros(0, np.int64)}
        fields |= {"meta": meta, "keys": meta.view(np.int64), "state": np.zeros(layout.STATE_WORDS, np.int64)}
        empty = {"values": np.float32, "halves": np.uint16, "tables": np.int64, "cells": np.uint8}
        fields |= {name: np.zeros((1, 1) if name != "cells" else 1, dtype) for name, dtype in empty.items()}
        fields |= {"saving": np.zeros(layout.HEADS, np.int64), "kept": np.zeros(0, np.uint8)}
        fields |= {"log": np.zeros((0, 1), np.int32), "log_bytes": np.zeros((0, 4), np.uint8)}
        fields |= {"changed": np.zeros(0, np.uint8), "left": np.zeros((0, 2), np.int64)}
        fields |= {"scratch": np.zeros((1, 1), np.float32)}
        self.shard = layout.Shard(**{**fields, "scratch_halves": np.zeros(1, np.uint16)})
        self.shard.state[layout.INDEX_SHIFT] = layout.TAG_BITS - num_slots.bit_length() + 1

    def add(self, key, row):
        self.shard.keys[row, 0], self.shard.meta[row, layout.TABLE] = key
        index.insert(self.shard, np.int64(key[0]), np.int64(key[1]), row)
        self.shard.state[layout.NUM_ROWS] += 1

    def remove(self, key):
        index.delete(self.shard, np.int64(key[0]), np.int64(key[1]))

    def rows_of(self, keys):
        ids = np.array([i for i, _ in keys], np.int64)
        tables = np.array([t for _, t in keys], np.int32)
        rows = np.empty(len(keys), np.int32)
        index.find_all(self.shard, ids, tables, rows)
        tags = [index.tag_of(i, t) for i, t in zip(ids, tables, strict=True)]
        guesses = [index.guess(self.shard, np.int64(tag)) for tag in tags]
        assert all(guess >= 0 for guess, row in zip(guesses, rows, strict=True) if row >= 0)
        return rows.tolist()

    def begin(self, claimed=None):
        state, num_slots = self.shard.state, len(self.shard.slots)
        state[layout.GROW_START] = index.after_free_slot(self.shard.slots)
        state[layout.GROWING], state[layout.GROW_MOVED] = 1, 0
        state[layout.GROW_CLAIMED] = num_slots if claimed is None else claimed
        self.shard = self.shard._replace(next_slots=np.zeros(2 * num_slots, np.int64))

    def end(self):
        state = self.shard.state
        assert state[layout.GROW_MOVED] >= len(self.shard.slots)
        assert not self.shard.slots.any()
        self.shard = self.shard._replace(slots=self.shard.next_slots, next_slots=np.zeros(0, np.int64))
        state[[layout.GROWING, layout.GROW_START, layout.GROW_MOVED, layout.GROW_CLAIMED]] = 0
        state[layout.INDEX_SHIFT] -= 1

    def num_entries(self):
        return int((self.shard.slots != 0).sum() + (self.shard.next_slots != 0).sum())


@settings(deadline=None, max_examples=60 if JIT_DISABLED else 400)
@given(
    st.lists(st.tuples(st.sampled_from(["add", "add", "remove", "begin", "move", "end"]), KEY), max_size=80)
)
def test_it_is_a_dictionary_also_while_it_grows(actions):
    """So small that probes run around the end, and that deletions close gaps across it."""
    found, rows = Index(16), {}
    keys = [(i, t) for i in (0, -1, 1, 5, 9, 2**63 - 1, -(2**63), 2**40) for t in range(3)]
    for action, key in actions:
        state = found.shard.state
        growing, done = state[layout.GROWING] == 1, state[layout.GROW_MOVED] >= len(found.shard.slots)
        if action == "add" and key not in rows and len(rows) < (13 * len(found.shard.slots)) // 16:
            rows[key] = next(row for row in range(64) if row not in rows.values())
            found.add(key, rows[key])
        elif action == "remove":
            found.remove(key)
            rows.pop(key, None)
        elif action == "begin" and not growing and len(found.shard.slots) < 64:
            found.begin()
        elif action == "move" and growing:
            index.move(found.shard, 3)
        elif action == "end" and growing and done:
            found.end()
        assert found.rows_of(keys) == [rows.get(key, -1) for key in keys]
        assert found.num_entries() == len(rows)


def keys_by_home(num_slots):
    shard = Index(num_slots).shard
    by_home = {}
    for key_id in range(60 * num_slots):
        home = index.tag_of(np.int64(key_id), np.int64(0)) >> int(shard.state[layout.INDEX_SHIFT])
        by_home.setdefault(int(home), []).append((key_id, 0))
    return by_home


def test_deletion_around_the_end_keeps_every_key():
    by_home = keys_by_home(16)
    keys = [*by_home[14][:3], *by_home[15][:3], *by_home[0][:3], *by_home[1][:2]]
    for first in keys:
        for second in keys:
            found, rows = Index(16), {key: row for row, key in enumerate(keys)}
            for key, row in rows.items():
                found.add(key, row)
            for gone in {first, second}:
                found.remove(gone)
                del rows[gone]
            assert found.rows_of(keys) == [rows.get(key, -1) for key in keys]


def test_what_spills_over_the_start_of_the_growth_is_not_lost():
    """Keys whose home is the last slot to move arrive while the first ones have not moved yet, or have."""
    by_home = keys_by_home(16)
    for moves_before in (0, 1, 4, 16):
        found = Index(16)
        early = [*by_home[0][:2], *by_home[2][:1], *by_home[5][:2]]
        late = by_home[15][:4]  # the growth begins at slot 0, behind the free slot 15
        for row, key in enumerate(early):
            found.add(key, row)
        found.begin()
        found.shard.state[layout.GROW_START] = 0
        index.move(found.shard, moves_before)
        for row, key in enumerate(late, len(early)):
            found.add(key, row)
            index.move(found.shard, 1)
            assert found.rows_of([*early, *late[: row - len(early) + 1]]) == list(range(row + 1))
        while found.shard.state[layout.GROW_MOVED] < 16:
            index.move(found.shard, 3)
            assert found.rows_of([*early, *late]) == list(range(len(early) + len(late)))
        found.end()
        assert found.rows_of([*early, *late]) == list(range(len(early) + len(late)))


def test_moving_waits_for_memory():
    found = Index(16)
    for row, (key, *_) in enumerate(keys_by_home(16).values()):
        if row < 11:
            found.add(key, row)
    found.begin(claimed=4)
    assert not index.is_full(found.shard)
    index.move(found.shard, 100)
    assert 4 <= found.shard.state[layout.GROW_MOVED] < 16
    assert index.is_full(found.shard)


def test_keys_of_one_tag_are_told_apart():
    """Two of 31 bits are found by search, as the birthday paradox has it, among some 10⁵ keys."""
    ids = np.arange(50_000 if JIT_DISABLED else 200_000, dtype=np.int64)
    tags = np.array([index.tag_of(i, np.int64(0)) for i in ids])
    order = np.argsort(tags, kind="stable")
    same = np.flatnonzero(np.diff(tags[order]) == 0)
    if JIT_DISABLED and not len(same):
        pytest.skip("no collision among so few keys")
    first, second = int(ids[order[same[0]]]), int(ids[order[same[0] + 1]])
    found = Index(16)
    found.add((first, 0), 3)
    assert found.rows_of([(first, 0)]) == [3]
    assert index.find(found.shard, np.int64(second), np.int64(0)) == -1
    found.add((second, 0), 4)
    assert found.rows_of([(first, 0), (second, 0)]) == [3, 4]
    found.remove((first, 0))
    assert index.find(found.shard, np.int64(first), np.int64(0)) == -1
    assert index.find(found.shard, np.int64(second), np.int64(0)) == 4


@settings(deadline=None, max_examples=30 if JIT_DISABLED else 200)
@given(st.lists(st.tuples(st.sampled_from(["push", "touch", "unlink"]), st.integers(0, 9)), max_size=50))
def test_the_list_is_a_list(actions):
    meta = np.full((10, layout.META_COLUMNS), 77, np.int32)
    tables = np.full((2, layout.TABLE_COLUMNS), -1, np.int64)
    saving = np.zeros(layout.HEADS + 1, np.int64)
    shard = Index(16).shard._replace(meta=meta, tables=tables, saving=saving)
    rows = []  # oldest first
    for action, row in actions:
        if action == "push" and row not in rows:
            recency.push_newest(shard, 1, np.int64(row))
            rows.append(row)
        elif action == "touch" and row in rows:
            recency.touch(shard, 1, np.int64(row))
            rows.remove(row)
            rows.append(row)
        elif action == "unlink" and row in rows:
            recency.unlink(shard, 1, np.int64(row))
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
