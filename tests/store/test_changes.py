"""What changed in a shard since a moment: whoever applies it has the rows of the store, whatever came and left in between."""

import numpy as np
import pytest

from girih.errors import ConfigError, StorageFullError
from girih.kernels.cpu.jit import JIT_DISABLED
from girih.store import Heap, Keys, RowUpdate, Store, Tiers, changes
from girih.store.memory import shard_memory
from girih.tables import LFU, LRU, TTL, MinCount
from support.store_verbs import evict, group, keys_of, look, peek, taken, train

RULES = {
    "nobody leaves": {},
    "lru": {"eviction": LRU(max_rows=40)},
    "lfu": {"eviction": LFU(max_rows=40)},
    "ttl": {"eviction": TTL(steps=2)},
    "lru of counted keys": {"eviction": LRU(max_rows=30), "admission": MinCount(count=2, cells=2000)},
}


class Mirror:
    """Rows as a follower has them, by key."""

    def __init__(self):
        self.rows, self.left = {}, 0

    def apply(self, found):
        keys = list(zip(found.tables.tolist(), found.ids.tolist(), strict=True))
        gone = list(zip(found.left_tables.tolist(), found.left_ids.tolist(), strict=True))
        assert len({*keys, *gone}) == len(keys) + len(gone)  # each key once, with a row or without
        for key in gone:
            self.left += key in self.rows
            self.rows.pop(key, None)
        self.rows |= {key: row.tobytes() for key, row in zip(keys, found.rows, strict=True)}


def rows_of(store):
    columns = taken(store).columns
    keys = zip(columns["tables"].tolist(), columns["ids"].tolist(), strict=True)
    return {key: row.tobytes() for key, row in zip(keys, columns["embedding"], strict=True)}


def step_on(store, rng, step):
    ids = np.unique(rng.integers(-60, 60, 25))
    tables = (ids % 2).astype(np.int32)
    rows, values = look(store, ids, tables, step)
    if rng.random() < 0.8:  # a refused step reads and moves nothing
        store.apply_gradients(
            Keys(ids, tables, rows=rows), RowUpdate(rng.normal(size=values.shape).astype(np.float32), step)
        )


@pytest.mark.parametrize("dtype", ["float32"] if JIT_DISABLED else ["float32", "bfloat16"])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("tiered", [False, True], ids=["dram", "dram and ssd"])
def test_a_mirror_of_all_changes_has_the_rows_of_the_store(tmp_path, dtype, rules, tiered):
    tiers = Tiers(directory=tmp_path, hot_rows=20, warm_up_steps=2, flush_every_steps=2) if tiered else None
    rng, mirror = np.random.default_rng(7), Mirror()
    spec = group(("a", "b"), dtype=dtype, **rules)
    with Store(spec, arena=Heap(reserve_rows=20_000), tiers=tiers) as store:
        store.note_changes(0)
        number, since = 0, 0
        for step in range(1, 80):
            step_on(store, rng, step)
            if rng.random() < 0.3:
                if rng.random() < 0.5:  # a checkpoint is being written meanwhile
                    with store.snapshot(tmp_path) as snapshot:
                        found = store.changes_since(since)
                        assert snapshot.num_rows == store.num_rows
                else:
                    found = store.changes_since(since)
                number += 1
                store.note_changes(number)
                since = number
                mirror.apply(found)
                assert mirror.rows == rows_of(store)
        assert number > 10
        assert (mirror.left > 10) == ("eviction" in rules)


def test_a_key_that_left_and_came_back_is_a_row_and_one_that_came_and_left_is_not():
    with Store(group(("t",))) as store:
        look(store, *keys_of(1, 2, 3), 1)
        store.note_changes(5)
        evict(store, *keys_of(1, 2))
        look(store, *keys_of(1, 9), 2)
        evict(store, *keys_of(9))
        evict(store, *keys_of(1))
        look(store, *keys_of(1), 3)
        found = store.changes_since(5)
        assert found.ids.tolist() == [1]
        assert sorted(found.left_ids.tolist()) == [2, 9]
        assert np.array_equal(found.rows, peek(store, *keys_of(1)))


def test_what_is_read_alone_is_no_change_and_what_is_assigned_is():
    with Store(group(("t",))) as store:
        train(store, range(1, 3))
        store.note_changes(1)
        ids = taken(store).columns["ids"][:4]
        look(store, ids, np.zeros(4, np.int32), 3)
        peek(store, ids, np.zeros(4, np.int32))
        assert not len(store.changes_since(1).ids)
        store.assign(Keys(ids[:2], np.zeros(2, np.int32)), np.ones((2, 4), np.float32))
        found = store.changes_since(1)
        assert sorted(found.ids.tolist()) == sorted(ids[:2].tolist())
        assert (found.rows == 1).all()


def test_notes_hold_while_rows_and_index_grow():
    with Store(group(("t",))) as store:
        store.note_changes(0)
        look(store, np.arange(30_000), np.zeros(30_000, np.int32), 1)
        found = store.changes_since(0)
        assert np.array_equal(np.sort(found.ids), np.arange(30_000))


def test_notes_have_room_for_every_row_that_a_store_can_hold():
    with Store(group(("t",)), arena=Heap(reserve_rows=1003)) as store:
        store.note_changes(0)
        look(store, np.arange(1003), np.zeros(1003, np.int32), 1)
        assert np.array_equal(np.sort(store.changes_since(0).ids), np.arange(1003))
        with pytest.raises(StorageFullError, match="reserved for 1,003 rows"):
            look(store, *keys_of(1003), 2)
        assert np.array_equal(np.sort(store.changes_since(0).ids), np.arange(1003))


def test_changes_are_known_since_the_last_moment_alone():
    with Store(group(("t",))) as store:
        assert not store.knows_changes(0)
        store.note_changes(3)
        assert store.knows_changes(3)
        assert not store.knows_changes(2)
        with pytest.raises(ConfigError, match="changes since 2 are not known; take a snapshot"):
            store.changes_since(2)
        store.restore([taken(store)])
        assert not store.knows_changes(3)


def test_more_keys_that_left_than_there_is_room_for_are_not_known(monkeypatch):
    monkeypatch.setattr(shard_memory, "MOST_LEFT", 3)
    with Store(group(("t",))) as store:
        look(store, *keys_of(*range(10)), 1)
        store.note_changes(0)
        evict(store, *keys_of(0, 1, 2))
        assert sorted(store.changes_since(0).left_ids.tolist()) == [0, 1, 2]
        evict(store, *keys_of(3))
        assert not store.knows_changes(0)
        store.note_changes(1)
        evict(store, *keys_of(4))
        assert store.changes_since(1).left_ids.tolist() == [4]


def test_more_changes_than_memory_is_to_hold_are_not_known(monkeypatch):
    monkeypatch.setattr(changes, "MOST_BYTES", 28 * 5)
    with Store(group(("t",))) as store:
        store.note_changes(0)
        look(store, *keys_of(*range(5)), 1)
        assert store.knows_changes(0)
        look(store, *keys_of(5), 2)
        assert not store.knows_changes(0)
