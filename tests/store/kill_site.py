"""Shards whose writers are killed amid verbs, attached to, repaired, and held against a dictionary.

Run as a process of its own, with one thread, which forks the writers: ``python kill_site.py KIND DIRECTORY SEED ...`` prints what
became of each seed's writer. Compiled, verbs are killed at a random moment; as plain Python, at a random line of the store while the
arena says that a verb changes it.
"""

import contextlib
import copy
import json
import mmap
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from girih.errors import ConfigError
from girih.kernels.cpu import index, layout
from girih.kernels.cpu.jit import JIT_DISABLED
from girih.store import File, GroupSpec, Keys, Push, RowUpdate, Shared, Store, TableSpec, remove_arena
from girih.store.memory import shard_memory
from girih.store.memory.arena import _WRITING_AT
from girih.tables import LFU, LRU, TTL, Fixed, MinCount, Normal, Probability
from support.fake_store import FakeStore
from support.store_verbs import contents, evict, look, peek, taken

sys.path.insert(0, str(Path(__file__).parents[1]))
from store_machine import SEGMENTS

NUM_KEYS, NUM_VERBS = (24, 14) if JIT_DISABLED else (400, 16)
EVICTIONS = [None, Fixed(max_rows=NUM_KEYS), LRU(max_rows=NUM_KEYS), LFU(max_rows=NUM_KEYS), TTL(steps=2)]
EVICTIONS += [TTL(steps=3, max_rows=NUM_KEYS), LRU(max_rows=4 * NUM_KEYS)]
ADMISSIONS = [None, None, None, MinCount(count=2, cells=5000), Probability(p=0.7)]
NOW = 1_800_000_000.5
STORE = str(Path(shard_memory.__file__).parents[1])
KERNELS = str(Path(index.__file__).parent)
BEGUN, ENDED = range(2)


def spec_of(rng):
    segments = rng.choice(SEGMENTS)
    tables = tuple(
        TableSpec(
            name, tuple(Normal(std=0.5) for _ in segments), rng.choice(ADMISSIONS), rng.choice(EVICTIONS)
        )
        for name in ("first", "second")
    )
    return GroupSpec(
        "group",
        tables,
        segments,
        rng.choice(["float32", "float32", "bfloat16", "float16"]),
        seed=rng.randrange(4),
    )


def verbs_of(spec, rng):
    """[(name, ids, tables, seed, step)]: what a writer does, whoever it is."""
    verbs, step = [], 1
    for number in range(NUM_VERBS):
        draw = np.random.default_rng(rng.randrange(1 << 30))
        most = 3 * NUM_KEYS if number % 7 else 100 * NUM_KEYS  # now and then all keys are new
        ids = np.unique(draw.integers(-most, most, NUM_KEYS))
        tables = (ids % 2).astype(np.int32)
        order = np.argsort(tables, kind="stable")
        step += rng.random() < 0.5
        name = rng.choice(["look", "look", "look", "push", "push", "push", "assign", "evict", "save"])
        if name == "push" and verbs and rng.random() < 0.8:  # those that were read
            ids, tables = verbs[-1][1:3]
        else:
            ids, tables = ids[order], tables[order]
        verbs.append((name, ids, tables, number, step))
    return verbs


def do(store, verb, saves=None):
    name, ids, tables, number, step = verb
    draw = np.random.default_rng(number)
    values = draw.normal(size=(len(ids), store.spec.dim)).astype(np.float32)
    real = isinstance(store, Store)
    if name == "look":
        look(store, ids, tables, step, counts=1 + ids % 3)
    elif name == "push":
        if real:
            rows = None if number % 2 else store.peek(Keys(ids, tables), np.empty_like(values))
            store.apply_gradients(
                Keys(ids, tables, rows=rows), RowUpdate(values, step, push=Push(number % 3, number + 1))
            )
        else:
            store.apply_gradients(Keys(ids, tables), RowUpdate(values, step))
    elif name == "assign":
        with contextlib.suppress(ConfigError):  # full
            store.assign(Keys(ids, tables), values)
    elif name == "evict":
        evict(store, ids[::3], tables[::3])
    elif (
        saves is not None
    ):  # a save is begun, or read and ended: what verbs keep for it lies outside the arena
        if saves:
            snapshot, chunks = saves.pop()
            list(chunks)
            snapshot.close()
        else:
            snapshot = store.snapshot()
            saves.append((snapshot, snapshot.chunks()))


