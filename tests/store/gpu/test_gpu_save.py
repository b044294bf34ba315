"""A save of rows in GPU memory is of the moment at which it began, whatever changes while they are copied."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from girih.errors import CheckpointError, ConfigError, StorageFullError
from girih.store import Keys, RowUpdate, Store
from girih.store.gpu import gpu_save
from girih.store.gpu.gpu_save import GpuSave
from girih.store.gpu.options import Gpu
from girih.tables import LFU, LRU, TTL, MinCount
from support.store_verbs import (
    by_key,
    contents,
    evict,
    look,
    read_snapshot,
    taken,
    two_segments,
    write_snapshot,
)

NUM_IDS = 120
EVICTIONS = [None, LRU(max_rows=40), LFU(max_rows=40), TTL(steps=2), TTL(steps=3, max_rows=40)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Pieces of a few rows, and room for many of them aside."""
    monkeypatch.setattr(gpu_save, "_PIECE_BYTES", 800)
    monkeypatch.setattr(gpu_save, "_PIECES_ASIDE", 200)


class Gate:
    """Lets a save copy as many pieces as it is told to."""

    def __init__(self, monkeypatch):
        self.pieces = threading.Semaphore(0)
        self.is_open = False
        take = GpuSave._take_piece

        def wait(save, first, piece):
            while not (self.is_open or save._is_closed or self.pieces.acquire(timeout=0.01)):
                pass
            take(save, first, piece)

        monkeypatch.setattr(GpuSave, "_take_piece", wait)


def new_store(eviction=None, dtype="float32", admission=None):
    spec = two_segments(dtype, eviction=eviction, admission=admission)
    return Store(spec, arena=Gpu(chunk_bytes=8192, reserve_rows=20_000))


def change(store, seed):
    """One verb on keys that a seed draws: a step, an assignment, or some rows leave; now and then many new rows come."""
    rng, step = np.random.default_rng(seed), seed // 3 + 1
    ids = np.unique(rng.integers(-NUM_IDS, NUM_IDS, int(rng.integers(1, 60))))
    if seed % 7 == 6:
        ids = np.arange(1000 * seed, 1000 * seed + 300)  # the index grows, and rows take another chunk
    tables = np.sort(ids % 2).astype(np.int32)
    if seed % 4 == 2:
        evict(store, ids[::2], tables[::2])
    elif seed % 4 == 3:
        table = np.ones(len(ids), np.int32)  # the one that is never full
        store.assign(Keys(ids, table), rng.normal(size=(len(ids), store.spec.dim)).astype(np.float32))
    else:
        rows, values = look(store, ids, tables, step, counts=1 + ids % 3)
        store.apply_gradients(
            Keys(ids, tables, rows=rows), RowUpdate(rng.normal(size=values.shape).astype(np.float32), step)
        )


def changed(store, seeds=range(6)):
    for seed in seeds:
        change(store, seed)
    return store


def assert_same(one, other):
    assert one.description == other.description
    for found, expected in ((one.columns, other.columns), (one.cells, other.cells)):
        assert found.keys() == expected.keys()
        for name in found:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def read(snapshot):
    """What :func:`taken` gives, of a snapshot."""

    class Only:
        def snapshot(self):
            return snapshot

    return taken(Only())


@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    eviction=st.sampled_from(EVICTIONS),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    actions=st.lists(
        st.one_of(st.integers(6, 20), st.sampled_from(["copy", "copy all"])), min_size=2, max_size=4
    ),
)
def test_it_is_of_its_moment(monkeypatch, eviction, dtype, actions):
    with monkeypatch.context() as patched, new_store(eviction, dtype, MinCount(count=2, cells=500)) as store:
        expected = taken(changed(store))
        gate = Gate(patched)
        with store.snapshot() as snapshot:
            for action in actions:
                if isinstance(action, int):
                    change(store, action)
                else:
                    gate.pieces.release(3 if action == "copy" else 1000)
            gate.is_open = True
            assert_same(read(snapshot), expected)


@pytest.mark.smoke
def test_its_file_is_that_of_a_store_at_rest_and_loads_on_a_cpu(monkeypatch, tmp_path):
    with (
        new_store(LRU(max_rows=40), admission=MinCount(count=2, cells=500)) as store,
        Store(store.spec) as other,
    ):
        ids, tables = np.arange(30), np.ones(30, np.int32)
        rows, values = look(changed(store), ids, tables, 3)
        facts = write_snapshot(store, tmp_path / "still")
        before = contents(store)
        gate = Gate(monkeypatch)
        with store.snapshot() as snapshot:
            store.apply_gradients(
                Keys(ids, tables, rows=rows), RowUpdate(np.ones_like(values), 3)
            )  # of rows that were read before
            changed(store, range(6, 12))
            assert store.num_rows != len(before["ids"])
            gate.is_open = True
            assert write_snapshot(snapshot, tmp_path / "moving") == facts
        assert (tmp_path / "moving").read_bytes() == (tmp_path / "still").read_bytes()
        other.restore([read_snapshot(tmp_path / "moving", facts["crc32"])])
        after = contents(other)
        for name, column in before.items():
            np.testing.assert_array_equal(after[name], column, err_msg=name)


