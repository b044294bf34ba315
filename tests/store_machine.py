"""A store against a dictionary, over sequences of verbs that hypothesis invents.

A test subclasses :class:`StoreMachine`, says how a store is made, and runs it.
"""

from __future__ import annotations

from typing import ClassVar

import hypothesis.strategies as st
import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from girih import optim
from girih.errors import ConfigError
from girih.kernels.cpu.jit import JIT_DISABLED
from girih.store import GroupSpec, Heap, Keys, RowUpdate, Segment, Store, TableSpec
from girih.tables import LFU, LRU, TTL, Constant, Fixed, MinCount, Normal, Probability, Uniform, Zeros
from support.fake_store import FakeStore
from support.store_verbs import contents, evict, look, read_snapshot, write_snapshot

EXTREMES = [0, -1, 1, 2**63 - 1, -(2**63), 2**32, -(2**32)]
IDS = st.one_of(st.integers(0, 40), st.sampled_from(EXTREMES), st.integers(-(2**63), 2**63 - 1))
KEYS = st.lists(st.tuples(IDS, st.integers(0, 1)), max_size=25, unique=True)
EVICTIONS = [None, Fixed(max_rows=9), LRU(max_rows=7), LFU(max_rows=40), LFU(max_rows=5), TTL(steps=2)]
EVICTIONS += [TTL(seconds=3), TTL(steps=3, max_rows=8), TTL(seconds=4, max_rows=6)]
ADMISSIONS = [None, None, MinCount(count=2, cells=100), MinCount(count=3, cells=5000), Probability(p=0.5)]
SEGMENTS = [
    (Segment("embedding", 3, optim.RowwiseAdagrad(lr=0.1)),),
    (Segment("embedding", 5, optim.Adam(lr=0.1)), Segment("first_order", 1, optim.FTRL(l1=0.05))),
    (
        Segment("embedding", 2, optim.SGD(lr=0.1, momentum=0.9)),
        Segment("first_order", 1, optim.SGD(lr=0.2, l2=0.1)),
    ),
    (Segment("embedding", 4, optim.Adagrad(lr=0.1, initial_accumulator_value=0.5)),),
]
ORDERLESS = [(Segment("embedding", 2, optim.RowwiseAdagrad(lr=0.1)),), *SEGMENTS[1:]]
"""For stores that add the columns of a row in another order: two numbers have but one sum."""
INITIALIZERS = [Normal(std=0.5), Uniform(low=-1, high=1), Zeros(), Constant(value=0.25)]


class Clock:
    def __init__(self):
        self.seconds = 1_800_000_000.5

    def __call__(self):
        return self.seconds


