"""Rows read where they lie, and gradients summed while rows move: the same bits as by way of copies and totals."""

import math

import numpy as np
import pytest
import torch

import girih
from girih.data import Batch
from girih.errors import NonFiniteError
from girih.sparse.groups import bags, shards
from girih.sparse.halves.local import LocalSparse
from girih.sparse.options import StoreOptions
from girih.sparse.spec import SparseSpec
from support.votes import push

SIZE = 300


def half_of(num_shards, optimizer, *, dtype="float32", pooling="sum", first_order=True, sequence=False):
    tables = [girih.Table(name="shared", dim=19, dtype=dtype), girih.Table(name="own", dim=19, dtype=dtype)]
    names = ["shared", "own", "shared"]
    features = [girih.Categorical(name=f"f{i}", table=t, pooling=pooling) for i, t in enumerate(names)]
    wanted = {"embedding", "first_order"} if first_order else {"embedding"}
    needs = {feature.name: frozenset(wanted) for feature in features}
    if sequence:
        features.append(girih.Sequence(name="s", table="own"))
        needs["s"] = frozenset({"sequence"})
    schema = girih.Schema(features, "y", tables=tables)
    store = StoreOptions(shards=num_shards)
    return LocalSparse(SparseSpec(schema=schema, needs=needs, optimizer=optimizer, store=store, seed=5))


def batch_of(rng, num_features, *, most, weighted, cardinality):
    lengths = np.ones(num_features * SIZE, int) if most == 1 else rng.integers(0, most, num_features * SIZE)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = rng.integers(-cardinality, cardinality, offsets[-1])
    nothing = np.empty((SIZE, 0), np.float32)
    weights = rng.normal(size=len(ids)).astype(np.float32) if weighted else None
    return Batch(ids=ids, offsets=offsets, numeric=nothing, labels=nothing, weights=weights)


def leaves_of(embeddings):
    blocks = [block.values for block in (*embeddings.blocks, *embeddings.first_order)]
    return blocks + [sequence.values for sequence in embeddings.sequences.values()]


def trained(monkeypatch, copied_bytes, half, num_features, **options):
    """What three steps read, and the rows after them, with a threshold that always or never takes the direct way."""
    monkeypatch.setattr(shards, "COPIED_BYTES", copied_bytes)
    rng, found = np.random.default_rng(3), []
    for number in range(1, 4):
        batch = batch_of(rng, num_features, **options)
        pulled = half.pull(batch)
        leaves = leaves_of(pulled.wait())
        found += [leaf.detach().clone() for leaf in leaves]
        for leaf in leaves:
            leaf.grad = torch.from_numpy(rng.normal(size=leaf.shape).astype(np.float32))
        push(pulled, number)
        found += [leaf.detach().clone() for leaf in leaves_of(half.peek(batch).wait())]
    return found


OPTIMIZERS = [girih.optim.RowwiseAdagrad(lr=0.1), girih.optim.Adam(lr=0.1), girih.optim.SGD(lr=0.1, l2=0.01)]
BAGS = [(1, False, "sum"), (9, False, "mean"), (9, True, "sqrtn"), (9, False, "sum"), (9, True, "sum")]
OPTIONS = [{}, {"first_order": False}, {"sequence": True}, {"dtype": "bfloat16"}]
# each kind of bags with each of the options; optimizers and numbers of shards take turns
CASES = [
    (*of_bags, options, OPTIMIZERS[(b + o) % 3], 1 + 2 * ((b + o // 2) % 2))
    for b, of_bags in enumerate(BAGS)
    for o, options in enumerate(OPTIONS)
]


@pytest.mark.parametrize(
    ("most", "weighted", "pooling", "options", "optimizer", "num_shards"),
    CASES,
    ids=lambda value: type(value).__name__ if hasattr(value, "lr") else str(value),
)
def test_direct_and_by_way_of_copies(monkeypatch, most, weighted, pooling, options, optimizer, num_shards):
    num_features = 3 + options.get("sequence", False)
    given = {"most": most, "weighted": weighted, "cardinality": 400}
    both = [
        trained(
            monkeypatch,
            copied_bytes,
            half_of(num_shards, optimizer, pooling=pooling, **options),
            num_features,
            **given,
        )
        for copied_bytes in (math.inf, -1)
    ]
    for one, other in zip(*both, strict=True):
        assert torch.equal(one, other)


def test_rows_are_copied_up_to_so_many_bytes_and_narrow_ones_longer():
    most = 20 * 2**20 // (4 * 64)
    assert shards.copied(most, 64)
    assert not shards.copied(most + 1, 64)
    assert not shards.copied(most // 2 + 1, 128)
    assert shards.copied(4 * most, 32)
    assert not shards.copied(4 * most + 1, 32)


def test_rows_that_are_more_than_are_copied_go_the_direct_way(monkeypatch):
    monkeypatch.setattr(shards, "COPIED_BYTES", 4 * 19 * 20 * 19 / shards.WIDE)  # twenty rows
    calls = []
    whole = bags.BagPooler.scatter
    monkeypatch.setattr(bags.BagPooler, "scatter", lambda *given: calls.append("scatter") or whole(*given))
    half = half_of(1, girih.optim.SGD(lr=0.1))
    for cardinality, expected in ((10**9, []), (3, ["scatter"])):
        rng = np.random.default_rng(0)
        pulled = half.pull(batch_of(rng, 3, most=5, weighted=False, cardinality=cardinality))
        for leaf in leaves_of(pulled.wait()):
            leaf.grad = torch.ones_like(leaf)
        push(pulled, half.last_step + 1)
        assert calls == expected


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_what_is_not_finite_or_would_not_stay_so_is_refused(monkeypatch, bad):
    monkeypatch.setattr(shards, "COPIED_BYTES", -1)
    half = half_of(1, girih.optim.SGD(lr=0.1))
    batch = batch_of(np.random.default_rng(0), 3, most=1, weighted=False, cardinality=10**9)
    before = [leaf.clone() for leaf in leaves_of(half.pull(batch).wait())]
    batch.ids[SIZE : SIZE + 2] = 5  # of f1, whose table no other feature has
    pulled = half.pull(batch)
    for leaf in leaves_of(pulled.wait()):
        leaf.grad = torch.zeros_like(leaf)
    leaf.grad[:2, 1] = bad  # the sum of two is infinite
    with pytest.raises(NonFiniteError, match="f1"):
        push(pulled, 2)
    after = leaves_of(half.peek(batch).wait())
    assert torch.equal(after[0][5:], before[0].detach()[5:])
