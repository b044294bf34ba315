"""The conformance suite of stores: what every store must do, whatever keeps its rows.

A test module subclasses :class:`StoreSuite` and says how a store is made.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from girih import optim
from girih.errors import CheckpointError, ConfigError
from girih.store import GroupSpec, Keys, RowUpdate, shard_of
from girih.tables import LFU, LRU, TTL, Fixed, MinCount, Probability
from support.fake_store import FakeStore
from support.store_verbs import (
    NUM_IDS,
    AnyStore,
    by_key,
    contents,
    evict,
    group,
    keys_of,
    look,
    peek,
    taken,
    train,
    two_segments,
)
from support.twins import initial_value

EXTREMES = [0, -1, 1, 2**63 - 1, -(2**63), 2**32]


class StoreSuite:
    """Tests of one kind of store.

    Attributes:
        cells: of the filters of rules that count; many where keys of one call do not see what others of it add to shared cells.
        sums_in_order: whether the columns of a row are added from the first to the last; else those that are have two of them.
    """

    cells = 500
    sums_in_order = True

    def make(self, spec: GroupSpec, **where: Any) -> AnyStore:
        """A new, empty store; ``where`` may be ``shard``, ``num_shards`` and ``clock``."""
        raise NotImplementedError

    def take(self, store: AnyStore) -> Any:
        """A source to restore from: all rows of a store."""
        return taken(store)

    @pytest.mark.parametrize(
        "rules",
        [
            {},
            {"eviction": LRU(max_rows=30), "admission": MinCount(count=2, cells=500)},
            {"eviction": LFU(max_rows=40), "admission": Probability(p=0.5)},
            {"eviction": TTL(steps=2)},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("optimizer", [optim.Adam(lr=0.1), optim.RowwiseAdagrad(lr=0.1)], ids=repr)
    def test_gradients_move_rows_as_the_plain_twin_says(self, optimizer: Any, rules: Any) -> None:
        if isinstance(rules.get("admission"), MinCount):
            rules = {**rules, "admission": MinCount(count=2, cells=self.cells)}
        dim = 4 if self.sums_in_order else 2
        spec = group(("a", "b"), dim, optimizer, **rules)
        model, rng = FakeStore(spec), np.random.default_rng(0)
        with self.make(spec) as store:
            for step in range(1, 7):
                ids = np.unique(rng.integers(-20, 40, 30))
                tables, counts = (ids % 2).astype(np.int32), (1 + ids % 3).astype(np.int32)
                grads = rng.normal(size=(len(ids), dim)).astype(np.float32)
                results = []
                for each in (store, model):
                    rows, values = look(each, ids, tables, step, counts)
                    dropped = each.apply_gradients(
                        Keys(ids, tables, rows=rows), RowUpdate(grads, step, lr_scale=step / 3)
                    )
                    gone = evict(each, ids[::7], tables[::7])
                    results.append((values.tolist(), (rows >= 0).tolist(), dropped, gone))
                assert results[0] == results[1]
                np.testing.assert_array_equal(peek(store, ids, tables), peek(model, ids, tables))
            assert store.counters() == model.counters()

    @pytest.mark.parametrize(
        "eviction", [None, LRU(max_rows=30), LFU(max_rows=30), TTL(steps=2), Fixed(max_rows=9)], ids=str
    )
    def test_a_restored_store_is_the_same_and_goes_on_the_same(self, eviction: Any) -> None:
        spec = two_segments(eviction=eviction, admission=MinCount(count=2, cells=500))
        store, restored = train(self.make(spec)), self.make(spec)
        restored.restore([self.take(store)])
        for steps in ((), range(6, 9)):
            for each in (store, restored):
                train(each, steps)
            assert by_key(store) == by_key(restored)
            assert (store.counters(), store.last_step) == (restored.counters(), restored.last_step)
            if eviction is not None and eviction.name != "none":
                lists = [contents(s)["ids"][contents(s)["tables"] == 0].tolist() for s in (store, restored)]
                assert lists[0] == lists[1]

    def test_a_new_key_reads_its_initial_value_and_keeps_its_row(self) -> None:
        spec = group()
        with self.make(spec) as store:
            ids, tables = keys_of(*EXTREMES)
            rows, first = look(store, ids, tables, 1)
            again, second = look(store, ids, tables, 2)
            assert (rows >= 0).all()
            np.testing.assert_array_equal(rows, again)
            np.testing.assert_array_equal(first, second)
            np.testing.assert_array_equal(first, [initial_value(spec, 0, i) for i in EXTREMES])
            assert store.num_rows == len(ids)
            assert store.counters()["hits"] == len(ids)

    def test_equal_ids_of_two_tables_are_two_keys(self) -> None:
        with self.make(group(("a", "b"))) as store:
            ids, tables = np.array([7, 7], np.int64), np.array([0, 1], np.int32)
            _, values = look(store, ids, tables, 1)
            assert store.num_rows == 2
            assert (values[0] != values[1]).all()
            store.apply_gradients(Keys(ids[:1], tables[:1]), RowUpdate(np.ones((1, 4), np.float32), 1))
            np.testing.assert_array_equal(peek(store, ids, tables)[1], values[1])

    def test_peek_changes_nothing(self) -> None:
        with self.make(group(eviction=LRU(max_rows=4))) as store:
            ids, tables = keys_of(1, 2, 3)
            look(store, ids, tables, 1)
            before, counters = contents(store), store.counters()
            assert list(store.peek(Keys(*keys_of(3, 9, 1)), np.empty((3, 4), np.float32)) >= 0) == [
                True,
                False,
                True,
            ]
            for name, column in contents(store).items():
                np.testing.assert_array_equal(column, before[name])
            assert store.counters() == counters

    def test_a_gradient_moves_its_row_alone(self) -> None:
        with self.make(group()) as store:
            ids, tables = keys_of(1, 2, 3)
            rows, values = look(store, ids, tables, 1)
            grads = np.arange(8, dtype=np.float32).reshape(2, 4)
            assert (
                store.apply_gradients(
                    Keys(ids[:2], tables[:2], rows=rows[:2]), RowUpdate(grads, 1, lr_scale=0.5)
                )
                == 0
            )
            np.testing.assert_array_equal(
                peek(store, ids, tables),
                values - np.float32(0.25) * np.vstack([grads, np.zeros(4, np.float32)]),
            )
            assert contents(store)["versions"].tolist() == [1, 1, 1]

    def test_evicted_keys_begin_anew(self) -> None:
        with self.make(group()) as store:
            ids, tables = keys_of(5, 6)
            rows, values = look(store, ids, tables, 1)
            store.apply_gradients(Keys(ids, tables, rows=rows), RowUpdate(np.ones_like(values), 1))
            assert evict(store, *keys_of(5, 99)) == 1
            assert store.num_rows == 1
            rows, after = look(store, ids, tables, 2)
            np.testing.assert_array_equal(after, [values[0], values[1] - np.float32(0.5)])
            assert (rows >= 0).all()

    def test_assign_sets_values_and_makes_rows(self) -> None:
        with self.make(group(admission=MinCount(count=9))) as store:
            values = np.arange(8, dtype=np.float32).reshape(2, 4)
            store.assign(Keys(*keys_of(1, 2)), values)
            np.testing.assert_array_equal(peek(store, *keys_of(2, 1)), values[::-1])
            assert store.num_rows == 2
            assert store.counters()["lookups"] == 0

    def test_lru_evicts_the_least_recently_used(self) -> None:
        with self.make(group(eviction=LRU(max_rows=3))) as store:
            for step, ids in enumerate([(1, 2, 3), (1,), (4,), (5, 6)], start=1):
                look(store, *keys_of(*ids), step)
            assert contents(store)["ids"].tolist() == [4, 5, 6]
            assert store.counters()["evicted"] == 3

    def test_lru_tables_of_one_store_have_lists_of_their_own(self) -> None:
        with self.make(group(("a", "b"), eviction=LRU(max_rows=2))) as store:
            look(store, *keys_of(1, 2, table=0), 1)
            look(store, *keys_of(1, 2, table=1), 2)
            look(store, *keys_of(3, table=1), 3)
            assert [store.num_rows_of(t) for t in (0, 1)] == [2, 2]
            np.testing.assert_array_equal(contents(store)["ids"], [1, 2, 2, 3])

    @pytest.mark.parametrize(
        "eviction",
        [
            Fixed(max_rows=3),
            LRU(max_rows=3),
            LFU(max_rows=3),
            TTL(steps=9, max_rows=3),
            TTL(seconds=9, max_rows=3),
        ],
    )
    def test_a_batch_never_evicts_its_own_rows(self, eviction: Any) -> None:
        store = self.make(group(eviction=eviction), clock=lambda: 1.7e9)
        rows, values = look(store, *keys_of(1, 2, 3, 4, 5), 1)
        assert (rows >= 0).tolist() == [True, True, True, False, False]
        np.testing.assert_array_equal(values, [initial_value(store.spec, 0, i) for i in range(1, 6)])
        assert store.counters()["full"] == 2
        rows, _ = look(store, *keys_of(7, 2, 3, 1), 2)  # the new key comes first, and all rows are in use
        assert (rows >= 0).tolist() == [False, True, True, True]

    def test_other_calls_of_the_same_step_keep_their_rows(self) -> None:
        store = self.make(group(eviction=LRU(max_rows=2)))
        look(store, *keys_of(1, 2), 5)
        assert look(store, *keys_of(3), 5)[0].tolist() == [-1]
        assert look(store, *keys_of(3), 4)[0].tolist() == [
            -1
        ]  # a trainer that is late takes nobody's row either
        assert look(store, *keys_of(3), 6)[0][0] >= 0

    def test_last_use_never_goes_back(self) -> None:
        store = self.make(group(eviction=TTL(steps=5)))
        look(store, *keys_of(1), 7)
        look(store, *keys_of(1), 3)
        assert contents(store)["last_used"].tolist() == [7]
        assert store.last_step == 7

    def test_lfu_evicts_a_sixteenth_of_the_least_counted(self) -> None:
        with self.make(group(eviction=LFU(max_rows=32))) as store:
            ids, tables = keys_of(*range(32))
            look(store, ids, tables, 1, counts=[9 - i % 8 for i in range(32)])
            look(store, *keys_of(7), 2)  # 7, 15, 23 and 31 were counted least; 7 was used since
            look(store, *keys_of(100), 3)
            assert sorted(set(range(32)) - set(contents(store)["ids"])) == [15, 23]
            look(store, *keys_of(101), 4)
            assert store.num_rows == 32

    def test_ttl_in_steps(self) -> None:
        store = self.make(group(eviction=TTL(steps=2)))
        for step, ids in enumerate([(1, 2), (2,), (9,), (9,)], start=1):
            look(store, *keys_of(*ids), step)
        assert sorted(contents(store)["ids"]) == [2, 9]
        look(store, *keys_of(2), 5)
        assert store.counters() | {"lookups": 0, "updates": 0} == {
            "lookups": 0, "hits": 2, "new": 4, "refused": 0, "full": 0, "evicted": 0, "expired": 2, "updates": 0,
            "dropped": 0,
        }  # fmt: skip

    def test_ttl_in_seconds(self) -> None:
        now = [1.7e9]
        store = self.make(group(eviction=TTL(seconds=60)), clock=lambda: now[0])
        look(store, *keys_of(1), 1)
        now[0] += 60
        look(store, *keys_of(2), 2)
        assert store.num_rows == 2
        now[0] += 1
        look(store, *keys_of(2), 2)
        assert contents(store)["ids"].tolist() == [2]

    def test_min_count_admits_at_the_count(self) -> None:
        with self.make(group(admission=MinCount(count=3))) as store:
            for step, count in ((1, 1), (2, 1)):
                rows, values = look(store, *keys_of(4), step, counts=[count])
                assert rows.tolist() == [-1]
                np.testing.assert_array_equal(values[0], initial_value(store.spec, 0, 4))
                assert (
                    store.apply_gradients(
                        Keys(*keys_of(4), rows=rows), RowUpdate(np.ones((1, 4), np.float32), step)
                    )
                    == 1
                )
            assert look(store, *keys_of(4), 3)[0][0] >= 0
            assert look(store, *keys_of(5), 4, counts=[3])[0][0] >= 0
            counters = store.counters()
            assert (counters["refused"], counters["dropped"], counters["new"]) == (2, 2, 2)

    def test_max_rows_is_divided_over_shards(self) -> None:
        store = self.make(group(eviction=Fixed(max_rows=10)), shard=1, num_shards=3)
        look(store, *keys_of(*range(20)), 1)
        assert store.num_rows == 4

    def test_a_full_table_refuses_assignment_and_names_itself(self) -> None:
        store = self.make(group(("users",), eviction=Fixed(max_rows=1)))
        with pytest.raises(ConfigError, match="table 'users': full at 1 rows in this shard; 1 of 2 keys"):
            store.assign(Keys(*keys_of(1, 2)), np.ones((2, 4), np.float32))

    def test_no_keys_are_no_trouble(self) -> None:
        with self.make(group(eviction=LRU(max_rows=2))) as store:
            ids, tables = keys_of()
            assert len(look(store, ids, tables, 1)[0]) == 0
            assert store.apply_gradients(Keys(ids, tables), RowUpdate(np.empty((0, 4), np.float32), 1)) == 0
            assert evict(store, ids, tables) == 0
            store.assign(Keys(ids, tables), np.empty((0, 4), np.float32))
            with store.snapshot() as snapshot:
                assert snapshot.num_rows == 0

    @pytest.mark.parametrize(("before", "after"), [(1, 4), (3, 1), (3, 4), (4, 2)])
    def test_any_number_of_shards_restores_on_any_other(self, before: int, after: int) -> None:
        spec = two_segments(eviction=LRU(max_rows=10**6), admission=MinCount(count=2, cells=20_000))
        old = [train(self.make(spec, shard=shard, num_shards=before)) for shard in range(before)]
        sources = [self.take(store) for store in old]
        new = [self.make(spec, shard=shard, num_shards=after) for shard in range(after)]
        for store in new:
            store.restore(sources)
            columns = contents(store)
            assert (shard_of(columns["ids"], columns["tables"], after) == store.shard).all()
            listed = columns["tables"] == 0
            assert (np.diff(columns["last_used"][listed]) >= 0).all()
        assert by_key(*old) == by_key(*new)
        totals = [
            {k: sum(s.counters()[k] for s in stores) for k in old[0].counters()} for stores in (old, new)
        ]
        assert totals[0] == totals[1]

    def test_min_count_is_remembered_over_a_change_of_shards(self) -> None:
        spec = group(admission=MinCount(count=2, cells=50_000))
        ids, tables = keys_of(*range(NUM_IDS))
        old = []
        for shard in range(3):
            mine = shard_of(ids, tables, 3) == shard
            old.append(self.make(spec, shard=shard, num_shards=3))
            look(old[-1], ids[mine], tables[mine], 1)
        for shard in range(2):
            store = self.make(spec, shard=shard, num_shards=2)
            store.restore([self.take(o) for o in old])
            mine = shard_of(ids, tables, 2) == shard
            assert (look(store, ids[mine], tables[mine], 2)[0] >= 0).all()
            fresh = np.arange(NUM_IDS, 2 * NUM_IDS)
            fresh = fresh[shard_of(fresh, np.zeros(NUM_IDS, np.int32), 2) == shard]
            assert (look(store, fresh, np.zeros(len(fresh), np.int32), 3)[0] >= 0).mean() < 0.05

    def test_lists_of_several_shards_merge_by_last_use_then_by_source(self) -> None:
        spec = group(eviction=LRU(max_rows=100))
        stores = [self.make(spec), self.make(spec)]
        reads: list[tuple[int, tuple[int, ...]]] = [(0, (1, 2)), (1, (3, 4)), (0, (2,)), (1, (5,))]
        for step, (number, ids) in enumerate(reads, start=1):
            look(stores[number], *keys_of(*ids), min(step, 3))
        merged = self.make(spec)
        merged.restore([self.take(store) for store in stores])
        assert contents(merged)["ids"].tolist() == [1, 3, 4, 2, 5]

    @pytest.mark.parametrize("eviction", [LRU(max_rows=10), LFU(max_rows=10), TTL(steps=99, max_rows=10)])
    def test_more_rows_than_a_table_may_have_are_evicted_on_restore(self, eviction: Any) -> None:
        spec = group(eviction=eviction)
        parts = []
        for shard in range(3):
            store = self.make(spec, shard=shard, num_shards=3)
            for step in range(1, 5):
                look(store, *keys_of(100 * shard + step), step, counts=[9 - step])
            parts.append(store)
        one = self.make(spec)
        one.restore([self.take(store) for store in parts])
        gone = {4, 104} if eviction.name == "lfu" else {1, 101}
        everything = {100 * shard + step for shard in range(3) for step in range(1, 5)}
        assert set(contents(one)["ids"]) == everything - gone

    def test_table_numbers_are_mapped_by_name(self) -> None:
        spec = group(("a", "b"), eviction=LRU(max_rows=99))
        turned = group(("b", "a"), eviction=LRU(max_rows=99))
        store, other = train(self.make(spec)), self.make(turned)
        other.restore([self.take(store)])
        assert by_key(store) == by_key(other)
        assert store.counters(0) == other.counters(1)

    def test_a_table_that_no_source_has_is_refused(self) -> None:
        with pytest.raises(CheckpointError, match="table 'tags' is missing"):
            self.make(group(("users", "tags"))).restore([self.take(self.make(group(("users",))))])
        with pytest.raises(CheckpointError, match="no snapshot: table 't' is missing"):
            self.make(group()).restore([])
