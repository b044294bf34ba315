"""An index that began to grow comes to an end, whatever is asked of its store meanwhile."""

import numpy as np
import pytest

import girih
from girih.errors import StorageFullError
from girih.kernels.cpu import layout
from girih.store import Keys, Store
from girih.store.spec import GroupSpec, Segment, TableSpec
from girih.tables import Normal

DIM = 4


def growing_store():
    """A store in the middle of it, and its keys."""
    table, segment = (
        TableSpec("t", (Normal(),), None, None),
        Segment("embedding", DIM, girih.optim.SGD(lr=1.0)),
    )
    store = Store(GroupSpec("g", (table,), (segment,)))
    ids = np.zeros(0, np.int64)
    while not (
        store.state.memory.arrays.state[layout.GROWING] and len(store.state.memory.arrays.slots) >= 1 << 12
    ):
        new = np.arange(len(ids), len(ids) + 16) * 7919
        read(store, new)
        ids = np.concatenate([ids, new])
    return store, ids


def read(store, ids):
    out = np.empty((len(ids), DIM), np.float32)
    rows = store.lookup(Keys(ids, np.zeros(len(ids), np.int32)), 1, out)
    return rows, out


def test_reads_of_known_keys_end_it():
    store, ids = growing_store()
    num_slots = len(store.state.memory.arrays.slots)
    before = read(store, ids)
    reads = 0
    while store.state.memory.arrays.state[layout.GROWING]:
        read(store, ids[reads % len(ids) :][:100])
        reads += 1
        assert reads < num_slots // 100
    assert len(store.state.memory.arrays.slots) == 2 * num_slots
    for one, other in zip(before, read(store, ids), strict=True):
        np.testing.assert_array_equal(one, other)
    unknown = np.array([-1, -2])
    assert (store.peek(Keys(unknown, np.zeros(2, np.int32)), np.empty((2, DIM), np.float32)) == -1).all()


def test_reading_goes_on_where_memory_ends(monkeypatch):
    store, ids = growing_store()
    before = read(store, ids)

    def full():
        raise StorageFullError("no memory left")

    monkeypatch.setattr(store.state.memory, "grow_index", full)
    while (
        store.state.memory.arrays.state[layout.GROW_MOVED]
        < store.state.memory.arrays.state[layout.GROW_CLAIMED]
    ):
        read(store, ids)
    for _ in range(3):
        for one, other in zip(before, read(store, ids), strict=True):
            np.testing.assert_array_equal(one, other)
    with pytest.raises(StorageFullError, match="no memory left"):
        read(store, np.arange(-1000, 0))
