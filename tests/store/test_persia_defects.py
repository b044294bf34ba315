"""Named regressions: defects of PERSIA's embedding servers that this store must not have."""

import numpy as np
import pytest

from girih import optim
from girih.errors import CheckpointError
from girih.store import Keys, RowUpdate, Store
from girih.tables import LRU, MinCount
from support.store_verbs import evict, group, keys_of, look, peek, read_snapshot, write_snapshot


def test_persia_defect_1_a_row_evicted_between_forward_and_backward_shifts_no_gradient():
    store = Store(group(eviction=LRU(max_rows=3)))
    ids, tables = keys_of(1, 2, 3)
    rows, _ = look(store, ids, tables, 1)
    look(store, *keys_of(2, 3), 2)
    thief, _ = look(store, *keys_of(4), 2)  # takes the row of 1
    assert thief[0] == rows[0]
    before = peek(store, *keys_of(4, 2, 3))
    grads = np.array([[100] * 4, [2] * 4, [3] * 4], np.float32)
    assert store.apply_gradients(Keys(ids, tables, rows=rows), RowUpdate(grads, 3)) == 1
    moved = before - peek(store, *keys_of(4, 2, 3))
    np.testing.assert_allclose(moved, [[0] * 4, [1] * 4, [1.5] * 4], atol=1e-6)
    assert store.counters()["dropped"] == 1


def test_persia_defect_1_a_row_that_was_not_admitted_shifts_no_gradient():
    store = Store(group(admission=MinCount(count=2)))
    look(store, *keys_of(1, 3), 1)
    ids, tables = keys_of(1, 2, 3)
    rows, before = look(store, ids, tables, 2)
    assert rows[1] == -1
    grads = np.array([[2] * 4, [100] * 4, [4] * 4], np.float32)
    assert store.apply_gradients(Keys(ids, tables, rows=rows), RowUpdate(grads, 2)) == 1
    np.testing.assert_allclose(before - peek(store, ids, tables), [[1] * 4, [0] * 4, [2] * 4], atol=1e-6)


def test_persia_defect_1_any_hint_at_all_is_checked():
    store = Store(group())
    ids, tables = keys_of(1, 2, 3)
    _, before = look(store, ids, tables, 1)
    for hint in ([2, 0, 1], [-1, -1, -1], [2**31 - 1, -(2**31), 5]):
        store.apply_gradients(
            Keys(ids, tables, rows=np.array(hint, np.int32)), RowUpdate(np.full((3, 4), 2, np.float32), 1)
        )
    np.testing.assert_allclose(before - peek(store, ids, tables), 3, atol=1e-5)


def test_persia_defect_1_a_hint_to_the_same_id_of_another_table_is_checked():
    store = Store(group(("a", "b")))
    ids, tables = np.array([7, 7], np.int64), np.array([0, 1], np.int32)
    rows, before = look(store, ids, tables, 1)
    store.apply_gradients(
        Keys(ids, tables, rows=rows[::-1].copy()), RowUpdate(np.array([[2] * 4, [4] * 4], np.float32), 1)
    )
    np.testing.assert_allclose(before - peek(store, ids, tables), [[1] * 4, [2] * 4], atol=1e-6)


def test_persia_defect_1_a_key_that_came_back_to_another_row_gets_its_gradient():
    store = Store(group())
    ids, tables = keys_of(1, 2)
    rows, before = look(store, ids, tables, 1)
    evict(store, ids, tables)
    again, _ = look(store, ids, tables, 2)
    assert rows.tolist() == again[::-1].tolist()
    store.apply_gradients(
        Keys(ids, tables, rows=rows), RowUpdate(np.array([[2] * 4, [4] * 4], np.float32), 2)
    )
    np.testing.assert_allclose(before - peek(store, ids, tables), [[1] * 4, [2] * 4], atol=1e-6)


def test_persia_defect_6_one_shard_loads_on_eight(tmp_path):
    spec = group()
    one = Store(spec)
    look(one, *keys_of(*range(200)), 1)
    write_snapshot(one, tmp_path / "0")
    eight = [Store(spec, shard=shard, num_shards=8) for shard in range(8)]
    for store in eight:
        store.restore([read_snapshot(tmp_path / "0")])
    assert sum(store.num_rows for store in eight) == 200
    assert min(store.num_rows for store in eight) > 5


def test_persia_defect_7_momentum_and_weight_decay_are_not_ignored():
    plain, momentum, decay = (
        Store(group(optimizer=optim.SGD(lr=0.1, **options)))
        for options in ({}, {"momentum": 0.9}, {"l2": 0.5})
    )
    ids, tables = keys_of(1)
    results = []
    for store in (plain, momentum, decay):
        for step in (1, 2):
            rows, values = look(store, ids, tables, step)
            store.apply_gradients(Keys(ids, tables, rows=rows), RowUpdate(np.ones_like(values), step))
        results.append(peek(store, ids, tables))
    start = peek(Store(group()), ids, tables)
    np.testing.assert_allclose(results[0], start - 0.2, rtol=1e-5)
    np.testing.assert_allclose(results[1], start - 0.1 - 0.19, rtol=1e-5)
    np.testing.assert_allclose(results[2], (start * 0.95 - 0.1) * 0.95 - 0.1, rtol=1e-5)


def test_persia_defect_8_a_dim_mismatch_is_an_error_and_never_fresh_rows(tmp_path):
    old = Store(group(("users",), dim=4))
    look(old, *keys_of(1, 2), 1)
    write_snapshot(old, tmp_path / "0")
    new = Store(group(("users",), dim=8))
    look(new, *keys_of(5), 1)
    with pytest.raises(CheckpointError, match=r"'users'.*embedding has dim 4, expected 8; set dim to match"):
        new.restore([read_snapshot(tmp_path / "0")])
    assert new.num_rows == 1  # what it had is still there