def test_records_that_change_while_they_are_copied_are_whole_in_the_save(monkeypatch):
    """Half of a piece is copied before a step and half after it, as a copy beside a step may be torn."""
    reached, resumed = threading.Event(), threading.Event()
    original, torn = GpuSave._staged, []

    def tear(save, there):
        staged = original(save, there)
        if not torn:  # the first piece
            torn.append(staged.copy())
            reached.set()
            assert resumed.wait(30)
            half = there.shape[1] // 2
            staged[:, half:] = there[:, half:].cpu().numpy()
            assert not np.array_equal(staged, torn[0])
        return staged

    with new_store() as store:
        expected = taken(changed(store))
        monkeypatch.setattr(GpuSave, "_staged", tear)
        with store.snapshot() as snapshot:
            assert reached.wait(30)
            found, tables = expected.columns["ids"], expected.columns["tables"]
            for table in (0, 1):
                keys = found[tables == table], tables[tables == table]
                rows, values = look(store, *keys, 9)
                store.apply_gradients(Keys(*keys, rows=rows), RowUpdate(np.ones_like(values), 9))
            resumed.set()
            assert_same(read(snapshot), expected)


def test_a_save_whose_stream_is_late_is_of_its_moment(monkeypatch):
    take = GpuSave._take_piece

    def late(save, first, piece):
        if piece.is_cuda:
            torch.cuda._sleep(20_000_000)  # cycles, about 10 ms
        take(save, first, piece)

    monkeypatch.setattr(GpuSave, "_take_piece", late)
    with new_store() as store:
        expected = taken(changed(store))
        with store.snapshot() as snapshot:
            changed(store, range(6, 10))
            assert_same(read(snapshot), expected)


def test_rows_that_were_free_are_so_in_the_save_though_others_use_them_meanwhile(monkeypatch):
    with new_store() as store:
        ids, tables = np.arange(60), np.zeros(60, np.int32)
        rows, _ = look(store, ids, tables, 1)
        evict(store, ids[:20], tables[:20])
        expected = taken(store)
        gate = Gate(monkeypatch)
        with store.snapshot() as snapshot:
            again, _ = look(store, ids + 100, tables, 2)
            assert set(rows[:20].tolist()) <= set(again.tolist())
            gate.is_open = True
            assert_same(read(snapshot), expected)


def test_a_step_waits_for_room_aside_and_no_longer(monkeypatch):
    monkeypatch.setattr(gpu_save, "_PIECES_ASIDE", 1)
    with new_store() as store:
        expected = taken(changed(store))
        gate = Gate(monkeypatch)
        with store.snapshot() as snapshot:
            step = threading.Thread(target=changed, args=(store, [8, 9]))
            step.start()
            step.join(0.5)
            assert step.is_alive()
            gate.is_open = True
            step.join(60)
            assert not step.is_alive()
            assert_same(read(snapshot), expected)


@pytest.mark.smoke
def test_a_save_that_is_not_wanted_ends_at_once(monkeypatch):
    gate = Gate(monkeypatch)
    with new_store() as store, changed(store).snapshot() as snapshot:
        with pytest.raises(ConfigError, match="is being saved already"):
            store.snapshot()
        source = read_like(store)
        with pytest.raises(ConfigError, match="is being saved; restore when that has ended"):
            store.restore([source])
        assert store.memory()["saving"]["used"] > 0
        snapshot.close()
        with pytest.raises(CheckpointError, match="was closed before it was read to the end"):
            snapshot.tensors()
        assert store.memory()["saving"]["used"] == 0
        gate.is_open = True
        change(store, 9)
        again = taken(store)
        assert by_key(store).keys() == {
            (store.spec.tables[t].name, i)
            for i, t in zip(again.columns["ids"].tolist(), again.columns["tables"].tolist(), strict=True)
        }


def read_like(store):
    """Some source; it is not looked at."""
    with Store(store.spec) as other:
        return taken(other)


@pytest.mark.smoke
def test_no_memory_for_a_save_is_said_and_training_goes_on(monkeypatch):
    def none_left(cells):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(gpu_save, "_as_bytes", none_left)
    with new_store() as store:
        change(store, 1)
        with pytest.raises(
            StorageFullError, match=r"no room for the [\d,]+ bytes that a save of [\d,]+ rows takes"
        ):
            store.snapshot()
        change(store, 4)
        assert store.num_rows > 0
