"""Writers that are killed in the middle of any verb: what they left is repaired, and no key is lost or doubled."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from girih import optim
from girih.errors import ConfigError
from girih.kernels.cpu import layout
from girih.kernels.cpu.jit import JIT_DISABLED
from girih.store import CutPush, File, Heap, Keys, Push, RowUpdate, Store, Tiers
from girih.store.memory.arena import _WRITING_AT, CHANGING, REPLACING
from girih.store.memory.pushes import LANES
from girih.tables import LRU
from support.store_verbs import contents, group, keys_of, look, peek

NUM_KILLS = int(os.environ.get("GIRIH_KILLS", "0")) * 4
SPEC = group(("a", "b"), optimizer=optim.Adagrad(lr=0.1), eviction=LRU(max_rows=500))


def kill(kind, directory, seeds):
    site = Path(__file__).with_name("kill_site.py")
    done = subprocess.run(
        [sys.executable, "-W", "error", str(site), kind, str(directory), *map(str, seeds)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_what_a_killed_writer_left_is_what_a_dictionary_holds(tmp_path):
    seeds = range(23, 35) if JIT_DISABLED else range(100, 106)
    told = [each for kind in ("shared", "file") for each in kill(kind, tmp_path, seeds)]
    assert len(told) == 2 * len(seeds)
    if JIT_DISABLED:  # killed at the same lines in every run
        assert sum(each["amid"] for each in told) >= len(seeds)
        assert any(each["torn"] for each in told)
        assert any(each["unmade"] for each in told)


@pytest.mark.heavy
@pytest.mark.skipif(not NUM_KILLS, reason="GIRIH_KILLS is not set")
@pytest.mark.parametrize("kind", ["shared", "file"])
def test_so_it_is_however_often_one_is_killed(tmp_path, kind):
    told = kill(kind, tmp_path, range(1000, 1000 + NUM_KILLS))
    amid = Counter(each["verb"] for each in told if each["amid"])
    assert set(amid) >= {"look", "push"}
    if JIT_DISABLED:
        assert set(amid) >= {"assign", "evict"}
        assert any(each["torn"] for each in told)
        assert any(each["unmade"] for each in told)


def lasting(tmp_path, **options):
    return File(path=str(tmp_path / "arena"), **options)


def fill(store, number=300):
    ids, tables = keys_of(*range(number))
    look(store, ids, tables, 1)
    return ids, tables, np.ones((number, store.spec.dim), np.float32)


def test_a_push_is_applied_once_in_whatever_process_it_is_sent(tmp_path):
    twin = Store(SPEC)
    ids, tables, grads = fill(twin)
    twin.apply_gradients(Keys(ids, tables), RowUpdate(grads, 1))
    with Store(SPEC, arena=lasting(tmp_path, reserve_rows=2000)) as store:
        fill(store)
        for _ in range(2):
            assert store.apply_gradients(Keys(ids, tables), RowUpdate(grads, 1, push=Push(3, 7))) == 0
    with Store(SPEC, arena=lasting(tmp_path, attach=True, repair=True)) as store:
        assert store.repaired is None
        store.apply_gradients(Keys(ids, tables), RowUpdate(grads, 1, push=Push(3, 7)))
        store.apply_gradients(Keys(ids, tables), RowUpdate(grads, 1, push=Push(3, 6)))
        np.testing.assert_array_equal(peek(store, ids, tables), peek(twin, ids, tables))
        assert store.counters() == twin.counters()
        for moved in (store, twin):  # another lane's push of that number is another push
            push = Push(4, 7) if moved is store else None
            moved.apply_gradients(Keys(ids, tables), RowUpdate(grads, 2, push=push))
        np.testing.assert_array_equal(peek(store, ids, tables), peek(twin, ids, tables))


def leave(store, row_in_hand, position, num_keys):
    """Leaves a store as a writer does that is killed as it moves a row for a push, with index and lists torn."""
    memory = store.state.memory
    arrays, header = memory.arrays, memory.arena._header
    taking = memory.pushes.taking(Push(0, 1), num_keys)
    taking.__enter__()
    arrays.state[layout.AMID] = position << 32 | row_in_hand + 1
    arrays.slots[:] = 12345
    arrays.tables[:, [layout.NEWEST, layout.TABLE_ROWS]] = 12345
    arrays.meta[:, layout.OLDER] = 12345
    arrays.state[[layout.NUM_ROWS, layout.FREE_ROW, layout.GROWING, layout.INDEX_SHIFT]] = 12345
    memory._closed = True  # nobody closes it
    header[_WRITING_AT] = CHANGING
    memory.arena.close()


def test_a_row_in_hand_is_told_and_the_rest_of_its_push_goes_on(tmp_path):
    store, twin = Store(SPEC, arena=lasting(tmp_path, reserve_rows=2000)), Store(SPEC)
    ids, tables, grads = fill(store)
    fill(twin)
    expected = contents(twin)
    leave(store, row_in_hand=5, position=5, num_keys=300)
    with Store(SPEC, arena=lasting(tmp_path, attach=True, repair=True)) as store:
        assert store.repaired.torn == (5, 0)
        assert store.repaired.num_unmade == 0
        assert store.repaired.cut == [CutPush(Push(0, 1), 300, 6)]
        for name, column in contents(store).items():
            np.testing.assert_array_equal(column, expected[name])
        with pytest.raises(ConfigError, match="299 keys, expected 300 as when it was cut short"):
            store.apply_gradients(Keys(ids[1:], tables[1:]), RowUpdate(grads[1:], 1, push=Push(0, 1)))
        store.apply_gradients(Keys(ids, tables), RowUpdate(grads, 1, push=Push(0, 1)))
        twin.apply_gradients(Keys(ids[6:], tables[6:]), RowUpdate(grads[6:], 1))
        np.testing.assert_array_equal(peek(store, ids, tables), peek(twin, ids, tables))
        assert store.state.memory.pushes.cut() == []
    with Store(SPEC, arena=lasting(tmp_path, attach=True)) as store:
        assert store.repaired is None


def test_a_list_that_is_torn_in_the_middle_is_ordered_by_last_use(tmp_path):
    store = Store(SPEC, arena=lasting(tmp_path, reserve_rows=2000))
    for step, first in enumerate((200, 100, 0), start=1):
        look(store, *keys_of(*range(first, first + 100)), step)
    arrays = store.state.memory.arrays
    arrays.meta[int(arrays.tables[0, layout.OLDEST]), layout.NEWER] = layout.NO_ROW
    leave(store, row_in_hand=layout.NO_ROW, position=0, num_keys=1)
    with Store(SPEC, arena=lasting(tmp_path, attach=True, repair=True)) as store:
        last_used = contents(store)["last_used"]
        assert last_used.tolist() == sorted(last_used.tolist())
        assert store.num_rows == 300


def test_rows_that_were_being_replaced_are_refused(tmp_path):
    store = Store(SPEC, arena=lasting(tmp_path, reserve_rows=2000))
    fill(store)
    store.state.memory.arena._header[_WRITING_AT] = REPLACING
    store.close()
    with pytest.raises(ConfigError, match=r"died while all rows were replaced.*restore from a checkpoint"):
        Store(SPEC, arena=lasting(tmp_path, attach=True, repair=True))


@pytest.mark.parametrize("push", [Push(-1, 1), Push(LANES, 1), Push(0, 0), Push(0, 1 << 62)])
def test_pushes_out_of_range_are_refused(push):
    store = Store(SPEC)
    ids, tables, grads = fill(store, 3)
    with pytest.raises(ConfigError, match=f"push {push.number} of lane {push.lane}: expected lanes 0 to"):
        store.apply_gradients(Keys(ids, tables), RowUpdate(grads, 1, push=push))
    assert store.counters()["updates"] == 0


def test_rows_in_tiers_know_of_no_pushes(tmp_path):
    tiers = Tiers(directory=str(tmp_path), hot_rows=100, flush_every_steps=10, warm_up_steps=1)
    with Store(SPEC, arena=Heap(reserve_rows=1000), tiers=tiers) as store:
        ids, tables, grads = fill(store, 3)
        with pytest.raises(ConfigError, match="only rows in a single host memory record pushes"):
            store.apply_gradients(Keys(ids, tables), RowUpdate(grads, 1, push=Push(0, 1)))


def test_a_push_without_keys_in_a_shard_is_noted_in_it_until_all_are_forgotten(tmp_path):
    with Store(SPEC, arena=lasting(tmp_path, reserve_rows=2000)) as store:
        assert not store.has_applied(Push(3, 7))
        store.note_push(Push(3, 7))
        assert store.has_applied(Push(3, 6))
        assert not store.has_applied(Push(4, 6))
    with Store(SPEC, arena=lasting(tmp_path, attach=True, repair=True)) as store:
        assert store.has_applied(Push(3, 7))
        store.forget_pushes()
        assert not store.has_applied(Push(3, 1))