class StoreMachine(RuleBasedStateMachine):
    """``store`` does what ``model`` does."""

    directory: ClassVar = None
    dtypes: ClassVar = ("float32",)
    admissions: ClassVar = ADMISSIONS
    segments: ClassVar = SEGMENTS

    @initialize(data=st.data())
    def begin(self, data):
        segments = data.draw(st.sampled_from(self.segments))
        tables = [
            TableSpec(
                name,
                tuple(data.draw(st.sampled_from(INITIALIZERS)) for _ in segments),
                data.draw(st.sampled_from(self.admissions)),
                data.draw(st.sampled_from(EVICTIONS)),
            )
            for name in ("first", "second")
        ]
        dtype = data.draw(st.sampled_from(self.dtypes))
        self.spec = GroupSpec("group", tuple(tables), segments, dtype, seed=data.draw(st.integers(0, 3)))
        self.clock = Clock()
        self.store = self.new_store()
        self.model = FakeStore(self.spec, clock=self.clock)
        self.step = 1
        self.stale = []

    def new_store(self):
        return Store(self.spec, arena=Heap(reserve_rows=5000), clock=self.clock)

    def arrays(self, keys):
        return np.array([i for i, _ in keys], np.int64), np.array([t for _, t in keys], np.int32)

    def same_read(self, read, *arguments):
        """Reads of both are equal; returns the store's rows."""
        (rows, values), (found, expected) = (read(store, *arguments) for store in (self.store, self.model))
        np.testing.assert_array_equal(values, expected)
        assert (rows >= 0).tolist() == (found >= 0).tolist()
        return rows

    def gradients(self, num_keys, seed):
        shape = (num_keys, self.spec.dim)
        return np.random.default_rng(seed).normal(size=shape).astype(np.float32)

    @rule(
        keys=KEYS,
        passes=st.integers(0, 2),
        late=st.integers(0, 1),
        repeat=st.integers(1, 3),
        seed=st.integers(0, 9),
    )
    def train(self, keys, passes, late, repeat, seed):
        self.step += passes
        step = max(1, self.step - late)
        counts = [1 + (position % repeat) for position in range(len(keys))]
        ids, tables = self.arrays(keys)
        given = None if repeat == 1 else np.array(counts, np.int32)
        rows = self.same_read(look, ids, tables, step, given)
        self.stale.append((keys, rows))
        if seed % 2:
            grads = self.gradients(len(keys), seed)
            dropped = self.store.apply_gradients(
                Keys(ids, tables, rows=rows), RowUpdate(grads, step, lr_scale=seed / 5)
            )
            assert dropped == self.model.apply_gradients(
                Keys(ids, tables), RowUpdate(grads, step, lr_scale=seed / 5)
            )

    @rule(pick=st.integers(0, 5), hint=st.booleans(), seed=st.integers(0, 9))
    def apply_late(self, pick, hint, seed):
        if not self.stale:
            return
        keys, rows = self.stale[-1 - pick % len(self.stale)]
        grads = self.gradients(len(keys), seed)
        dropped = self.store.apply_gradients(
            Keys(*self.arrays(keys), rows=rows if hint else None), RowUpdate(grads, self.step)
        )
        assert dropped == self.model.apply_gradients(Keys(*self.arrays(keys)), RowUpdate(grads, self.step))

    @rule(keys=KEYS)
    def peek(self, keys):
        def read(store, ids, tables):
            out = np.empty((len(keys), self.spec.dim), np.float32)
            return store.peek(Keys(ids, tables), out), out

        self.same_read(read, *self.arrays(keys))

    @rule(keys=KEYS, seed=st.integers(0, 9))
    def assign(self, keys, seed):
        values = self.gradients(len(keys), seed)
        refused = []
        for store in (self.model, self.store):
            try:
                store.assign(Keys(*self.arrays(keys)), values)
                refused.append("")
            except ConfigError as error:
                refused.append(str(error))
        assert refused[0] == refused[1]

    @rule(keys=KEYS)
    def evict(self, keys):
        assert evict(self.store, *self.arrays(keys)) == evict(self.model, *self.arrays(keys))

    @rule(start=st.integers(-(2**62), 2**62), table=st.integers(0, 1))
    def grow(self, start, table):
        keys = [(start + i, table) for i in range(40 if JIT_DISABLED else 150)]
        self.same_read(look, *self.arrays(keys), self.step)

    @rule(seconds=st.integers(0, 3))
    def wait(self, seconds):
        self.clock.seconds += seconds

    @rule()
    def save_and_load(self):
        path = self.directory / "shard.safetensors"
        write_snapshot(self.store, path)
        counters = self.store.counters()
        self.store = self.new_store()
        self.store.restore([read_snapshot(path)])
        assert self.store.counters() == counters

    @invariant()
    def same_rows(self):
        if not hasattr(self, "store"):
            return
        columns = contents(self.store)
        for table, rows in enumerate(self.model.tables):
            assert self.store.num_rows_of(table) == len(rows)
            own, ids = columns["tables"] == table, list(rows)
            mine = {name: column[own] for name, column in columns.items()}
            eviction = self.spec.tables[table].eviction
            if eviction is None or eviction.name == "none":  # rows lie in no order that matters
                order, ids = np.argsort(mine["ids"]), sorted(ids)
                mine = {name: column[order] for name, column in mine.items()}
            assert mine["ids"].tolist() == ids
            if ids:
                self.same_columns([rows[key_id] for key_id in ids], mine)
        assert self.store.counters() == self.model.counters()
        assert self.store.num_rows == self.model.num_rows

    def same_columns(self, rows, columns):
        """Whole columns at once: a comparison for each row took most of the time."""
        assert columns["last_used"].tolist() == [row.last_used for row in rows]
        assert columns["counts"].tolist() == [row.count for row in rows]
        assert columns["versions"].tolist() == [row.version for row in rows]
        for number, segment, place in self.model.segments():
            if self.spec.dtype == "float32":
                values = np.stack([row.value[place] for row in rows])
                np.testing.assert_array_equal(columns[segment.name].reshape(len(rows), -1), values)
            for name in rows[0].state[number]:
                values = np.stack([row.state[number][name] for row in rows])
                found = columns[f"{segment.name}.{name}"].reshape(len(rows), -1)
                np.testing.assert_allclose(found, values, rtol=1e-6, atol=1e-7)