def write(spec, verbs, arena, counts, killed_verb, when, wake):
    """The writer: never returns."""
    lines = [when]

    def trace(frame, event, argument):
        if not frame.f_code.co_filename.startswith((STORE, KERNELS)):
            return None
        lines[0] -= event == "line" and mark[0] != 0
        if lines[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    store, saves = Store(spec, arena=arena, clock=lambda: NOW), []
    mark = store.state.memory.arena._header[_WRITING_AT:]
    for number, verb in enumerate(verbs):
        if number == killed_verb:
            if JIT_DISABLED:
                sys.settrace(trace)
            else:
                os.write(wake, b"!")
        counts[BEGUN] = number + 1
        do(store, verb, saves)
        counts[ENDED] = number + 1
    os._exit(0)


def rows_of(store):
    """For each table {id: (numbers, meta)}, in the order of its list if it has one."""
    found = [{} for _ in store.spec.tables]
    if not store.num_rows:
        return found
    columns = contents(store)
    values = peek(store, columns["ids"], columns["tables"])
    states = [columns[name] for name in columns if "." in name]
    for i, (key_id, table) in enumerate(
        zip(columns["ids"].tolist(), columns["tables"].tolist(), strict=True)
    ):
        assert key_id not in found[table], "a key has two rows"
        numbers = np.concatenate([values[i], *(np.ravel(state[i]) for state in states)])
        found[table][key_id] = numbers, tuple(int(columns[n][i]) for n in ("last_used", "counts", "versions"))
    return found


def rows_of_model(model):
    return [
        {
            key_id: (
                np.concatenate([row.value, *(np.ravel(v) for state in row.state for v in state.values())]),
                (row.last_used, row.count, row.version),
            )
            for key_id, row in rows.items()
        }
        for rows in model.tables
    ]


def same(left, right):
    return np.isclose(left, right, rtol=1e-5, atol=1e-6)


def equal(found, expected, spec):
    for (mine, theirs), table in zip(zip(found, expected, strict=True), spec.tables, strict=True):
        order = list if listed(table) else sorted
        if order(mine) != order(theirs):
            return False
        if not all(same(mine[k][0], theirs[k][0]).all() and mine[k][1] == theirs[k][1] for k in mine):
            return False
    return True


def listed(table):
    return table.eviction is not None and table.eviction.name not in ("none", "fixed")


def check_whole(store):
    """Index, lists, free rows and counts agree with the rows."""
    arrays = store.state.memory.arrays
    ever = int(arrays.state[layout.ROWS_EVER])
    tables = arrays.meta[:ever, layout.TABLE]
    live = np.flatnonzero(tables >= 0).astype(np.int32)
    rows = np.empty(len(live), np.int32)
    index.find_all(arrays, arrays.keys[live, 0].copy(), tables[live].copy(), rows)
    np.testing.assert_array_equal(rows, live)
    assert np.count_nonzero(arrays.slots) + np.count_nonzero(arrays.next_slots) == len(live) == store.num_rows
    free, row = set(), int(arrays.state[layout.FREE_ROW])
    while row >= 0:
        assert row not in free
        free.add(row)
        row = int(arrays.meta[row, layout.OLDER])
    assert free == set(np.flatnonzero(tables < 0).tolist())
    for table, spec in enumerate(store.spec.tables):
        mine = live[tables[live] == table]
        assert store.num_rows_of(table) == len(mine)
        if listed(spec):
            for first, link in ((layout.OLDEST, layout.NEWER), (layout.NEWEST, layout.OLDER)):
                walked, row = [], int(arrays.tables[table, first])
                while row >= 0:
                    walked.append(row)
                    assert len(walked) <= len(mine)
                    row = int(arrays.meta[row, link])
                assert sorted(walked) == mine.tolist()


def check_push(store, found, before, after, verb):
    """A push that was cut short moved the rows of its first keys, and goes on behind them when it is sent again."""
    _, ids, tables, number, _ = verb
    push, torn = Push(number % 3, number + 1), store.repaired.torn
    cut = {each.push: each.done for each in store.repaired.cut}
    done = cut.get(push, len(ids) if store.state.memory.pushes.last(push.lane) == push.number else 0)
    expected = copy.deepcopy(before)
    for position, (key_id, table) in enumerate(zip(ids.tolist(), tables.tolist(), strict=True)):
        if key_id not in before[table]:
            continue
        if (key_id, table) == torn:
            assert position == done - 1
            (old, _), (new, _), (numbers, meta) = (rows[table][key_id] for rows in (before, after, found))
            assert (same(numbers, old) | same(numbers, new)).all()
            expected[table][key_id] = numbers, meta
        elif position < done:
            expected[table][key_id] = after[table][key_id]
    assert equal(found, expected, store.spec)
    do(store, verb)
    do(store, verb)  # and once more: nothing moves
    again = rows_of(store)
    if torn is not None:
        after = copy.deepcopy(after)
        after[torn[1]][torn[0]] = found[torn[1]][torn[0]]
    assert equal(again, after, store.spec)
    return done


def check_between(store, found, before, after, verb, initial):
    """Rows of a verb that was cut short are those from before it or from behind it; one that was to stay is there."""
    torn, (name, ids, tables, _, _) = store.repaired.torn, verb
    looked = set(zip(ids.tolist(), tables.tolist(), strict=True)) if name == "look" else set()
    assert torn is None or verb[0] == "assign"
    for table, spec in enumerate(store.spec.tables):
        mine, old, new = found[table], before[table], after[table]
        assert mine.keys() <= old.keys() | new.keys()
        for key_id in old.keys() & new.keys() - mine.keys():
            (_, count, version), (_, count_then, version_then) = new[key_id][1], old[key_id][1]
            stayed = count_then + (1 + key_id % 3 if (key_id, table) in looked else 0), version_then
            assert (count, version) != stayed, (
                "a row is lost"
            )  # else it left, and came again with a count of its own
        for key_id, (numbers, meta) in mine.items():
            choices = [rows[key_id] for rows in (old, new) if key_id in rows]
            assert all(value in [choice[1][n] for choice in choices] for n, value in enumerate(meta))
            agree = [same(numbers, choice[0]) for choice in choices]
            if (key_id, table) == torn:
                continue
            # else a row was made to be assigned to, and was not yet
            if not any(each.all() for each in agree):
                assert verb[0] == "assign"
                assert key_id not in old
                assert same(numbers[: store.spec.dim], initial(key_id, table)).all()
        if listed(spec):
            check_order(list(mine), list(old), list(new))


def check_order(mine, old, new):
    """The rows that the verb had not yet moved, as they were, and then those that it had, as they were to be."""
    ranks = [{key: rank for rank, key in enumerate(keys)} for keys in (old, new)]
    last = [-1, -1]
    split = 0
    while split < len(mine) and mine[split] in ranks[0] and ranks[0][mine[split]] > last[0]:
        last[0] = ranks[0][mine[split]]
        split += 1
    rest = mine[split:]
    assert all(key in ranks[1] for key in rest)
    assert [ranks[1][key] for key in rest] == sorted(ranks[1][key] for key in rest)


def check_goes_on(store, verbs):
    """A repaired shard does what one does that took its rows."""
    twin = Store(store.spec, clock=lambda: NOW)
    twin.restore([taken(store)])
    assert twin.counters() == store.counters()
    for verb in verbs:
        for each in (store, twin):
            do(each, verb)
        assert equal(rows_of(store), rows_of(twin), store.spec)
        assert store.counters() == twin.counters()
        check_whole(store)


def play(kind, directory, seed):
    """Returns what became of one writer."""
    shard_memory._FIRST_SLOTS = 16
    rng = random.Random(seed)
    spec = spec_of(rng)
    verbs = verbs_of(spec, rng)
    name = f"girih-test-{os.getpid()}-{seed}"
    where = {"segment": name} if kind == "shared" else {"path": f"{directory}/{name}"}
    make = Shared if kind == "shared" else File
    arena = make(**where, reserve_rows=100_000)
    counts = np.frombuffer(mmap.mmap(-1, 4096), np.int64)
    killed_verb, when = rng.randrange(len(verbs) // (1 if JIT_DISABLED else 2)), rng.random()
    waking, wake = os.pipe()
    writer = os.fork()
    if not writer:
        try:
            write(spec, verbs, arena, counts, killed_verb, int(3000**when), wake)
        finally:
            os._exit(3)
    os.close(wake)
    if not JIT_DISABLED:
        os.read(waking, 1)
        time.sleep(0.001 * when)
        os.kill(writer, signal.SIGKILL)
    os.close(waking)
    _, status = os.waitpid(writer, 0)
    assert status in (0, signal.SIGKILL), status
    try:
        with Store(spec, arena=make(**where, attach=True, repair=True), clock=lambda: NOW) as store:
            return check(store, verbs, counts)
    finally:
        remove_arena(arena)


def check(store, verbs, counts):
    check_whole(store)
    found, model = rows_of(store), FakeStore(store.spec, clock=lambda: NOW)
    begun, ended = int(counts[BEGUN]), int(counts[ENDED])
    for verb in verbs[:ended]:
        do(model, verb)
    before, counters = rows_of_model(model), [model.counters()]
    what = {
        "verb": verbs[begun - 1][0],
        "torn": 0,
        "unmade": 0,
        "done": 0,
        "amid": store.repaired is not None,
    }
    if begun > ended:
        do(model, verbs[ended])
    after = rows_of_model(model)
    counters.append(model.counters())

    def initial(key_id, table):
        return model._initial(table, key_id)

    if store.repaired is None:
        assert any(
            equal(found, rows, store.spec) and store.counters() in counters for rows in (before, after)
        )
    else:
        assert begun > ended, "a mark was left behind"
        what |= {"torn": int(store.repaired.torn is not None), "unmade": store.repaired.num_unmade}
        if what["verb"] == "push":
            what["done"] = check_push(store, found, before, after, verbs[ended])
        else:
            check_between(store, found, before, after, verbs[ended], initial)
    check_goes_on(
        store, [(n, i, t, s + 1000, p + 100) for n, i, t, s, p in verbs[: 4 if JIT_DISABLED else 6]]
    )
    return what


if __name__ == "__main__":
    kind, directory, *seeds = sys.argv[1:]
    for seed in map(int, seeds):
        try:
            print(json.dumps({"seed": seed, **play(kind, directory, seed)}), flush=True)
        except BaseException:
            print(f"seed {seed}", file=sys.stderr)
            raise
