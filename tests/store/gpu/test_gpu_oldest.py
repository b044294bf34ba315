"""Rows that leave a full or an expiring table: the CPU's, found without a look at all rows for each step."""

import numpy as np
import pytest

from girih.store import Store
from girih.store.gpu import oldest
from girih.store.gpu.options import Gpu
from girih.tables import LRU, TTL
from girih.testing.store_verbs import by_key, group, look

STEPS = 18


def used_in(step):
    """Ids of a step, some of them old ones."""
    rng = np.random.default_rng(step)
    return np.unique(np.concatenate([rng.integers(0, 40, 6), rng.integers(0, 10_000, 10)]))


@pytest.mark.parametrize(
    ("eviction", "least"),
    [
        (LRU(max_rows=60), 4),
        (LRU(max_rows=60), 4096),
        (TTL(steps=6), 4096),
        (TTL(steps=8, max_rows=60), 4),
    ],
    ids=["lru, a part in the queue", "lru, all rows in it", "ttl, all rows in it", "both, a part in it"],
)
def test_those_leave_that_leave_on_a_cpu(monkeypatch, eviction, least):
    looks = []
    original = oldest.Oldest._look
    monkeypatch.setattr(oldest, "_LEAST", least)
    monkeypatch.setattr(oldest.Oldest, "_look", lambda *given: (looks.append(None), original(*given)))
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
