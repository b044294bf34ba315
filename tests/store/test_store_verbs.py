"""What a store in memory does beyond :class:`support.stores.StoreSuite`."""

import numpy as np
import pytest

from girih import optim
from girih.errors import ConfigError, StorageFullError
from girih.kernels.cpu.jit import JIT_DISABLED
from girih.kernels.cpu.update import Terms
from girih.store import Heap, Keys, RowUpdate, Store
from girih.tables import LRU, Probability
from support.fake_store import FakeStore
from support.store_verbs import evict, group, keys_of, look, peek
from support.twins import initial_value, nearest_16

EXTREMES = [0, -1, 1, 2**63 - 1, -(2**63), 2**32]


def test_rows_are_numbered_from_0_and_used_again(arena):
    with Store(group(), arena=arena) as store:
        ids, tables = keys_of(*EXTREMES)
        assert sorted(look(store, ids, tables, 1)[0]) == list(range(len(ids)))
        evict(store, ids[:2], tables[:2])
        assert sorted(look(store, ids, tables, 2)[0]) == list(range(len(ids)))


def test_arrays_that_a_kernel_would_follow_astray_are_refused():
    with Store(group()) as store:
        ids, tables = keys_of(1, 2, 3)
        out = np.empty((3, store.spec.dim), np.float32)
        with pytest.raises(ConfigError, match="addresses: received an array in pieces"):
            store.lookup(Keys(ids, tables), 1, out, np.empty(6, np.int64)[::2])
        rows = store.lookup(Keys(ids, tables), 1, out)
        starts, order, nothing = (
            np.arange(4, dtype=np.int32),
            np.arange(3, dtype=np.int32),
            np.empty(0, np.float32),
        )
        good = Terms(starts, order, nothing, np.empty((0, 0), np.float32))
        for bad in ({"starts": starts[:3]}, {"order": order[:2]}, {"order": order.astype(np.int64)},
                    {"factors": np.ones(2, np.float32)}, {"tail": np.ones((2, 1), np.float32)}):  # fmt: skip
            grads = np.ones((3, store.spec.dim - ("tail" in bad)), np.float32)
            with pytest.raises(ConfigError, match="terms"):
                store.apply_gradients(
                    Keys(ids, tables, rows=rows), RowUpdate(grads, 1, terms=good._replace(**bad))
                )
        assert (
            store.apply_gradients(Keys(ids, tables, rows=rows), RowUpdate(np.ones_like(out), 1, terms=good))
            == 0
        )


def test_many_rows_and_rehashes(arena, small_index):
    spec = group(("a", "b"), optimizer=optim.Adagrad(lr=0.1), eviction=LRU(max_rows=15_000))
    model, rng = FakeStore(spec), np.random.default_rng(0)
    with Store(spec, arena=arena) as store:
        for step in range(1, 6):
            size = 80 if JIT_DISABLED else 2000
            keys = sorted({(int(i), int(i) % 2) for i in rng.integers(-size, size * 3, size)})
            ids, tables = (np.array(part) for part in zip(*keys, strict=True))
            tables = tables.astype(np.int32)
            rows, values = look(store, ids, tables, step)
            np.testing.assert_array_equal(values, look(model, ids, tables, step)[1])
            grads = rng.normal(size=values.shape).astype(np.float32)
            store.apply_gradients(Keys(ids, tables, rows=rows), RowUpdate(grads, step))
            model.apply_gradients(Keys(ids, tables), RowUpdate(grads, step))
            gone = [position for position in range(len(keys)) if position % 3 == 0]
            evict(store, ids[gone], tables[gone])
            evict(model, ids[gone], tables[gone])
            np.testing.assert_array_equal(peek(store, ids, tables), peek(model, ids, tables))
        assert store.num_rows == model.num_rows
        used = store.memory()
        assert used["index"]["used"] * 3 >= 32 * store.num_rows
        assert all(part["used"] <= part["reserved"] for part in used.values())


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_rows_read_back_as_rounded(dtype):
    spec = group(dim=5, dtype=dtype)
    store = Store(spec)
    ids, tables = keys_of(1, 2)
    _, values = look(store, ids, tables, 1)
    expected = [nearest_16(initial_value(spec, 0, i), dtype) for i in (1, 2)]
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(peek(Store(spec), ids, tables), expected)  # without rows the same
    store.assign(Keys(ids, tables), np.full((2, 5), 1 / 3, np.float32))
    np.testing.assert_array_equal(peek(store, ids, tables), nearest_16(np.full((2, 5), 1 / 3), dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_updates_are_right_on_average(dtype):
    num_keys = 100 if JIT_DISABLED else 4000
    store = Store(group(dim=8, dtype=dtype, optimizer=optim.SGD(lr=1.0)))
    ids, tables = keys_of(*range(num_keys))
    store.assign(Keys(ids, tables), np.ones((num_keys, 8), np.float32))
    tiny = np.full((num_keys, 8), 1e-4, np.float32)  # far below the spacing of 16-bit floats at 1
    for step in range(1, 6):
        store.apply_gradients(Keys(ids, tables), RowUpdate(tiny, step))
    values = peek(store, ids, tables).astype(np.float64)
    spread = values.std() / values.size**0.5
    assert spread > 0
    assert abs(values.mean() - (1 - 5e-4)) < 5 * spread


def test_16_bit_updates_are_the_same_every_time():
    results = []
    for _ in range(2):
        store = Store(group(dtype="bfloat16"))
        rows, values = look(store, *keys_of(1, 2), 1)
        store.apply_gradients(Keys(*keys_of(1, 2), rows=rows), RowUpdate(values / 77, 1))
        results.append(peek(store, *keys_of(1, 2)))
    np.testing.assert_array_equal(*results)


def test_a_key_that_comes_twice_gets_one_row():
    store = Store(group())
    rows, values = look(store, *keys_of(3, 3), 1)
    assert rows.tolist() == [0, 0]
    assert store.num_rows == 1
    np.testing.assert_array_equal(values[0], values[1])


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
    of_keys = {name: change[name] for name in ("ids", "tables", "counts") if name in change}
    others = {name: value for name, value in change.items() if name not in of_keys}
    arguments = {"step": 1, "out": np.empty((1, 4), np.float32)} | others
    with pytest.raises(ConfigError, match=message):
        Store(group()).lookup(Keys(*keys_of(1))._replace(**of_keys), **arguments)


def test_a_closed_store_is_refused():
    store = Store(group())
    store.close()
    with pytest.raises(ConfigError, match="was closed"):
        look(store, *keys_of(1), 1)
