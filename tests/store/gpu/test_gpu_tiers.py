"""Rows in GPU memory above the host's: the same as one tier, whatever is hot."""

import contextlib
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import rule, run_state_machine_as_test

from girih import optim
from girih.errors import StorageFullError
from girih.kernels.gpu import jit
from girih.store import Heap, Keys, RowUpdate, Store, Tiers
from girih.store.gpu.options import Gpu, GpuTier
from girih.tables import LFU, LRU, TTL, MinCount
from store_machine import KEYS, ORDERLESS, SEGMENTS, StoreMachine
from support.store_verbs import by_key, group, keys_of, look, taken, train, two_segments
from support.stores import StoreSuite


def tier(hot_rows, **options):
    return GpuTier(hot_rows=hot_rows, warm_up_steps=2, flush_every_steps=2, chunk_bytes=4096, **options)


def tiered(spec, hot_rows, directory=None, **where):
    below = None
    if directory is not None:
        below = Tiers(directory=directory, hot_rows=30, warm_up_steps=2, flush_every_steps=1)
    return Store(spec, arena=Heap(reserve_rows=20_000), tiers=below, gpu_tier=tier(hot_rows), **where)


@pytest.fixture
def few_slots(monkeypatch):
    """Slots for the rows of two calls or so, and little memory below, so that rows come and go."""
    monkeypatch.setattr("girih.store.gpu.gpu_slots._FIRST_STAGED", 4)
    monkeypatch.setattr("girih.store.tiers.slot_memory._FIRST_STAGED", 8)
    monkeypatch.setattr("girih.store.tiers.slot_memory._CALLS_KEPT", 0)


class TestGpuTiers(StoreSuite):
    sums_in_order = jit.INTERPRETED

    @pytest.fixture(autouse=True)
    def stores(self, few_slots):
        with contextlib.ExitStack() as self.made:
            yield

    def make(self, spec, **where):
        return self.made.enter_context(tiered(spec, 15, **where))


@pytest.mark.parametrize("below", [False, True], ids=["dram", "ssd"])
def test_any_sequence_of_verbs_is_the_dictionarys(below, few_slots, tmp_path):
    class Machine(StoreMachine):
        directory = tmp_path
        dtypes: ClassVar = ("float32", "bfloat16", "float16")
        segments: ClassVar = SEGMENTS if jit.INTERPRETED else ORDERLESS

        def new_store(self):
            return tiered(self.spec, 5, tmp_path if below else None, clock=self.clock)

        @rule(keys=KEYS)
        def fetch(self, keys):
            self.store.fetch(Keys(*self.arrays(keys)))

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=4 if below else 8,
            stateful_step_count=10,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def step_of(store, step, spec, *, fetches):
    """Training on some keys, those of the step after fetched in between, as ``[schedule] prefetch`` does."""

    def batch(number):
        rng = np.random.default_rng(number)
        ids = np.unique(rng.integers(-60, 60, 40))
        return ids, (ids % len(spec.tables)).astype(np.int32)

    (ids, tables), rng = batch(step), np.random.default_rng(step)
    rows, values = look(store, ids, tables, step, counts=1 + ids % 3)
    if fetches:
        store.fetch(Keys(*batch(step + 1)))
    grads = rng.normal(size=values.shape).astype(np.float32)
    return values, store.apply_gradients(Keys(ids, tables, rows=rows), RowUpdate(grads, step))


@pytest.mark.parametrize(
    ("hot_rows", "dtype", "first", "eviction"),
    [
        (20, "float32", optim.Adam(lr=0.1), None),
        (0, "bfloat16", optim.Adagrad(lr=0.1), LRU(max_rows=25)),
        pytest.param(
            20, "float16", optim.SGD(lr=0.1, momentum=0.9), LFU(max_rows=30), marks=pytest.mark.smoke
        ),
        (10_000, "float32", optim.RowwiseAdagrad(lr=0.1), TTL(steps=2)),
    ],
    ids=["few", "none", "lfu", "all"],
)
def test_every_hot_size_is_all_in_gpu_memory_bit_for_bit(hot_rows, dtype, first, eviction, few_slots):
    spec = two_segments(dtype, first, eviction=eviction)
    with Store(spec, arena=Gpu(chunk_bytes=4096)) as one, tiered(spec, hot_rows) as several:
        for step in range(1, 7):
            found = [step_of(store, step, spec, fetches=store is several) for store in (one, several)]
            np.testing.assert_array_equal(found[0][0], found[1][0])
            assert found[0][1] == found[1][1]
        assert by_key(several) == by_key(one)
        assert several.counters() == one.counters()
        reads = several.tier_counters()
        assert sum(reads.values()) == several.counters()["hits"]
        assert (reads["dram_reads"] == 0) == (hot_rows == 10_000)


@pytest.mark.smoke
def test_a_save_is_of_one_moment_and_goes_on_anywhere(few_slots, tmp_path):
    spec = two_segments("bfloat16", admission=MinCount(count=2, cells=5000))
    with Store(spec) as here, tiered(spec, 20) as there, tiered(spec, 5, tmp_path) as three:
        for store in (here, there, three):
            train(store)
        before = by_key(here)
        saved = taken(there)
        with there.snapshot() as snapshot:  # read once rows have changed
            train(there, range(6, 9))
            kept = [chunk["ids"].copy() for chunk in snapshot.chunks()]
        assert sorted(np.concatenate(kept).tolist()) == sorted(key for _, key in before)
        for store in (here, three):
            store.restore([saved])
            assert by_key(store) == before
            train(store, range(6, 9))
        assert by_key(there) == by_key(here) == by_key(three)
        assert three.tier_counters()["ssd_reads"] > 0


@pytest.mark.smoke
def test_gpu_memory_that_ends_says_so_and_loses_no_row(monkeypatch):
    spec = group()
    with tiered(spec, 0) as store, Store(spec) as other:
        for each in (store, other):
            rows, values = look(each, *keys_of(*range(50)), 1)
            each.apply_gradients(Keys(*keys_of(*range(50)), rows=rows), RowUpdate(values, 1))
        monkeypatch.setattr(store.state.slots.records, "_most", store.state.slots.records.capacity)
        most = store.state.slots.records.capacity
        with pytest.raises(StorageFullError, match=r"lower store\.hot_rows, or data\.batch_size"):
            look(store, *keys_of(*range(40, 40 + 2 * most)), 2)
        assert store.num_rows == 50
        for each in (store, other):
            look(each, *keys_of(*range(50)), 3)
        values = [by_key(each)["t", 7]["embedding"] for each in (store, other)]
        assert values[0] == values[1]
