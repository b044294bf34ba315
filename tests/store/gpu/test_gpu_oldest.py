"""Rows that leave a full or an expiring table: the CPU's, found without a look at all rows for each step."""

import numpy as np
import pytest

from girih.store import Store
from girih.store.gpu import eviction as least_used
from girih.store.gpu import eviction as oldest
from girih.store.gpu.options import Gpu
from girih.tables import LFU, LRU, TTL
from support.store_verbs import by_key, group, look

STEPS = 18


def used_in(step):
    """Ids of a step, some of them old ones."""
    rng = np.random.default_rng(step)
    return np.unique(np.concatenate([rng.integers(0, 40, 6), rng.integers(0, 10_000, 10)]))


@pytest.mark.parametrize(
    ("eviction", "least"),
    [
        pytest.param(LRU(max_rows=60), 4, marks=pytest.mark.smoke),
        (LRU(max_rows=60), 4096),
        (TTL(steps=6), 4096),
        (TTL(steps=8, max_rows=60), 4),
        (LFU(max_rows=60), 4),
        (LFU(max_rows=60), 4096),
    ],
    ids=[
        "lru, a part in the queue", "lru, all rows in it", "ttl, all rows in it", "both, a part in it",
        "lfu, a part in it", "lfu, all rows in it",
    ],
)  # fmt: skip
def test_those_leave_that_leave_on_a_cpu(monkeypatch, eviction, least):
    looks = []
    for module, queue in ((oldest, oldest.Oldest), (least_used, least_used.LeastUsed)):
        monkeypatch.setattr(module, "_LEAST", least)
        original = queue._look
        noted = lambda *given, original=original: (looks.append(None), original(*given))  # noqa: E731
        monkeypatch.setattr(queue, "_look", noted)
    spec = group(("t", "u"), eviction=eviction)
    with Store(spec, arena=Gpu(chunk_bytes=4096, reserve_rows=20_000)) as gpu, Store(spec) as cpu:
        for step in range(1, STEPS + 1):
            ids = used_in(step)
            tables = np.sort(ids % 2).astype(np.int32)
            for store in (gpu, cpu):
                look(store, ids, tables, step)
            if step % 6 == 0:
                assert by_key(gpu).keys() == by_key(cpu).keys()
        counters = [store.counters() for store in (gpu, cpu)]
        gone = {name: counters[0][name] for name in ("evicted", "expired")}
        assert gone == {name: counters[1][name] for name in gone}
        assert sum(gone.values()) > STEPS
    if least > 100:
        assert len(looks) < STEPS  # there are two tables


def test_shares_leave_by_lfu_without_a_look_at_all_rows_for_each(monkeypatch):
    """Ids whose counts differ, beside another table whose rows take numbers off the same free list."""
    counted = {"_look": 0, "first": 0}
    monkeypatch.setattr(least_used, "_LEAST", 4)
    for name in counted:
        original = getattr(least_used.LeastUsed, name)

        def noted(*given, name=name, original=original):
            counted[name] += 1
            return original(*given)

        monkeypatch.setattr(least_used.LeastUsed, name, noted)
    spec = group(("t", "u"), eviction=LFU(max_rows=320))
    with Store(spec, arena=Gpu(chunk_bytes=4096, reserve_rows=20_000)) as gpu, Store(spec) as cpu:
        for step in range(1, 26):
            rng = np.random.default_rng(step)
            ids = np.unique(np.concatenate([rng.zipf(1.2, 60) % 500, rng.integers(0, 10_000, 40)]))
            tables = np.sort(ids % 2).astype(np.int32)
            rows = [
                look(store, ids, tables, step, counts=1 + (ids % 3).astype(np.int32))[0]
                for store in (gpu, cpu)
            ]
            np.testing.assert_array_equal(rows[0] < 0, rows[1] < 0)
            if step == 15:  # some leave that are no share
                for store, own in zip((gpu, cpu), rows, strict=True):
                    store.state.rows.drop(own[::5].copy())
            assert by_key(gpu).keys() == by_key(cpu).keys()
        assert gpu.counters() == cpu.counters()
    assert counted["first"] >= 12
    assert counted["_look"] <= counted["first"] // 2
