"""Stores whose values lie in two tiers: the same as one tier, whatever fits into memory."""

import contextlib
import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import rule, run_state_machine_as_test
from test_live_snapshot import NUM_IDS, assert_equal, change, read, spec_of
from test_store_suite import with_the_jit

from girih.kernels.cpu.jit import JIT_DISABLED
from girih.store import Heap, Keys, Store, Tiers
from girih.tables import LFU, LRU, TTL, MinCount
from store_machine import KEYS, StoreMachine
from support.store_verbs import contents, taken
from support.stores import StoreSuite


class OnTiers(StoreSuite):
    """Stores with a hot tier of one size."""

    hot_rows: int

    @pytest.fixture(autouse=True)
    def directory(self, tmp_path):
        self.tiers = Tiers(
            directory=tmp_path / "tiers", hot_rows=self.hot_rows, warm_up_steps=2, flush_every_steps=2
        )
        with contextlib.ExitStack() as self.made:
            yield

    def make(self, spec, **where):
        return self.made.enter_context(
            Store(spec, arena=Heap(reserve_rows=20_000), tiers=self.tiers, **where)
        )


@with_the_jit
class TestNothingHot(OnTiers):
    hot_rows = 0


class TestFewHot(OnTiers):
    hot_rows = 50


@with_the_jit
class TestAllHot(OnTiers):
    hot_rows = 20_000


@pytest.fixture
def few_slots(monkeypatch):
    """Slots for the rows of one call or so, which are soon given to others."""
    monkeypatch.setattr("girih.store.tiers.slot_memory._FIRST_STAGED", 8)
    monkeypatch.setattr("girih.store.tiers.slot_memory._CALLS_KEPT", 0)
    monkeypatch.setattr("girih.store.tiers.slot_memory._MOST_CALLS_KEPT", 0)


@pytest.fixture
def small_chunks(monkeypatch):
    """Snapshots in chunks of eight rows or so, with a log that is soon full."""
    monkeypatch.setattr("girih.store.snapshot.snapshot._CHUNK_BYTES", 1200)
    monkeypatch.setattr("girih.store.snapshot.snapshot._LOG_BYTES", 0)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_any_sequence_of_verbs_does_what_a_dictionary_does(dtype, small_index, few_slots, tmp_path):
    class Machine(StoreMachine):
        directory = tmp_path
        dtypes = (dtype,)

        def new_store(self):
            tiers = Tiers(directory=tmp_path, hot_rows=5, warm_up_steps=2, flush_every_steps=1)
            return Store(self.spec, arena=Heap(reserve_rows=5000), clock=self.clock, tiers=tiers)

        @rule(keys=KEYS)
        def fetch(self, keys):
            self.store.fetch(Keys(*self.arrays(keys)))

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=6 if JIT_DISABLED else 25,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def tiered(spec, directory, hot_rows):
    tiers = Tiers(directory=directory, hot_rows=hot_rows, warm_up_steps=3, flush_every_steps=2)
    return Store(spec, arena=Heap(reserve_rows=20_000), clock=lambda: 1.7e9, tiers=tiers)


@pytest.mark.parametrize("dtype", ["float32"] if JIT_DISABLED else ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("hot_rows", "eviction"),
    [
        (0, LRU(max_rows=50)),
        (20, LFU(max_rows=60)),
        (40, TTL(steps=2)),
        (40, None),
        (10**4, LRU(max_rows=70)),
    ],
    ids=str,
)
def test_every_hot_size_gives_the_same_store_bit_for_bit(
    tmp_path, few_slots, small_chunks, hot_rows, eviction, dtype
):
    spec = spec_of(eviction, dtype, MinCount(count=2, cells=500))
    one, several = Store(spec, clock=lambda: 1.7e9), tiered(spec, tmp_path, hot_rows)
    for seed in range(12):
        for store in (one, several):
            change(store, seed)
        rng = np.random.default_rng(seed)
        ids = np.unique(rng.integers(-NUM_IDS, NUM_IDS, 40))
        several.fetch(Keys(ids, (ids % 3).astype(np.int32)))
    assert several.counters() == one.counters()
    assert_equal(contents(several), contents(one))
    if hot_rows < 10**4:
        assert several.tier_counters()["ssd_reads"] > 0
    seeds = itertools.count(12)
    with one.snapshot(tmp_path) as still:
        expected = read(still)
    with several.snapshot(tmp_path) as snapshot:  # read while it changes
        before = next(seeds)
        change(several, before)
        found = read(snapshot, lambda: change(several, next(seeds)))
    assert_equal(found, expected)
    for seed in range(before, next(seeds)):
        change(one, seed)
    assert_equal(contents(several), contents(one))
    with several, tiered(spec, tmp_path, hot_rows // 2) as other, Store(spec, clock=lambda: 1.7e9) as again:
        other.restore([taken(several)])
        again.restore([taken(one)])
        for seed in range(100, 106):
            for store in (again, other):
                change(store, seed)
        assert_equal(contents(other), contents(again))


def test_memory_is_counted_by_part(tmp_path):
    with tiered(spec_of(), tmp_path, 10) as store:
        for seed in range(4):
            change(store, seed)
        parts = store.memory()
        assert sum(
            part["used"] for name, part in parts.items() if name in ("ids", "neighbours", "place")
        ) == (24 * store.num_rows)
        assert parts["padding"]["used"] == 0 < parts["slots"]["used"] <= parts["slots"]["reserved"]
        assert parts["slots"]["used"] >= 4 * store.state.layout.num_words * min(store.num_rows, 10)
