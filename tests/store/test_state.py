"""The seam below the store: what a tier, and a repair after a crash, are written against."""

import time

import numpy as np

from girih import optim
from girih.kernels.cpu import layout
from girih.store import Heap, Keys, RowUpdate, Store
from girih.store.snapshot.columns import META, value_columns
from girih.store.state import open_state
from girih.tables import LRU
from support.store_verbs import MemorySnapshot, by_key, group, look, peek, train

SPEC = group(("a", "b"), optimizer=optim.Adagrad(lr=0.1), eviction=LRU(max_rows=10_000))


class TwoTiers:
    """Keeps rows of positive ids in its own memory, all others in another store."""

    def __init__(self, spec, cold):
        self.spec, self.cold = spec, cold
        self.hot = open_state(spec, 0, 1, Heap(reserve_rows=1000), time.time)

    def lookup(self, keys, step, out, addresses=None):
        ids, tables, counts, _ = keys
        rows = np.empty(len(ids), np.int32)
        for tier, part in ((self.hot, ids > 0), (self.cold, ids <= 0)):
            found = np.empty((part.sum(), self.spec.dim), np.float32)
            rows[part] = tier.lookup(Keys(ids[part], tables[part], counts[part]), step, found)
            out[part] = found
        return rows

    def peek(self, keys, out, addresses=None):
        ids, tables, *_ = keys
        rows = np.empty(len(ids), np.int32)
        for tier, part in ((self.hot, ids > 0), (self.cold, ids <= 0)):
            found = np.empty((part.sum(), self.spec.dim), np.float32)
            rows[part] = tier.peek(Keys(ids[part], tables[part]), found)
            out[part] = found
        return rows

    def apply_gradients(self, keys, change):
        ids, tables, _, rows = keys
        return sum(
            tier.apply_gradients(
                Keys(ids[part], tables[part], rows=rows[part]), change._replace(grads=change.grads[part])
            )
            for tier, part in ((self.hot, ids > 0), (self.cold, ids <= 0))
        )


def test_a_tier_over_another_store_moves_rows_as_one_store_does():
    one, cold = Store(SPEC), Store(SPEC)
    tier, rng = TwoTiers(SPEC, cold), np.random.default_rng(0)
    for step in range(1, 6):
        ids = np.unique(rng.integers(-50, 50, 60))
        tables, counts = (ids % 2).astype(np.int32), np.ones(len(ids), np.int32)
        grads = rng.normal(size=(len(ids), 4)).astype(np.float32)
        for store in (one, tier):
            rows, _ = look(store, ids, tables, step, counts)
            store.apply_gradients(Keys(ids, tables, rows=rows), RowUpdate(grads, step, 1.0))
        np.testing.assert_array_equal(peek(one, ids, tables), peek(tier, ids, tables))
    assert one.num_rows == cold.num_rows + tier.hot.memory.num_rows
    assert cold.num_rows > 0


def test_rows_alone_say_enough_to_make_index_and_lists_anew():
    store = train(Store(SPEC, arena=Heap(reserve_rows=1000)))
    expected, last_step = by_key(store), store.last_step
    state = store.state
    arrays, own = state.memory.arrays, state.layout
    arrays.slots[:] = 0  # torn
    arrays.tables[:, [layout.NEWEST, layout.OLDEST]] = 12345
    arrays.meta[:, [layout.NEWER, layout.OLDER]] = 12345
    live = np.flatnonzero(arrays.meta[: arrays.state[layout.ROWS_EVER], layout.TABLE] >= 0)
    columns = {"ids": arrays.keys[live, 0], **{name: arrays.meta[live, word] for name, word in META.items()}}
    for column in value_columns(own.description):
        first = column.first_byte // 4
        columns[column.name] = arrays.values[live, first : first + column.width]
    counters = [state.memory.counters(table) for table in range(len(SPEC.tables))]
    found = {"linked": False, "last_step": last_step, "counters": counters}
    repaired = Store(SPEC)
    repaired.restore([MemorySnapshot({**own.description, **found}, columns, {})])
    assert by_key(repaired) == expected
    assert repaired.counters() == store.counters()
    train(repaired, range(6, 9))
