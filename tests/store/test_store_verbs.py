"""What every store does, on every kind of arena."""

import numpy as np
import pytest
from store_cases import contents, group, keys_of, look, peek

from girih import optim
from girih.errors import ConfigError, StorageFullError
from girih.kernels.cpu.jit import JIT_DISABLED
from girih.store import Heap, Store
from girih.tables import LFU, LRU, TTL, Fixed, MinCount, Probability
from reference import DictionaryStore, initial_value, nearest_16

EXTREMES = [0, -1, 1, 2**63 - 1, -(2**63), 2**32]


def test_a_new_key_reads_its_initial_value_and_keeps_its_row(arena):
    spec = group()
    with Store(spec, arena=arena) as store:
        ids, tables = keys_of(*EXTREMES)
        rows, first = look(store, ids, tables, 1)
        again, second = look(store, ids, tables, 2)
        assert sorted(rows) == list(range(len(ids)))
        np.testing.assert_array_equal(rows, again)
        np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(first, [initial_value(spec, 0, i) for i in EXTREMES])
        assert store.num_rows == len(ids)
        assert store.counters()["hits"] == len(ids)


def test_equal_ids_of_two_tables_are_two_keys(arena):
    with Store(group(("a", "b")), arena=arena) as store:
        ids, tables = np.array([7, 7], np.int64), np.array([0, 1], np.int32)
        _, values = look(store, ids, tables, 1)
        assert store.num_rows == 2
        assert (values[0] != values[1]).all()
        store.apply_gradients(ids[:1], tables[:1], None, np.ones((1, 4), np.float32), 1)
        np.testing.assert_array_equal(peek(store, ids, tables)[1], values[1])


def test_peek_changes_nothing(arena):
    with Store(group(eviction=LRU(max_rows=4)), arena=arena) as store:
        ids, tables = keys_of(1, 2, 3)
        look(store, ids, tables, 1)
        before, counters = contents(store), store.counters()
        assert list(store.peek(*keys_of(3, 9, 1), np.empty((3, 4), np.float32)) >= 0) == [True, False, True]
        for name, column in contents(store).items():
            np.testing.assert_array_equal(column, before[name])
        assert store.counters() == counters


def test_a_gradient_moves_its_row_alone(arena):
    with Store(group(), arena=arena) as store:
        ids, tables = keys_of(1, 2, 3)
        rows, values = look(store, ids, tables, 1)
        grads = np.arange(8, dtype=np.float32).reshape(2, 4)
        assert store.apply_gradients(ids[:2], tables[:2], rows[:2], grads, 1, lr_scale=0.5) == 0
        np.testing.assert_array_equal(
            peek(store, ids, tables), values - np.float32(0.25) * np.vstack([grads, np.zeros(4, np.float32)])
        )
        assert contents(store)["versions"].tolist() == [1, 1, 1]


def test_evicted_keys_begin_anew(arena):
    with Store(group(), arena=arena) as store:
        ids, tables = keys_of(5, 6)
        rows, values = look(store, ids, tables, 1)
        store.apply_gradients(ids, tables, rows, np.ones_like(values), 1)
        assert store.evict(*keys_of(5, 99)) == 1
        assert store.num_rows == 1
        rows, after = look(store, ids, tables, 2)
        np.testing.assert_array_equal(after, [values[0], values[1] - np.float32(0.5)])
        assert sorted(rows) == [0, 1]  # the free row was used again


def test_assign_sets_values_and_makes_rows(arena):
    with Store(group(admission=MinCount(count=9)), arena=arena) as store:
        values = np.arange(8, dtype=np.float32).reshape(2, 4)
        store.assign(*keys_of(1, 2), values)
        np.testing.assert_array_equal(peek(store, *keys_of(2, 1)), values[::-1])
        with store.snapshot(since=0) as delta:
            assert delta.num_rows == 2
        assert store.counters()["lookups"] == 0


def test_many_rows_and_rehashes(arena, small_index):
    spec = group(("a", "b"), optimizer=optim.Adagrad(lr=0.1), eviction=LRU(max_rows=15_000))
    model, rng = DictionaryStore(spec), np.random.default_rng(0)
    with Store(spec, arena=arena) as store:
        for step in range(1, 6):
            size = 80 if JIT_DISABLED else 2000
            keys = sorted({(int(i), int(i) % 2) for i in rng.integers(-size, size * 3, size)})
            ids, tables = (np.array(part) for part in zip(*keys, strict=True))
            tables = tables.astype(np.int32)
            rows, values = look(store, ids, tables, step)
            np.testing.assert_array_equal(values, model.lookup(keys, [1] * len(keys), step))
            grads = rng.normal(size=values.shape).astype(np.float32)
            store.apply_gradients(ids, tables, rows, grads, step)
            model.apply_gradients(keys, grads, step)
            gone = [position for position in range(len(keys)) if position % 3 == 0]
            store.evict(ids[gone], tables[gone])
            model.evict([keys[position] for position in gone])
            np.testing.assert_array_equal(peek(store, ids, tables), model.peek(keys))
        assert store.num_rows == sum(map(len, model.tables))
        used = store.memory()
        assert used["index"]["used"] * 3 >= 32 * store.num_rows
        assert all(part["used"] <= part["reserved"] for part in used.values())


