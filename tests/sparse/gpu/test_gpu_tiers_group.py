"""The sparse half with the hottest rows in GPU memory: the conformance suite, and each batch beside rows that all are there."""

import numpy as np
import pytest
import torch
from test_gpu_group import batch_of as batch_of_ids
from test_gpu_group import edge_cases, groups_of, some_batch

import girih
from girih.kernels.gpu import jit
from girih.sparse.groups.gpu_group import GpuGroup
from girih.sparse.halves.local import LocalSparse
from girih.sparse.options import StoreOptions
from girih.store import Store, Tiers
from girih.store.gpu.options import Gpu, GpuTier
from support import cases
from support.sparse_suite import SparseHalfSuite
from support.store_verbs import by_key


@pytest.fixture(autouse=True)
def few_slots(monkeypatch):
    """Slots for the rows of two batches, so that rows come and go."""
    monkeypatch.setattr("girih.store.gpu.gpu_slots._FIRST_STAGED", 4)


class TestTieredHalf(SparseHalfSuite):
    def make(self):
        store = StoreOptions(tiers=("gpu", "dram"), hot_rows=6, warm_up_steps=1, flush_every_steps=2)
        return LocalSparse(cases.spec(store=store), micro_batches=3, ahead=True)


def train(group, batches, *, ahead):
    """Trains, each batch prepared while the one before is computed where ``ahead``; returns all outputs."""
    outputs, found = [], None
    for step, batch in enumerate(batches, start=1):
        read, fill = group.lookup(batch, step, train=True, keys=found)
        fill(slice(0, batch.num_examples))
        if ahead and step < len(batches):
            found = group.find(batches[step])
            group.fetch(found)
        else:
            found = None
        outputs += [output.clone() for output in read.outputs]
        rng = np.random.default_rng(step)
        given = [rng.normal(size=output.shape).astype(np.float32) for output in read.outputs]
        there = [torch.from_numpy(each.reshape(-1, each.shape[-1])).to(jit.device()) for each in given]
        sums = group.gradients(read, there, batch)
        assert sums.nonfinite_key == -1
        group.apply(read, sums, step, 0.7)
    return outputs


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("hot_rows", "ahead", "dtype", "optimizer"),
    [
        (0, True, "bfloat16", girih.optim.Adam(lr=0.1)),
        pytest.param(
            25, True, "float32", girih.optim.SGD(lr=0.1, momentum=0.9, l2=0.01), marks=pytest.mark.smoke
        ),
        (25, False, "float16", girih.optim.FTRL(l1=0.01)),
        (10_000, True, "float32", girih.optim.RowwiseAdagrad(lr=0.1)),
    ],
    ids=str,
)
def test_any_hot_size_is_all_in_gpu_memory_bit_for_bit(hot_rows, ahead, dtype, optimizer):
    group = groups_of(optimizer, dtype)
    batches = [some_batch(3, seed, weighted=seed % 2 == 0, num_examples=8, num_ids=60) for seed in range(5)]
    tier = GpuTier(hot_rows=hot_rows, warm_up_steps=2, flush_every_steps=2, chunk_bytes=4096)
    with Store(group.spec, arena=Gpu(chunk_bytes=4096)) as one, Store(group.spec, gpu_tier=tier) as several:
        expected = train(GpuGroup(group, [one]), batches, ahead=ahead)
        assert_equal(train(GpuGroup(group, [several]), batches, ahead=ahead), expected)
        assert by_key(several) == by_key(one)
        assert several.counters() == one.counters()
        reads = several.tier_counters()
        assert sum(reads.values()) == several.counters()["hits"]
        if hot_rows == 10_000:
            assert reads["dram_reads"] == 0
        elif not ahead:
            assert reads["gpu_reads"] > 0 or hot_rows == 0


def test_three_tiers_are_one_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr("girih.store.tiers.slot_memory._FIRST_STAGED", 8)
    group = groups_of(girih.optim.Adam(lr=0.1))
    batches = [some_batch(3, seed, num_examples=10, num_ids=200) for seed in range(5)]
    tier = GpuTier(hot_rows=10, warm_up_steps=2, flush_every_steps=2)
    below = Tiers(directory=tmp_path, hot_rows=20, warm_up_steps=2, flush_every_steps=2)
    with (
        Store(group.spec, arena=Gpu(chunk_bytes=4096)) as one,
        Store(group.spec, gpu_tier=tier, tiers=below) as several,
    ):
        expected = train(GpuGroup(group, [one]), batches, ahead=True)
        assert_equal(train(GpuGroup(group, [several]), batches, ahead=True), expected)
        assert by_key(several) == by_key(one)
        assert several.tier_counters()["ssd_reads"] > 0


@pytest.mark.parametrize("case", ["one id a million times", "empty bags", "all ids new"])
def test_edges(case, monkeypatch):
    monkeypatch.setattr("test_gpu_group.MANY", 2_000)
    lengths, ids = edge_cases()[case]
    batch = batch_of_ids(lengths, ids, weighted=False, seed=0)
    group = groups_of(girih.optim.SGD(lr=1e-3))
    with (
        Store(group.spec, arena=Gpu(chunk_bytes=4096)) as one,
        Store(group.spec, gpu_tier=GpuTier(hot_rows=0, chunk_bytes=4096)) as several,
    ):
        expected = train(GpuGroup(group, [one]), [batch, batch], ahead=True)
        assert_equal(train(GpuGroup(group, [several]), [batch, batch], ahead=True), expected)
        assert by_key(several) == by_key(one)


@pytest.mark.smoke
def test_a_gradient_that_is_not_finite_moves_no_row():
    group = groups_of()
    with Store(group.spec, gpu_tier=GpuTier(hot_rows=0, chunk_bytes=4096)) as store:
        gpu, batch = GpuGroup(group, [store]), some_batch(1, 1)
        read, fill = gpu.lookup(batch, 1, train=True)
        fill(slice(0, batch.num_examples))
        before = by_key(store)
        given = [torch.zeros_like(output).reshape(-1, output.shape[-1]) for output in read.outputs]
        given[0][5, 2] = float("nan")
        found = gpu.gradients(read, given, batch)
        gpu.apply(read, found, 1, 1.0)
        assert found.nonfinite_key >= 0
        assert by_key(store) == before
