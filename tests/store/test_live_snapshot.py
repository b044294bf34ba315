"""A snapshot that is read while verbs go on is the state of the moment it was taken."""

import contextlib
import itertools
import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from girih import optim
from girih.errors import ConfigError, StorageFullError
from girih.kernels.cpu.jit import JIT_DISABLED
from girih.kernels.cpu.layout import LOST
from girih.store import GroupSpec, Keys, RowUpdate, Segment, Snapshot, Store, TableSpec
from girih.tables import LFU, LRU, TTL, Fixed, MinCount, Normal, Zeros
from support.store_verbs import contents, evict, group, keys_of, look, read_snapshot, write_snapshot

NUM_IDS = 80 if JIT_DISABLED else 300
EVICTIONS = [
    None,
    LRU(max_rows=NUM_IDS // 3),
    LFU(max_rows=NUM_IDS // 3),
    TTL(steps=2),
    TTL(seconds=5, max_rows=NUM_IDS // 4),
    Fixed(max_rows=NUM_IDS // 3),
]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Chunks of eight rows or so, and a log that is soon full."""
    monkeypatch.setattr("girih.store.snapshot.snapshot._CHUNK_BYTES", 1200)
    monkeypatch.setattr("girih.store.snapshot.snapshot._LOG_BYTES", 0)


def spec_of(eviction=None, dtype="float32", admission=None):
    return GroupSpec(
        "group",
        (
            TableSpec("users", (Normal(), Zeros()), admission, eviction),
            TableSpec("items", (Normal(), Zeros())),
            TableSpec("tags", (Normal(), Zeros()), MinCount(count=3, cells=5000), LRU(max_rows=10)),
        ),
        (Segment("embedding", 3, optim.Adam(lr=0.1)), Segment("first_order", 1, optim.FTRL(l1=0.01))),
        dtype,
    )


def change(store, seed, verbs=("step", "step", "assign", "evict")):
    """One verb, or a step of two, on keys that a seed draws."""
    rng = np.random.default_rng(seed)
    ids = np.unique(rng.integers(-NUM_IDS, NUM_IDS, int(rng.integers(1, NUM_IDS))))
    tables = (ids % len(store.spec.tables)).astype(np.int32)
    order = np.argsort(tables, kind="stable")
    ids, tables = ids[order], tables[order]
    verb = verbs[seed % len(verbs)]
    if verb == "step":
        rows, values = look(store, ids, tables, seed // 2 + 1, counts=1 + ids % 3)
        store.apply_gradients(
            Keys(ids, tables, rows=rows),
            RowUpdate(rng.normal(size=values.shape).astype(np.float32), seed // 2 + 1),
        )
    elif verb == "evict":
        evict(store, ids[::3], tables[::3])
    else:
        values = rng.normal(size=(len(ids), store.spec.dim)).astype(np.float32)
        with contextlib.suppress(ConfigError):  # a table is full: all other keys are assigned
            store.assign(Keys(ids, tables), values)


def trained(spec, seeds=range(12)):
    store = Store(spec, clock=lambda: 1.7e9)
    for seed in seeds:
        change(store, seed)
    return store


def read(snapshot, between=lambda: None):
    """All columns and filters; ``between`` is called after every chunk."""
    columns = {t.name: [] for t in snapshot.tensors()}
    for chunk in snapshot.chunks():
        for name, rows in chunk.items():
            columns[name].append(rows.copy())
        between()
    for table, cells in snapshot.blooms():
        columns[f"bloom.{table}"].append(cells.copy())
        between()
    return {name: np.concatenate(parts) for name, parts in columns.items() if parts}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def sorted_by_key(columns):
    order = np.lexsort((columns["ids"], columns["tables"]))
    return {n: c[order] for n, c in columns.items() if len(c) == len(order)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("eviction", EVICTIONS)
def test_it_is_the_state_of_its_moment(tmp_path, eviction, dtype):
    store = trained(spec_of(eviction, dtype, MinCount(count=2, cells=500)))
    expected, counters = contents(store), store.counters()
    with store.snapshot(tmp_path) as snapshot:
        still = read(snapshot)
    for name, column in sorted_by_key(expected).items():
        np.testing.assert_array_equal(sorted_by_key(still)[name], column, err_msg=name)
    seeds = itertools.count(12)
    with store.snapshot(tmp_path) as snapshot:
        change(store, next(seeds))
        moving = read(snapshot, lambda: change(store, next(seeds)))
        assert snapshot._spills.num_bytes > 0
    assert next(seeds) > 16
    assert_equal(moving, still)
    assert {"bloom.users", "bloom.tags"} <= set(still)
    assert counters != store.counters()
    # Written while a thread trains, and read back: lists are in order, counters those of the moment.
    store = trained(spec_of(eviction, dtype, MinCount(count=2, cells=500)))
    snapshot = store.snapshot(tmp_path)
    stop = threading.Event()

    def train():
        for seed in range(12, 400):
            change(store, seed)
            if stop.is_set():
                return

    thread = threading.Thread(target=train)
    thread.start()
    with snapshot:
        report = write_snapshot(snapshot, tmp_path / "0")
    stop.set()
    thread.join()
    assert report["rows"] == len(expected["ids"])
    restored = Store(store.spec, clock=lambda: 1.7e9)
    restored.restore([read_snapshot(tmp_path / "0")])
    assert_equal(contents(restored), expected)
    assert restored.counters() == counters
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


@settings(deadline=None, max_examples=10 if JIT_DISABLED else 60)
@given(
    st.sampled_from(EVICTIONS),
    st.lists(st.integers(0, 10_000), max_size=8),
    st.lists(st.integers(0, 10_000), min_size=1, max_size=40),
    st.integers(0, 6),
)
def test_any_order_of_verbs_and_chunks(tmp_path_factory, eviction, before, after, a_chunk):
    directory = tmp_path_factory.mktemp("spill")
    store = trained(spec_of(eviction, admission=MinCount(count=2, cells=300)), before)
    with store.snapshot(directory) as snapshot:
        still = read(snapshot)
    seeds = iter(after)

    def verbs():
        for seed in itertools.islice(seeds, a_chunk):
            change(store, seed)

    with store.snapshot(directory) as snapshot:
        verbs()
        assert_equal(read(snapshot, verbs), still)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_it_may_be_taken_between_a_lookup_and_its_gradients(tmp_path, dtype):
    store = trained(spec_of(dtype=dtype))
    with store.snapshot(tmp_path) as snapshot:
        still = read(snapshot)
    ids, tables = still["ids"].copy(), still["tables"].copy()
    with store.snapshot(tmp_path) as snapshot:
        store.apply_gradients(
            Keys(ids, tables), RowUpdate(np.ones((len(ids), store.spec.dim), np.float32), 99)
        )
        assert_equal(read(snapshot), still)


def test_verbs_do_the_same_while_a_snapshot_is_open(tmp_path):
    for eviction in EVICTIONS:
        alone, saved = trained(spec_of(eviction)), trained(spec_of(eviction))
        with saved.snapshot(tmp_path):
            for store in (alone, saved):
                for seed in range(12, 24):
                    change(store, seed)
        assert_equal(contents(saved), contents(alone))
        assert saved.counters() == alone.counters()


def test_memory_is_bounded_and_given_back(tmp_path):
    store = trained(spec_of())
    snapshot = store.snapshot(tmp_path)
    for seed in range(12, 30):
        change(store, seed)
    assert len(store.state.memory.arrays.log) == snapshot.most_records
    assert store.state.memory.arrays.saving[LOST] == 0  # no record was lost for want of room
    snapshot.close()
    assert len(store.state.memory.arrays.log) == len(store.state.memory.arrays.kept) == 0


def test_one_at_a_time_and_none_for_a_restore(tmp_path):
    store = trained(spec_of())
    with store.snapshot(tmp_path) as snapshot:
        with pytest.raises(ConfigError, match="is being saved already"):
            store.snapshot(tmp_path)
        with pytest.raises(ConfigError, match="is being saved; restore when"):
            store.restore([snapshot])
    with pytest.raises(ValueError, match="was closed before it was read"):
        read(snapshot)
    assert isinstance(store.snapshot(tmp_path), Snapshot)


def test_a_full_disk_fails_the_save_and_not_the_verb(tmp_path, monkeypatch):
    alone, store = trained(spec_of()), trained(spec_of())

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with store.snapshot(tmp_path) as snapshot:
        with monkeypatch.context() as patch:
            patch.setattr("os.pwrite", full)
            for seed in range(12, 30):
                change(store, seed)
        with pytest.raises(StorageFullError, match="no room for rows that changed"):
            write_snapshot(snapshot, tmp_path / "0")
    assert os.listdir(tmp_path) == ["0"]  # what was being written
    for seed in range(12, 30):
        change(alone, seed)
    assert_equal(contents(store), contents(alone))


def test_a_list_is_restored_in_its_order_from_one_shard_or_several(tmp_path):
    spec = group(eviction=LRU(max_rows=100))
    store = Store(spec)
    for step, ids in enumerate([(1, 2, 3, 4), (2,), (9, 1)], start=1):
        look(store, *keys_of(*ids), step)
    write_snapshot(store, tmp_path / "0")
    file = read_snapshot(tmp_path / "0")
    assert file.column("ids").tolist() == [1, 2, 3, 4, 9]
    parts = [Store(spec, shard=shard, num_shards=2) for shard in range(2)]
    for part in parts:
        part.restore([file])
        write_snapshot(part, tmp_path / f"{part.shard} of 2")
    one = Store(spec)
    for sources in ([file], [read_snapshot(tmp_path / f"{shard} of 2") for shard in range(2)]):
        one.restore(sources)
        assert contents(one)["last_used"].tolist() == [1, 1, 2, 3, 3]
    one.restore([file])
    assert contents(one)["ids"].tolist() == contents(store)["ids"].tolist() == [3, 4, 2, 1, 9]
