"""Shards on threads: large batches, which are shared, give what one shard gives, to the last bit."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

import girih
from girih import models
from girih.data import Batch
from girih.errors import ConfigError
from girih.kernels.cpu.dedup import MAX_NUMBER
from girih.sparse.groups.shards import FEW_IDS, run_parts
from girih.sparse.halves.local import LocalSparse
from girih.sparse.options import MOST_THREADS, StoreOptions
from girih.sparse.spec import SparseSpec
from girih.tables import LRU, Table
from girih.training.specs import sparse_spec
from support.votes import push

SIZE, DIM = 512, 20


def sparse_of(num_tables, shards, *, first_order=True, sequence=False):
    features = [girih.Categorical(name=f"f{i}", table=f"t{i % num_tables}", dim=DIM) for i in range(5)]
    needs = {
        f.name: frozenset({"embedding", "first_order"} if first_order else {"embedding"}) for f in features
    }
    if sequence:
        features.append(girih.Sequence(name="s", table="t0", dim=DIM))
        needs["s"] = frozenset({"sequence"})
    schema = girih.Schema(features, "y")
    optimizer = girih.optim.Adagrad(lr=0.1)
    store = StoreOptions(shards=shards)
    return LocalSparse(SparseSpec(schema=schema, needs=needs, optimizer=optimizer, store=store, seed=3))


def batch_of(rng, num_features, weighted):
    lengths = rng.integers(0, 9, num_features * SIZE)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = rng.zipf(1.3, offsets[-1]).astype(np.int64)
    assert len(ids) > FEW_IDS
    nothing = np.empty((SIZE, 0), np.float32)
    weights = rng.normal(size=len(ids)).astype(np.float32) if weighted else None
    return Batch(ids=ids, offsets=offsets, numeric=nothing, labels=nothing, weights=weights)


def leaves_of(embeddings):
    blocks = [block.values for block in (*embeddings.blocks, *embeddings.first_order)]
    return blocks + [sequence.values for sequence in embeddings.sequences.values()]


@pytest.mark.parametrize("num_tables", [1, 2, 5])
@pytest.mark.parametrize("shards", [2, 3, 8, 20])
@pytest.mark.parametrize(("first_order", "sequence", "weighted"), [(True, False, False), (False, True, True)])
def test_any_number_of_shards(num_tables, shards, first_order, sequence, weighted):
    options = {"first_order": first_order, "sequence": sequence}
    one, many = sparse_of(num_tables, 1, **options), sparse_of(num_tables, shards, **options)
    rng = np.random.default_rng(num_tables)
    for number in range(1, 4):
        batch = batch_of(rng, 5 + sequence, weighted)
        pulled = [half.pull(batch) for half in (one, many)]
        for a, b in zip(*(leaves_of(p.wait()) for p in pulled), strict=True):
            assert torch.equal(a, b)
            a.grad = torch.from_numpy(rng.normal(size=a.shape).astype(np.float32))
            b.grad = a.grad.clone()
        for part in pulled:
            push(part, number)
    last = [leaves_of(half.peek(batch).wait()) for half in (one, many)]
    assert all(torch.equal(a, b) for a, b in zip(*last, strict=True))
    assert one.stats() == many.stats()


def test_numbers_of_keys_begin_anew_before_they_end():
    one, other = sparse_of(2, 1), sparse_of(2, 1)
    rng = np.random.default_rng(0)
    for step in range(3):
        batch = batch_of(rng, 5, weighted=False)
        if step:
            one.groups[0]._keys._dedups[0]._base = MAX_NUMBER - 10
        pulled = [leaves_of(half.pull(batch).wait()) for half in (one, other)]
        assert all(torch.equal(a, b) for a, b in zip(*pulled, strict=True))
        assert one.stats() == other.stats()
    assert one.groups[0]._keys._dedups[0]._base < MAX_NUMBER // 2


def test_what_one_thread_finds_reaches_the_caller_when_all_are_done(monkeypatch):
    sparse = sparse_of(2, 2)
    pool = sparse.groups[0]._keys.pool
    done = []

    def work(part):
        if part == 0:
            raise MemoryError("of the first")
        torch.zeros(1 << 22).exp()
        done.append(part)

    with pytest.raises(MemoryError, match="of the first"):
        run_parts(pool, 2, work, FEW_IDS)
    assert done == [1]


def test_shards_by_default(monkeypatch):
    plain, bounded = (
        LocalSparse(sparse_spec(models.DNN(schema), schema, girih.TrainOptions(), None, None, None))
        for schema in (
            girih.Schema([girih.Categorical(name="a", dim=4)], "y"),
            girih.Schema(
                [girih.Categorical(name="a", table="a", dim=4)],
                "y",
                [Table(name="a", dim=4, eviction=LRU(max_rows=9))],
            ),
        )
    )
    assert len(list(plain.stores())) == min(torch.get_num_threads(), MOST_THREADS)
    assert len(list(bounded.stores())) == 1
    assert StoreOptions(reserve_rows=100).num_shards([]) == 1
    assert StoreOptions(shards=5).num_shards([]) == 5


def test_more_keys_than_numbers_are_refused(monkeypatch):
    batch = batch_of(np.random.default_rng(0), 5, False)
    monkeypatch.setattr("girih.kernels.cpu.dedup.MAX_NUMBER", 3 * len(batch.ids) - 1)
    for shards, told in (
        (2, None),
        (3, rf"group .*: {len(batch.ids):,} ids in one batch × 3 shards, expected at most"),
    ):
        half = sparse_of(2, shards)
        with pytest.raises(ConfigError, match=told) if told else nullcontext():
            half.pull(batch)
        half.close()
