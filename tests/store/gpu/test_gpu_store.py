"""A store in GPU memory: the conformance suite of stores, and the dictionary."""

import contextlib
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from girih.errors import StorageFullError
from girih.kernels.gpu import jit
from girih.store import Keys, RowUpdate, Store
from girih.store.gpu.gpu_memory import GpuMemory
from girih.store.gpu.options import Gpu
from girih.store.gpu.record_kernels import RecordKernels
from girih.tables import LFU, LRU, Fixed, MinCount, Probability
from gpu_order import ORDERS, take
from store_machine import ORDERLESS, SEGMENTS, StoreMachine
from support.store_verbs import (
    by_key,
    group,
    keys_of,
    look,
    read_snapshot,
    train,
    two_segments,
    write_snapshot,
)
from support.stores import StoreSuite

SMALL = Gpu(chunk_bytes=4096, reserve_rows=20_000)


class TestGpu(StoreSuite):
    cells = 50_000
    sums_in_order = jit.INTERPRETED

    @pytest.fixture(autouse=True)
    def stores(self):
        self.made = contextlib.ExitStack()
        with self.made:
            yield

    def make(self, spec, **where):
        return self.made.enter_context(Store(spec, arena=SMALL, **where))


class GpuMachine(StoreMachine):
    """Filters have many cells: keys of one call do not see what others of it add to cells that they share."""

    dtypes: ClassVar = ("float32", "bfloat16", "float16")
    admissions: ClassVar = [None, None, MinCount(count=3, cells=50_000), Probability(p=0.5)]
    segments: ClassVar = SEGMENTS if jit.INTERPRETED else ORDERLESS

    def new_store(self):
        return Store(self.spec, arena=SMALL, clock=self.clock)