def test_lru_evicts_the_least_recently_used(arena):
    with Store(group(eviction=LRU(max_rows=3)), arena=arena) as store:
        for step, ids in enumerate([(1, 2, 3), (1,), (4,), (5, 6)], start=1):
            look(store, *keys_of(*ids), step)
        assert contents(store)["ids"].tolist() == [4, 5, 6]
        assert store.counters()["evicted"] == 3


def test_lru_tables_of_one_store_have_lists_of_their_own(arena):
    with Store(group(("a", "b"), eviction=LRU(max_rows=2)), arena=arena) as store:
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
def test_a_batch_never_evicts_its_own_rows(eviction):
    store = Store(group(eviction=eviction), clock=lambda: 1.7e9)
    rows, values = look(store, *keys_of(1, 2, 3, 4, 5), 1)
    assert (rows >= 0).tolist() == [True, True, True, False, False]
    np.testing.assert_array_equal(values, [initial_value(store.spec, 0, i) for i in range(1, 6)])
    assert store.counters()["full"] == 2
    rows, _ = look(store, *keys_of(7, 2, 3, 1), 2)  # the new key comes first, and all rows are in use
    assert (rows >= 0).tolist() == [False, True, True, True]


def test_other_calls_of_the_same_step_keep_their_rows():
    store = Store(group(eviction=LRU(max_rows=2)))
    look(store, *keys_of(1, 2), 5)
    assert look(store, *keys_of(3), 5)[0].tolist() == [-1]
    assert look(store, *keys_of(3), 4)[0].tolist() == [-1]  # a trainer that is late takes nobody's row either
    assert look(store, *keys_of(3), 6)[0].tolist() != [-1]


def test_last_use_never_goes_back():
    store = Store(group(eviction=TTL(steps=5)))
    look(store, *keys_of(1), 7)
    look(store, *keys_of(1), 3)
    assert contents(store)["last_used"].tolist() == [7]
    assert store.last_step == 7


def test_lfu_evicts_a_sixteenth_of_the_least_counted(arena):
    with Store(group(eviction=LFU(max_rows=32)), arena=arena) as store:
        ids, tables = keys_of(*range(32))
        look(store, ids, tables, 1, counts=[9 - i % 8 for i in range(32)])
        look(store, *keys_of(7), 2)  # 7, 15, 23 and 31 were counted least; 7 was used since
        look(store, *keys_of(100), 3)
        assert sorted(set(range(32)) - set(contents(store)["ids"])) == [15, 23]
        look(store, *keys_of(101), 4)
        assert store.num_rows == 32


def test_ttl_in_steps():
    store = Store(group(eviction=TTL(steps=2)))
    for step, ids in ((1, (1, 2)), (2, (2,)), (3, (9,)), (4, (9,))):
        look(store, *keys_of(*ids), step)
    assert sorted(contents(store)["ids"]) == [2, 9]
    look(store, *keys_of(2), 5)
    assert store.counters() | {"lookups": 0, "updates": 0} == {
        "lookups": 0, "hits": 2, "new": 4, "refused": 0, "full": 0, "evicted": 0, "expired": 2, "updates": 0,
        "dropped": 0,
    }  # fmt: skip


def test_ttl_in_seconds():
    now = [1.7e9]
    store = Store(group(eviction=TTL(seconds=60)), clock=lambda: now[0])
    look(store, *keys_of(1), 1)
    now[0] += 60
    look(store, *keys_of(2), 2)
    assert store.num_rows == 2
    now[0] += 1
    look(store, *keys_of(2), 2)
    assert contents(store)["ids"].tolist() == [2]


def test_min_count_admits_at_the_count(arena):
    with Store(group(admission=MinCount(count=3)), arena=arena) as store:
        for step, count in ((1, 1), (2, 1)):
            rows, values = look(store, *keys_of(4), step, counts=[count])
            assert rows.tolist() == [-1]
            np.testing.assert_array_equal(values[0], initial_value(store.spec, 0, 4))
            assert store.apply_gradients(*keys_of(4), rows, np.ones((1, 4), np.float32), step) == 1
        assert look(store, *keys_of(4), 3)[0].tolist() == [0]
        assert look(store, *keys_of(5), 4, counts=[3])[0].tolist() == [1]
        counters = store.counters()
        assert (counters["refused"], counters["dropped"], counters["new"]) == (2, 2, 2)


def test_probability_admits_about_so_many_and_always_the_same():
    spec = group(admission=Probability(p=0.25))
    num_keys = 400 if JIT_DISABLED else 20_000
    ids, tables = keys_of(*range(num_keys))
    admitted = [look(Store(spec), ids, tables, step)[0] >= 0 for step in (1, 1, 2)]
    np.testing.assert_array_equal(admitted[0], admitted[1])
    assert (admitted[0] != admitted[2]).any()
    assert abs(admitted[0].mean() - 0.25) < 5 * (0.25 * 0.75 / num_keys) ** 0.5
    often = look(Store(spec), ids, tables, 1, counts=np.full(num_keys, 3))[0] >= 0
    assert abs(often.mean() - (1 - 0.75**3)) < 5 * (0.25 / num_keys) ** 0.5


def test_max_rows_is_divided_over_shards():
    store = Store(group(eviction=Fixed(max_rows=10)), shard=1, num_shards=3)
    look(store, *keys_of(*range(20)), 1)
    assert store.num_rows == 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_rows_read_back_as_rounded(dtype):
    spec = group(dim=5, dtype=dtype)
    store = Store(spec)
    ids, tables = keys_of(1, 2)
    _, values = look(store, ids, tables, 1)
    expected = [nearest_16(initial_value(spec, 0, i), dtype) for i in (1, 2)]
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(peek(Store(spec), ids, tables), expected)  # without rows the same
    store.assign(ids, tables, np.full((2, 5), 1 / 3, np.float32))
    np.testing.assert_array_equal(peek(store, ids, tables), nearest_16(np.full((2, 5), 1 / 3), dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_updates_are_right_on_average(dtype):
    num_keys = 100 if JIT_DISABLED else 4000
    store = Store(group(dim=8, dtype=dtype, optimizer=optim.SGD(lr=1.0)))
    ids, tables = keys_of(*range(num_keys))
    store.assign(ids, tables, np.ones((num_keys, 8), np.float32))
    tiny = np.full((num_keys, 8), 1e-4, np.float32)  # far below the spacing of 16-bit floats at 1
    for step in range(1, 6):
        store.apply_gradients(ids, tables, None, tiny, step)
    values = peek(store, ids, tables).astype(np.float64)
    spread = values.std() / values.size**0.5
    assert spread > 0
    assert abs(values.mean() - (1 - 5e-4)) < 5 * spread


def test_16_bit_updates_are_the_same_every_time():
    results = []
    for _ in range(2):
        store = Store(group(dtype="bfloat16"))
        rows, values = look(store, *keys_of(1, 2), 1)
        store.apply_gradients(*keys_of(1, 2), rows, values / 77, 1)
        results.append(peek(store, *keys_of(1, 2)))
    np.testing.assert_array_equal(*results)


def test_a_key_that_comes_twice_gets_one_row():
    store = Store(group())
    rows, values = look(store, *keys_of(3, 3), 1)
    assert rows.tolist() == [0, 0]
    assert store.num_rows == 1
    np.testing.assert_array_equal(values[0], values[1])


def test_no_keys_are_no_trouble(arena):
    with Store(group(eviction=LRU(max_rows=2)), arena=arena) as store:
        ids, tables = keys_of()
        assert len(look(store, ids, tables, 1)[0]) == 0
        assert store.apply_gradients(ids, tables, None, np.empty((0, 4), np.float32), 1) == 0
        assert store.evict(ids, tables) == 0
        store.assign(ids, tables, np.empty((0, 4), np.float32))
        with store.snapshot() as snapshot:
            assert snapshot.num_rows == 0


def test_a_full_reservation_says_how_to_mend_it():
    store = Store(group(), arena=Heap(reserve_rows=10))
    look(store, *keys_of(*range(10)), 1)
    with pytest.raises(StorageFullError, match="10 rows; raise reserve_rows"):
        look(store, *keys_of(11), 2)
    assert store.num_rows == 10
    look(store, *keys_of(*range(10)), 3)  # and it still serves


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": np.array([1], np.int32)}, r"ids: received int32\[1\]; expected int64\[1\]"),
        ({"tables": np.array([1], np.int32)}, "table numbers from 1 to 1; expected 0 to 0"),
        ({"tables": np.array([-1], np.int32)}, "table numbers from -1"),
        ({"tables": np.array([0, 0], np.int32)}, r"tables: received int32\[2\]; expected int32\[1\]"),
        ({"counts": np.array([1], np.int64)}, "counts: received int64"),
        ({"step": 0}, "step = 0: expected 1"),
        ({"step": 2**31}, "step = 2147483648"),
        ({"out": np.empty((1, 3), np.float32)}, r"out: received float32\[1, 3\]"),
        ({"out": np.empty((1, 4), np.float64)}, "out: received float64"),
        ({"out": np.empty((1, 8), np.float32)[:, ::2]}, "out: received"),
    ],
)
def test_wrong_arrays_are_refused(change, message):
    ids, tables = keys_of(1)
    arguments = {"ids": ids, "tables": tables, "counts": None, "step": 1, "out": np.empty((1, 4), np.float32)}
    with pytest.raises(ConfigError, match=message):
        Store(group()).lookup(**(arguments | change))


def test_a_full_table_refuses_assignment_and_names_itself():
    store = Store(group(("users",), eviction=Fixed(max_rows=1)))
    with pytest.raises(ConfigError, match="table 'users': full at 1 rows in this shard; 1 of 2 keys"):
        store.assign(*keys_of(1, 2), np.ones((2, 4), np.float32))


def test_a_closed_store_is_refused():
    store = Store(group())
    store.close()
    with pytest.raises(ConfigError, match="was closed"):
        look(store, *keys_of(1), 1)