def test_any_sequence_of_verbs_is_the_dictionarys(tmp_path):
    GpuMachine.directory = tmp_path
    run_state_machine_as_test(
        GpuMachine,
        settings=settings(
            max_examples=20, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_checkpoints_go_from_a_gpu_to_a_cpu_and_back(tmp_path, dtype):
    spec = two_segments(dtype)
    stores = [Store(spec, arena=SMALL), Store(spec)]
    for store in stores:
        train(store)
    assert by_key(stores[0]) == by_key(stores[1])
    for number, store in enumerate(stores):
        write_snapshot(store, tmp_path / f"{number}")
    crossed = [Store(spec, arena=SMALL), Store(spec)]
    for number, store in enumerate(crossed):
        store.restore([read_snapshot(tmp_path / f"{1 - number}")])
        train(store, range(6, 9))
    assert by_key(crossed[0]) == by_key(crossed[1])
    for store in (*stores, *crossed):
        store.close()


@pytest.mark.smoke
def test_memory_that_ends_serves_the_keys_before():
    with Store(group(), arena=Gpu(chunk_bytes=4096, reserve_rows=100)) as store:
        look(store, *keys_of(*range(90)), 1)
        with pytest.raises(StorageFullError, match="no room for more than 100 rows"):
            look(store, *keys_of(*range(80, 120)), 2)
        assert store.num_rows == 100
        rows, _ = look(store, *keys_of(*range(100)), 3)
        assert (rows >= 0).all()


@pytest.mark.smoke
def test_tables_with_bounds_claim_no_more_and_are_never_asked_how_full_they_are(monkeypatch):
    known = []
    original = GpuMemory.known
    monkeypatch.setattr(GpuMemory, "known", lambda memory: (known.append(None), original(memory))[1])
    spec = group(("t", "u"), eviction=LRU(max_rows=50))
    with Store(spec, arena=Gpu(chunk_bytes=64 * 64)) as store:
        for step in range(1, 9):
            ids = np.arange(step, step + 40)
            look(store, ids, np.repeat(np.arange(2), 20).astype(np.int32), step)
        assert store.num_rows == 54
        assert (
            store.state.memory.capacity == 128
        )  # two chunks of 64; three times the ids of a call would take more
        assert len(known) == 1


@pytest.mark.smoke
def test_a_table_that_was_loaded_above_its_bound_leaves_the_others_their_rows(tmp_path):
    with Store(group(("t", "u"), eviction=Fixed(max_rows=40))) as store:
        look(store, *keys_of(*range(40)), 1)
        write_snapshot(store, tmp_path / "shard")
    with Store(group(("t", "u"), eviction=Fixed(max_rows=32)), arena=Gpu(chunk_bytes=64)) as store:
        store.restore([read_snapshot(tmp_path / "shard")])
        rows, _ = look(store, *keys_of(*range(100, 140), table=1), 2)
        assert (np.sort(rows[rows >= 0]) == np.arange(40, 72)).all()
        assert store.state.memory.capacity >= 72


@pytest.mark.parametrize(
    ("rules", "turned_away"),
    [
        ({}, False),
        ({"admission": MinCount(count=2)}, True),
        ({"eviction": LRU(max_rows=9)}, True),
        ({"eviction": LRU(max_rows=90)}, False),
    ],
    ids=str,
)
def test_initial_values_take_memory_where_a_key_may_get_no_row(monkeypatch, rules, turned_away):
    taken, original = [], RecordKernels.begin

    def begin(*args, **kwargs):
        addresses = original(*args, **kwargs)
        taken.append(addresses.untyped_storage().nbytes() - addresses.nbytes)
        return addresses

    monkeypatch.setattr(RecordKernels, "begin", begin)
    spec = group(**rules)
    with Store(spec, arena=SMALL) as store:
        look(store, *keys_of(*range(20)), 1)
        store.peek(Keys(*keys_of(*range(20))), np.empty((20, spec.dim), np.float32))
    assert taken == [20 * 4 * spec.dim if turned_away else 0, 20 * 4 * spec.dim]


@pytest.mark.smoke
def test_a_save_shows_one_moment_while_training_goes_on(tmp_path):
    with Store(two_segments(), arena=SMALL) as store, Store(two_segments()) as other:
        train(store)
        before = by_key(store)
        with store.snapshot() as snapshot:
            train(store, range(6, 9))
            write_snapshot(snapshot, tmp_path / "shard")
        other.restore([read_snapshot(tmp_path / "shard")])
        assert by_key(other) == before != by_key(store)


@pytest.mark.smoke
def test_rows_that_left_are_used_again():
    with Store(group(), arena=SMALL) as store:
        rows, _ = look(store, *keys_of(*range(50)), 1)
        store.state.rows.drop(rows[:20])
        again, _ = look(store, *keys_of(*range(100, 130)), 2)
        assert store.num_rows == 60
        assert set(rows[:20].tolist()) <= set(again.tolist())
        np.testing.assert_array_equal(look(store, *keys_of(*range(20, 50)), 3)[0], rows[20:])


@pytest.mark.skipif(not jit.INTERPRETED, reason="a GPU takes an order of its own")
@pytest.mark.parametrize("eviction", [LRU(max_rows=15), LFU(max_rows=15)], ids=str)
def test_no_order_of_programs_changes_a_store(monkeypatch, eviction):
    """To the bit: who is admitted, where rows lie, who leaves, what a row becomes."""
    found = []
    for order in ORDERS:
        spec = two_segments(eviction=eviction, admission=MinCount(count=2, cells=5000))
        with monkeypatch.context() as patched, Store(spec, arena=SMALL) as store:
            take(patched, order)
            read = []
            for step in range(1, 4):
                ids = np.unique(np.random.default_rng(step).integers(-20, 20, 30))
                tables = np.sort(ids % 2).astype(np.int32)
                rows, values = look(store, ids, tables, step, counts=1 + ids % 3)
                store.apply_gradients(
                    Keys(ids, tables, rows=rows), RowUpdate(np.ones_like(values) / step, step)
                )
                read.append((rows.tolist(), values.tolist()))
            found.append((read, by_key(store), store.counters()))
    assert found[1] == found[0]
    assert found[2] == found[0]
